"""The values file of the Helm chart for a pipeline: the pipeline itself, and initial settings of every stage."""

import re
from collections.abc import Iterable, Iterator, Mapping
from importlib.metadata import version
from math import ceil
from textwrap import indent
from typing import Any, NamedTuple

import yaml
from pydantic import JsonValue

from stagemesh.common.plugins.connectors import NIXL
from stagemesh.pipeline import Pipeline, Stage, kubernetes_hints
from stagemesh.pipeline.document import referenced_variables

_GIB = 1 << 30
_GPU_ENGINES = frozenset({"vllm", "diffusion"})
_REGISTRY = "registry.example.com/stagemesh"
_EXTERNAL_PORT = 50051
_TITLES = {
    "images": "The images, which docs/kubernetes.md shows how to build. Nodes must be able to pull them.",
    "stages": "Settings by stage. The chart's values.yaml describes all of them, for example nodeSelector and "
    "autoscaling.\n# `replicas` is the number in the pipeline, unless it is set here.",
    "groups": "Settings of the pods that several stages share, and of their replicas.",
}


class Setting(NamedTuple):
    """A value of the chart. `comment` describes the value in one line of the values file."""

    key: str
    value: object
    comment: str


def chart_values(pipeline: Pipeline) -> dict[str, object]:
    """Returns the values of the chart for a pipeline."""
    values: dict[str, object] = {"pipeline": pipeline.content}
    for section, items in _sections(pipeline).items():
        values[section] = {name: {each.key: each.value for each in settings} for name, settings in items.items()}
    return values


def format_values(pipeline: Pipeline) -> str:
    """Returns the values of the chart for a pipeline as YAML with a comment for each value.

    Helm and PyYAML read the same values from the text.
    """
    parts = [_header(pipeline), _dump({"pipeline": pipeline.content})]
    for section, items in _sections(pipeline).items():
        parts.append(f"\n# {_TITLES[section]}\n{section}:\n")
        for name, settings in items.items():
            lines = "".join(f"# {each.comment}\n{_dump({each.key: each.value})}" for each in settings)
            parts.append(indent(f"{name}:\n{indent(lines, '  ')}", "  "))
    return "".join(parts)


def _header(pipeline: Pipeline) -> str:
    lines = [
        f"Values of the Helm chart for the pipeline {pipeline.name}, written by `stagemesh k8s render`.",
        "After a change, check this file with `stagemesh pipeline validate --kubernetes FILE`.",
    ]
    if variables := referenced_variables(_dump(pipeline.content)):
        names = ", ".join(variables)
        lines.append(f"The pipeline reads variables: {names}. Set them by `env` of the orchestrator and of each stage.")
    lines += [f"Note: {hint}." for hint in kubernetes_hints(pipeline)]
    return "".join(f"# {line}\n" for line in lines)


def _sections(pipeline: Pipeline) -> Mapping[str, Mapping[str, list[Setting]]]:
    members = dict[str, list[Stage]]()
    for stage in pipeline.stages.values():
        if not stage.is_external:
            members.setdefault(stage.group_name, []).append(stage)
    shared = {group: stages for group, stages in members.items() if len(stages) > 1}
    settings = dict[str, list[Setting]]()
    for stage in pipeline.stages.values():
        own = list(_external_settings(stage) if stage.is_external else _container_settings(stage, pipeline))
        settings[stage.name] = own if stage.group_name in shared else [*own, *_pod_settings([stage])]
    groups = {group: list(_pod_settings(stages)) for group, stages in shared.items()}
    sections = {"images": _images(), "stages": settings, "groups": groups}
    complete = {section: {name: each for name, each in items.items() if each} for section, items in sections.items()}
    return {section: items for section, items in complete.items() if items}


def _images() -> dict[str, list[Setting]]:
    tag = Setting("tag", version("stagemesh"), "CHANGE: its tag. In production, set `digest`, because a tag can move.")
    front = "CHANGE: the image of orchestrators, media service and helm test."
    stage = "CHANGE: the image of the stages that have no `image` of their own."
    return {
        "orchestrator": [Setting("repository", f"{_REGISTRY}/orchestrator", front), tag],
        "stage": [Setting("repository", f"{_REGISTRY}/stage-cpu", stage), tag],
    }


