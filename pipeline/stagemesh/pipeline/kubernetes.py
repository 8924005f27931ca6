"""Checks the rules of the Helm chart: what a pipeline file must fulfil so that its stages can run as pods."""

from collections.abc import Iterator
from typing import cast

from stagemesh.common.plugins.connectors import AUTO, SHM
from stagemesh.common.process.media_config import LOCAL, parse_root
from stagemesh.pipeline.document import Document, KeyPath, Problems, dotted
from stagemesh.pipeline.graph import Pipeline
from stagemesh.pipeline.schema import ExternalStageEntry, PipelineFile, StageEntry

MAX_NAME_LENGTH = 30
"""The maximum length of the name of a stage or group.

The chart names a Service RELEASE-STAGE. Kubernetes allows 63 characters, so that 32 remain for the release.
"""
# The chart names its other objects RELEASE-orchestrator and so on, and the pods of a warm tier RELEASE-GROUP-warm.
_RESERVED = frozenset({"orchestrator", "admin", "media", "gateway", "jobs", "test"})
_WARM_SUFFIX = "-warm"
# The health service answers liveness probes by this name, and readiness probes by the name of the stage.
_LIVENESS = "liveness"
# Helm's templates read these values. Variables are replaced later, in the pods.
_READ_OF_STAGES = frozenset({"engine", "replicas", "group", "data_plane", "split"})
_READ_OF_EDGES = frozenset({"from", "to", "connector"})
# Helm stores numbers as 64-bit floats.
_MAX_EXACT_INTEGER = 1 << 53


def check_values(document: Document) -> None:
    """Reports an error for each value of the file that Helm and the chart cannot read."""
    for path, written in document.references.items():
        if _is_read_by_chart(path):
            text = f"{dotted(path)} is {written}, but the chart cannot read variables here; write the value"
            document.problems.add(path, text)
    for path, value in _integers(document.values, ()):
        if abs(value) > _MAX_EXACT_INTEGER:
            text = f"{dotted(path)} is {value}, which Helm rounds; write a number of at most 2**53"
            document.problems.add(path, text)


def check_pods(file: PipelineFile, problems: Problems) -> None:
    """Reports an error for each name, colocation group and edge of the file that the chart cannot deploy as pods."""
    for name, entry in file.stages.items():
        _check_name(("stages", name), name, kind="stage", problems=problems)
        if name == _LIVENESS:
            problems.add(("stages", name), f"stage {name!r} has the name of the health service for liveness; rename it")
        if isinstance(entry, StageEntry) and entry.group is not None:
            _check_name(("stages", name, "group"), entry.group, kind="group", problems=problems)
            _check_group(name, entry.group, file, problems)
    _check_replicas(file, problems)
    _check_edges(file, problems)


def kubernetes_hints(pipeline: Pipeline) -> tuple[str, ...]:
    """Returns a sentence for each fact outside of the pipeline file that a deployment on Kubernetes depends on."""
    hints = [
        f"stage {stage.name!r} is external and has no addresses; set stages.{stage.name}.external.service and "
        f"stages.{stage.name}.external.port in the chart's values"
        for stage in pipeline.stages.values()
        if stage.is_external and not stage.addresses
    ]
    if pipeline.media is not None and pipeline.media.store and parse_root(pipeline.media.store).protocol == LOCAL:
        hints.append(
            f"media.store is the folder {pipeline.media.store}, which is a different folder in each pod; use the URL "
            "of an object store, or mount one volume there in all pods"
        )
    return tuple(hints)


def _is_read_by_chart(path: KeyPath) -> bool:
    match path:
        case ("stages", _, key, *_):
            return key in _READ_OF_STAGES
        case ("edges", _, key):
            return key in _READ_OF_EDGES
        case _:
            return path == ("media", "store")


def _integers(value: object, path: KeyPath) -> Iterator[tuple[KeyPath, int]]:
    if isinstance(value, dict):
        for key, item in cast("dict[str, object]", value).items():
            yield from _integers(item, (*path, key))
    elif isinstance(value, list):
        for index, item in enumerate(cast("list[object]", value)):
            yield from _integers(item, (*path, index))
    elif isinstance(value, int):
        yield path, value


def _check_name(path: KeyPath, name: str, *, kind: str, problems: Problems) -> None:
    if name.endswith("-"):
        text = "ends with '-', but names of Kubernetes objects end with a letter or digit; rename it"
    elif len(name) > MAX_NAME_LENGTH:
        text = f"has {len(name)} characters, more than the chart allows ({MAX_NAME_LENGTH}); shorten it"
    elif name in _RESERVED or name.endswith(_WARM_SUFFIX):
        names = ", ".join(sorted(_RESERVED))
        text = f"has a name that the chart needs ({names}, and names that end with {_WARM_SUFFIX}); rename it"
    else:
        return
    problems.add(path, f"{kind} {name!r} {text}")


def _check_group(stage: str, group: str, file: PipelineFile, problems: Problems) -> None:
    other = file.stages.get(group)
    if other is not None and (isinstance(other, ExternalStageEntry) or other.group != group):
        text = f"group {group!r} has the name of a stage that is not in the group; rename the group"
        problems.add(("stages", stage, "group"), text)


def _group(stage: str, file: PipelineFile) -> str | None:
    """Returns the name of a stage's colocation group, or None if the stage is external."""
    entry = file.stages[stage]
    return None if isinstance(entry, ExternalStageEntry) else entry.group or stage


def _check_replicas(file: PipelineFile, problems: Problems) -> None:
    first = dict[str, tuple[str, StageEntry]]()
    for name, entry in file.stages.items():
        if not isinstance(entry, StageEntry):
            continue
        group = entry.group or name
        other, expected = first.setdefault(group, (name, entry))
        if entry.replicas != expected.replicas:
            text = (
                f"stages {other!r} and {name!r} share the pods of group {group!r}, but have {expected.replicas} and "
                f"{entry.replicas} replicas; set the same `replicas`"
            )
            problems.add(("stages", name, "replicas"), text)


def _check_edges(file: PipelineFile, problems: Problems) -> None:
    for i, edge in enumerate(file.edges):
        if edge.connector != SHM or not file.stages.keys() >= {edge.producer, edge.consumer}:
            continue
        groups = {_group(edge.producer, file), _group(edge.consumer, file)}
        if None in groups:
            remedy = f"set `connector: {AUTO}`, because an external stage is in another pod"
        elif len(groups) > 1:
            remedy = f"give both stages the same `group`, or set `connector: {AUTO}`"
        else:
            continue
        text = f"edge {edge.edge_name!r} uses {SHM}, but its stages do not share a pod; {remedy}"
        problems.add(("edges", i, "connector"), text)
