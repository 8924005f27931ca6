"""Locates a pipeline file, loads it, and converts it to a checked graph."""

import hashlib
import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict
from difflib import get_close_matches
from importlib.resources import files
from pathlib import Path
from typing import cast

from stagemesh.common.errors import NotFoundError
from stagemesh.common.process import settings
from stagemesh.common.process.media_config import parse_root
from stagemesh.pipeline.condition_resolver import ConditionResolver, merge_options
from stagemesh.pipeline.document import KeyPath, Origin, apply_overrides, dotted, invalid_line, read_document
from stagemesh.pipeline.edge_resolver import EdgeResolver, topological_order
from stagemesh.pipeline.file import check_shape
from stagemesh.pipeline.graph import Edge, ExplainedValue, Pipeline, Stage
from stagemesh.pipeline.kubernetes import check_pods, check_values
from stagemesh.pipeline.possible_requests import check_flows
from stagemesh.pipeline.schema import PipelineFile
from stagemesh.pipeline.sections import check_limits, check_main_stage, check_media, resolve_speech
from stagemesh.pipeline.stage_resolver import OutputResolver, StageResolver, check_all_used, check_factories_and_models
from stagemesh.pipeline.stage_splits import divide_stages

_BUILT_IN_DIR = Path(str(files("stagemesh.pipeline"))) / "built_in"


def built_in_pipelines() -> tuple[str, ...]:
    """Returns the names of the built-in pipelines in alphabetical order."""
    return tuple(sorted(path.stem for path in _BUILT_IN_DIR.glob("*.yaml")))


def load_pipeline(
    name_or_path: str,
    *,
    variables: Mapping[str, str] | None = None,
    overrides: Mapping[str, str] | None = None,
    check_models: bool | Collection[str] = True,
    for_kubernetes: bool = False,
    check_code: bool = False,
) -> Pipeline:
    """Returns the pipeline that a file describes, after all checks.

    `name_or_path` is the name of a built-in pipeline, or the path of a pipeline file or of the chart's values file.

    - `variables` are the values for variables in the file. If None, the environment variables are used.
    - `overrides` replace values of the file, for example {"edges.*.connector": "grpc"}.
    - `check_models` names the stages whose models are looked up, and a missing model of these stages is an error. True
      stands for all stages, and False for none.
    - `for_kubernetes` is True if the rules of the Helm chart are checked, too.
    - `check_code` is True if the code of engines, functions and transforms is imported, and the models' classes are
      looked up.

    Raises NotFoundError (UNKNOWN_PIPELINE) if the pipeline does not exist. Raises InvalidPipelineError if the file is
    invalid. The message of this error has a line "file:line: error; remedy" for each error in the file.
    """
    source = _find_file(name_or_path)
    variables = settings.variables() if variables is None else variables
    document = read_document(_read(source), file=str(source), variables=variables)
    apply_overrides(document, overrides or {})
    if for_kubernetes:
        check_values(document)
    file = divide_stages(document, check_shape(document))
    checked = file.stages if check_models is True else check_models or ()
    problems = document.problems
    stages = StageResolver(problems, checked, _fetch_hint(name_or_path)).resolve(file)
    store_uri = parse_root(file.media.store).uri if file.media is not None and file.media.store else ""
    outputs = OutputResolver(stages, problems, store_uri).resolve(file)
    options, ambiguous = merge_options(stages, file.options, problems)
    media = any(stage.signature.media for stage in stages.values())
    streams = any(edge.is_input for edge in file.edges)
    conditions = ConditionResolver(problems, options, ambiguous, file.outputs, media=media, streams=streams)
    edges = EdgeResolver(problems, conditions).resolve(file, stages)
    check_all_used(file, edges, problems)
    speech = resolve_speech(file, stages, edges, problems)
    stages = _with_roles(stages, file, edges, conditions)
    check_main_stage(file, stages, problems)
    check_limits(file.limits, problems)
    if file.media is not None:
        check_media(file.media, problems, check_packages=bool(check_models))
    if for_kubernetes:
        check_pods(file, problems)
    if check_code:
        check_factories_and_models(file, stages, problems)
    problems.raise_any()
    between = tuple(edge for edge in edges if not edge.is_input)
    stages = {name: stages[name] for name in topological_order(list(stages), {edge.arc for edge in between})}
    generation = _generation(stages)
    pipeline = Pipeline(
        name=file.name,
        generation=generation,
        stages=stages,
        edges=between,
        input_edges=tuple(edge for edge in edges if edge.is_input),
        outputs=outputs,
        limits=file.limits,
        sessions=file.sessions,
        speech=speech,
        media=file.media,
        source=source,
        options=options,
        explanation=(
            *_explain(file, problems.origins),
            ExplainedValue("generation", generation, "computed from the stages"),
        ),
        content=document.as_written(),
    )
    check_flows(problems, pipeline, edges)
    problems.raise_any()
    return pipeline