def _external_settings(stage: Stage) -> Iterator[Setting]:
    if not stage.addresses:
        reference = {"service": stage.name, "port": _EXTERNAL_PORT}
        yield Setting("external", reference, "CHANGE: the Service of the stage's replicas, and its gRPC port.")


def _container_settings(stage: Stage, pipeline: Pipeline) -> Iterator[Setting]:
    gpus = _gpus(stage)
    if gpus:
        without = "To run the stage on the CPU, remove gpus and image, and lower cpu and memory."
        yield Setting("gpus", gpus, f"CHANGE: GPUs of each replica. {without}")
        yield Setting("image", {"repository": f"{_REGISTRY}/stage-cuda"}, "CHANGE: the image with CUDA.")
    memory = f"{(16 * gpus or 2) + ceil(stage.data_plane.arena_bytes / _GIB)}Gi"
    resources = {"requests": {"cpu": str(4 * gpus or 1), "memory": memory}, "limits": {"memory": memory}}
    yield Setting("resources", resources, "CHANGE: CPU and memory of each replica, including its arena. Measure them.")
    if _leaves_pod(stage, pipeline, connector=NIXL):
        rdma = {"enabled": True, "resource": "rdma/rdma_shared_device_a", "count": 1, "ipcLock": True}
        yield Setting("rdma", rdma, "CHANGE: the resource of the RDMA device plugin. `enabled: false` uses TCP.")


def _leaves_pod(stage: Stage, pipeline: Pipeline, *, connector: str) -> bool:
    """Returns whether an edge of a stage uses a connector and leads to another pod or comes from one."""
    edges = [*pipeline.incoming(stage.name), *pipeline.outgoing(stage.name)]
    arcs = [{pipeline.stages[end].group_name for end in edge.arc} for edge in edges if edge.connector == connector]
    return any(len(groups) > 1 for groups in arcs)


def _pod_settings(stages: Iterable[Stage]) -> Iterator[Setting]:
    if names := sorted({stage.model_name for stage in stages if stage.model_name}):
        comment = f"CHANGE: the PersistentVolumeClaim whose volume contains the folders {', '.join(names)}."
        yield Setting("modelCache", {"existingClaim": "models"}, comment)


def _gpus(stage: Stage) -> int:
    """Returns the number of GPUs of a replica: the number of processes that compute, if they can use GPUs."""
    options = stage.options
    if options.get("device", "cuda" if stage.engine in _GPU_ENGINES else "cpu") == "cpu":
        return 0
    if stage.engine == "vllm":
        return _count(options, "tensor_parallel_size") * _count(options, "pipeline_parallel_size")
    parallel = options.get("parallel")
    degrees = parallel if isinstance(parallel, dict) else {}
    return _count(degrees, "cfg") * max(_count(degrees, "ulysses"), _count(degrees, "hsdp"))


def _count(options: Mapping[str, JsonValue], name: str) -> int:
    value = options.get(name)
    return value if isinstance(value, int) else 1


_PLAIN = re.compile(r"[A-Za-z][A-Za-z0-9_./>-]*")
_OTHER_TYPES = re.compile(r"y|n|yes|no|on|off|true|false|null", re.IGNORECASE)
_REFERENCE_START = "${"


class _Dumper(yaml.SafeDumper):
    """Writes YAML that parsers of YAML 1.1 and 1.2 read in the same way. Writes the innermost collections in one line.

    References to variables are not quoted, because the types of their values depend on the values. Therefore a
    collection that contains a reference is not written in one line.
    """

    def represent_data(self, data: Any) -> yaml.Node:
        node = super().represent_data(data)
        if isinstance(node, yaml.CollectionNode) and _REFERENCE_START in str(data):
            node.flow_style = False
        return node


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    is_plain = _REFERENCE_START in text or (_PLAIN.fullmatch(text) and not _OTHER_TYPES.fullmatch(text))
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=None if is_plain else '"')


_Dumper.add_representer(str, _represent_text)


def _dump(values: Mapping[str, object]) -> str:
    is_nested = any(isinstance(value, dict | list) for value in values.values())
    return yaml.dump(
        dict(values),
        Dumper=_Dumper,
        default_flow_style=None if is_nested else False,
        sort_keys=False,
        allow_unicode=True,
        width=10_000,
    )
