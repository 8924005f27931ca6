"""Replaces each stage with `split` by a prefill stage, a decode stage and the edge between them."""

from typing import Any, cast

from stagemesh.pipeline.document import Document, KeyPath
from stagemesh.pipeline.file import check_shape
from stagemesh.pipeline.schema import PipelineFile, SplitEntry, StageEntry

_ENGINE = "vllm"
_SUFFIX = "-prefill"
_HANDOVER = "kv_handover"


def divide_stages(document: Document, file: PipelineFile) -> PipelineFile:
    """Returns the pipeline file with two stages and an edge instead of each stage with `split`. Changes `document`.

    Raises InvalidPipelineError if a stage cannot be divided. The message lists all problems found so far.
    """
    splits = {
        name: entry.split
        for name, entry in file.stages.items()
        if isinstance(entry, StageEntry) and entry.split is not None
    }
    if not splits:
        return file
    for name in splits:
        _check(document, file, name)
    document.problems.raise_any()
    stages = cast("dict[str, dict[str, Any]]", document.values["stages"])
    document.values["stages"] = divided = dict[str, dict[str, Any]]()
    for name, stage in stages.items():
        if name in splits:
            divided |= _divide(document, name, stage, splits[name])
        else:
            divided[name] = stage
    return check_shape(document)


def _check(document: Document, file: PipelineFile, name: str) -> None:
    """Reports an error for each reason why the stage `name` cannot be divided."""
    entry, path = file.stages[name], ("stages", name)
    assert isinstance(entry, StageEntry)
    problems = document.problems
    if entry.engine != _ENGINE:
        text = f"stage {name!r} cannot be split, because only engine {_ENGINE!r} can; remove split"
        problems.add((*path, "split"), text)
    if "replicas" in entry.model_fields_set:
        text = f"stage {name!r} has both replicas and split, which has the numbers of replicas; remove replicas"
        problems.add((*path, "replicas"), text)
    if _HANDOVER in entry.options:
        text = f"split sets the option {_HANDOVER} of stage {name!r}; remove the option, or split"
        problems.add((*path, "options", _HANDOVER), text)
    if f"{name}{_SUFFIX}" in file.stages:
        text = f"the prefill stage of {name!r} would be named {name + _SUFFIX!r}, which exists; rename one of them"
        problems.add((*path, "split"), text)


def _divide(document: Document, name: str, stage: dict[str, Any], split: SplitEntry) -> dict[str, dict[str, Any]]:
    """Returns the prefill stage and the decode stage by name, and adds the edge between them to the document."""
    prefill = f"{name}{_SUFFIX}"
    origin, edge = ("stages", name, "split"), _add_edge(document, producer=prefill, consumer=name)
    _copy_places(document, ("stages", name), ("stages", prefill))
    for key in ((), ("from",), ("to",)):
        _copy_place(document, origin, (*edge, *key))
    settings = split.model_dump(include={"min_tokens", "wait_s"}, exclude_none=True)
    common = {key: value for key, value in stage.items() if key != "split"}
    options = cast("dict[str, Any]", common.get("options") or {})
    divided = dict[str, dict[str, Any]]()
    for stage_name, role, replicas in ((prefill, "prefill", split.prefill), (name, "decode", split.decode)):
        _copy_place(document, (*origin, role), ("stages", stage_name, "replicas"))
        option: KeyPath = ("stages", stage_name, "options", _HANDOVER)
        _copy_place(document, (*origin, role), (*option, "role"))
        _copy_places(document, origin, option)
        handover = {"role": role, **settings}
        divided[stage_name] = {**common, "replicas": replicas, "options": {**options, _HANDOVER: handover}}
    # The prefill stage runs if its consumer does.
    divided[prefill].pop("when", None)
    return divided


def _add_edge(document: Document, *, producer: str, consumer: str) -> KeyPath:
    """Adds an edge at the end of the list so that the indexes of the other edges remain. Returns its path."""
    edges = cast("list[object]", document.values.setdefault("edges", []))
    edges.append({"from": producer, "to": consumer})
    return ("edges", len(edges) - 1)


def _copy_places(document: Document, source: KeyPath, target: KeyPath) -> None:
    """Gives the values below `target` the origins and references of the equal values below `source`."""
    for recorded in (document.problems.origins, document.references):
        places = cast("dict[KeyPath, Any]", recorded)
        copies = {
            (*target, *path[len(source) :]): place for path, place in places.items() if path[: len(source)] == source
        }
        places.update(copies)


def _copy_place(document: Document, source: KeyPath, target: KeyPath) -> None:
    """Gives the value at `target` the origin and the reference of the value at `source`, if they are recorded."""
    for recorded in (document.problems.origins, document.references):
        places = cast("dict[KeyPath, Any]", recorded)
        if source in places:
            places[target] = places[source]