def _with_roles(
    stages: Mapping[str, Stage], file: PipelineFile, edges: Sequence[Edge], conditions: ConditionResolver
) -> Mapping[str, Stage]:
    """Returns the stages with their conditions, and with their roles for sampling parameters and adapters."""
    return {
        name: stage.model_copy(
            update={
                "condition": conditions.resolve(("stages", name, "when"), file.stages[name].when or ()),
                "is_main": file.main_stage in (None, name, _assisted(stage, edges)),
                "assisted": _assisted(stage, edges),
            }
        )
        for name, stage in stages.items()
    }


def _assisted(stage: Stage, edges: Sequence[Edge]) -> str:
    """Returns the name of the stage of whose work `stage` computes a part. Empty if there is none."""
    consumers = [edge.consumer for edge in edges if edge.producer == stage.name] if stage.signature.assists else []
    return consumers[0] if consumers else ""


def _find_file(name_or_path: str) -> Path:
    if name_or_path in built_in_pipelines():
        return _BUILT_IN_DIR / f"{name_or_path}.yaml"
    path = Path(name_or_path).expanduser()
    if path.is_file():
        return path
    close = get_close_matches(name_or_path, built_in_pipelines(), n=1)
    hint = f"; did you mean {close[0]!r}?" if close else f"; built-in: {', '.join(built_in_pipelines())}"
    raise NotFoundError(
        f"unknown pipeline {name_or_path!r}: neither built-in nor a file{hint} (or give the path of a .yaml file)",
        reason="UNKNOWN_PIPELINE",
    )


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as exc:
        raise invalid_line(str(path), 1, f"cannot be read: {exc}; give a text file in UTF-8") from exc


def _fetch_hint(name_or_path: str) -> str:
    if name_or_path in built_in_pipelines():
        return f"run `stagemesh models fetch {name_or_path}`"
    return "run `stagemesh models fetch`, or give the path of a folder or file"


def _generation(stages: Mapping[str, Stage]) -> str:
    facts: dict[str, list[object]] = {
        stage.name: [stage.engine, stage.model_name, stage.function, stage.options] for stage in stages.values()
    }
    for stage in stages.values():
        if stage.is_external:
            facts[stage.name].append(asdict(stage.signature))
    text = json.dumps(facts, sort_keys=True, default=sorted)
    return hashlib.blake2b(text.encode(), digest_size=6).hexdigest()


def _explain(file: PipelineFile, origins: Mapping[KeyPath, Origin]) -> Iterator[ExplainedValue]:
    """Yields every value of the file, and the default value of every key that the file omits, each with its origin.

    Omits keys whose value is null.
    """
    for path, value in _leaves(file.model_dump(mode="json", by_alias=True), ()):
        if value is not None:
            text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
            yield ExplainedValue(dotted(path), text, _origin_label(path, origins))


def _origin_label(path: KeyPath, origins: Mapping[KeyPath, Origin]) -> str:
    # If a mapping is set as a whole (--set chunk='{frames: 9}'), its items have the origin of the mapping.
    for end in range(len(path), 0, -1):
        origin = origins.get(path[:end])
        if origin is not None and (end == len(path) or origin.line == 0):
            return origin.label
    return "default"


def _leaves(value: object, path: KeyPath) -> Iterator[tuple[KeyPath, object]]:
    if isinstance(value, dict) and value:
        for key, item in cast("dict[str, object]", value).items():
            yield from _leaves(item, (*path, key))
    elif isinstance(value, list) and value and path == ("edges",):
        for index, item in enumerate(cast("list[object]", value)):
            yield from _leaves(item, (*path, index))
    else:
        yield path, value
