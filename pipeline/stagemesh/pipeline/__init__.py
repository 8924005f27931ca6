"""Pipeline files: parses YAML, checks it, and converts it to a graph of stages and edges.

Each error in a file is reported with the file, the line and a remedy.
"""

from stagemesh.pipeline.graph import Edge, Pipeline, PipelineOutput, Route, Stage
from stagemesh.pipeline.kubernetes import kubernetes_hints
from stagemesh.pipeline.load import built_in_pipelines, load_pipeline
from stagemesh.pipeline.schema import Bounds, Limits

__all__ = [
    "Bounds",
    "Edge",
    "Limits",
    "Pipeline",
    "PipelineOutput",
    "Route",
    "Stage",
    "built_in_pipelines",
    "kubernetes_hints",
    "load_pipeline",
]
