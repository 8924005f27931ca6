"""Pipeline files: converts YAML to a checked graph of stages and edges.

Each error in a file is reported with its file, line and remedy.
"""

from stagemesh.orchestrator.spec.checks.stages import Catalog
from stagemesh.orchestrator.spec.load import load_pipeline
from stagemesh.orchestrator.spec.model import (
    Edge,
    ExplainedValue,
    Pipeline,
    PipelineOutput,
    Route,
    Stage,
)
from stagemesh.orchestrator.spec.schema import Bounds, Limits
from stagemesh.orchestrator.spec.source.files import built_in_pipelines

__all__ = [
    "Bounds",
    "Catalog",
    "Edge",
    "ExplainedValue",
    "Limits",
    "Pipeline",
    "PipelineOutput",
    "Route",
    "Stage",
    "built_in_pipelines",
    "load_pipeline",
]
