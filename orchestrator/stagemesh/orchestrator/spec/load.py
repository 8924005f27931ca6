"""From a pipeline file to a validated graph."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import replace

from stagemesh.common import settings
from stagemesh.common.errors import InvalidPipelineError
from stagemesh.common.versions import WIRE_VERSION
from stagemesh.orchestrator.spec.checks.edges import EdgeResolver
from stagemesh.orchestrator.spec.checks.flows import FlowChecker
from stagemesh.orchestrator.spec.checks.limits import resolve_limits
from stagemesh.orchestrator.spec.checks.outputs import OutputResolver
from stagemesh.orchestrator.spec.checks.shape import check_shape
from stagemesh.orchestrator.spec.checks.stages import Catalog, StageResolver
from stagemesh.orchestrator.spec.checks.whens import WhenResolver, pipeline_options
from stagemesh.orchestrator.spec.explain import explain_shape
from stagemesh.orchestrator.spec.graph import topological_order
from stagemesh.orchestrator.spec.model import Pipeline, Stage
from stagemesh.orchestrator.spec.source.document import read_document
from stagemesh.orchestrator.spec.source.files import Source, find_source
from stagemesh.orchestrator.spec.source.origins import Origins
from stagemesh.orchestrator.spec.source.overrides import apply_overrides


def load_pipeline(
    name_or_path: str,
    *,
    variables: Mapping[str, str] | None = None,
    overrides: Mapping[str, str] | None = None,
    check_models: bool = True,
    catalog: Catalog | None = None,
) -> Pipeline:
    """Reads a pipeline by shipped name or path and checks all of it.

    `variables` stand in for the environment; `overrides` are values set from outside ("edges.*.connector": "grpc").
    Raises NotFoundError (UNKNOWN_PIPELINE), or InvalidPipelineError with a line "file:line: what; remedy" for each
    problem.
    """
    source = find_source(name_or_path)
    document = read_document(
        _read(source), file=str(source.path), variables=settings.variables() if variables is None else variables
    )
    apply_overrides(document, overrides or {})
    shape = check_shape(document)
    catalog = catalog or Catalog()
    problems = document.problems
    stages = StageResolver(catalog, problems, check_models, _fetch_hint(source)).resolve(shape)
    outputs = OutputResolver(problems)
    resolved_outputs = outputs.resolve(shape, stages)
    options, ambiguous = pipeline_options(stages, shape.options, problems)
    media = any(stage.signature.media for stage in stages.values())
    whens = WhenResolver(problems, options, ambiguous, shape.outputs, media=media)
    edges = EdgeResolver(catalog, problems, whens).resolve(shape, stages)
    outputs.check_all_used(shape, edges)
    stages = {
        name: replace(stage, when=whens.resolve(("stages", name, "when"), shape.stages[name].when or ()))
        for name, stage in stages.items()
    }
    limits = resolve_limits(shape.limits, problems)
    problems.raise_any()
    order = topological_order(list(stages), {edge.arc for edge in edges})
    stages = {name: stages[name] for name in order}
    FlowChecker(catalog, problems, stages, edges, resolved_outputs).check()
    problems.raise_any()
    return Pipeline(
        name=shape.pipeline,
        generation=_generation(stages),
        stages=stages,
        edges=edges,
        outputs=resolved_outputs,
        options=options,
        limits=limits,
        source=source.path,
        explanation=explain_shape(shape, Origins(document.origin_by_path)),
    )


def _read(source: Source) -> str:
    try:
        return source.path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as exc:
        raise InvalidPipelineError(f"{source.path}:1: cannot be read: {exc}; give a text file in UTF-8") from exc


def _fetch_hint(source: Source) -> str:
    if source.shipped:
        return f"run `stagemesh models fetch {source.path.stem}`"
    return "run `stagemesh models fetch`, or give the path of a folder or file"


def _generation(stages: Mapping[str, Stage]) -> str:
    facts = {stage.name: [stage.engine, stage.model_name, stage.function, stage.options] for stage in stages.values()}
    text = json.dumps([WIRE_VERSION, facts], sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=6).hexdigest()
