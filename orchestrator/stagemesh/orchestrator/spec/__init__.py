"""Pipeline files: parses YAML, checks it, and converts it to a graph of stages and edges.

Each error in a file is reported with the file, the line and a remedy.
"""

from stagemesh.orchestrator.spec.checks.kubernetes import kubernetes_hints
from stagemesh.orchestrator.spec.checks.stages_and_outputs import Catalog
from stagemesh.orchestrator.spec.load import built_in_pipelines, load_pipeline
from stagemesh.orchestrator.spec.model import Edge, Pipeline, PipelineOutput, Route, Stage
from stagemesh.orchestrator.spec.schema import Bounds, Limits

__all__ = [
    "Bounds",
    "Catalog",
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
