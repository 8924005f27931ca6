"""Pipeline files: from YAML to a validated graph, with every mistake named by file and line."""

from stagemesh.orchestrator.spec.checks.stages import Catalog
from stagemesh.orchestrator.spec.explain import explain
from stagemesh.orchestrator.spec.load import load_pipeline
from stagemesh.orchestrator.spec.model import (
    Bounds,
    Edge,
    ExplainedValue,
    Limits,
    Pipeline,
    PipelineOutput,
    Stage,
)
from stagemesh.orchestrator.spec.routes import Route
from stagemesh.orchestrator.spec.source.files import shipped_pipelines

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
    "explain",
    "load_pipeline",
    "shipped_pipelines",
]
