"""Checks the edges of a pipeline file: their stages, names, tensor types, connectors, chunk policies and cycles."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from stagemesh.common.errors import StagemeshError
from stagemesh.common.plugins.connectors import AUTO, GRPC, SHM, descriptors
from stagemesh.common.plugins.descriptors import INPUT, TransformDescriptor
from stagemesh.common.plugins.entry_points import load_descriptor
from stagemesh.common.wire.chunk_sizes import FramesPolicy, StepPolicy
from stagemesh.common.wire.tensors import TensorSpec
from stagemesh.pipeline.condition_resolver import ConditionResolver
from stagemesh.pipeline.document import Problems, suggest
from stagemesh.pipeline.graph import Arc, Edge, Stage
from stagemesh.pipeline.schema import (
    AnyStageEntry,
    EdgeEntry,
    ExternalStageEntry,
    FramesEntry,
    PipelineFile,
    StageEntry,
)

INPUT_TENSORS: Mapping[str, TensorSpec] = {
    "text": TensorSpec.parse("uint8[bytes]"),
    "audio": TensorSpec.parse("float32[samples]"),
    "token_ids": TensorSpec.parse("int64[tokens]"),
}
"""The tensors that a client can stream. Each packet contains one of them."""


class Endpoint(NamedTuple):
    """A stage or transform that emits or accepts tensors on an edge, with the types of these tensors.

    `name` is a description for error messages, such as "stage 'encoder'".
    """

    name: str
    tensors: Mapping[str, TensorSpec]

    def __str__(self) -> str:
        return list_specs(self.tensors)


class EdgeTensors(NamedTuple):
    """The names of the tensors on an edge.

    `tensors` are the tensors that the edge transfers from the producer. `brings` are the tensors that the consumer
    receives after the edge's transform.
    """

    tensors: tuple[str, ...] = ()
    brings: tuple[str, ...] = ()


@dataclass(frozen=True)
class EdgeResolver:
    """Converts the edges of a pipeline file to checked edges. Reports errors to `problems`."""

    problems: Problems
    conditions: ConditionResolver

    def resolve(self, file: PipelineFile, stages: Mapping[str, Stage]) -> tuple[Edge, ...]:
        """Checks all edges. Returns the edges whose producer and consumer exist, in the order of the file."""
        known = [i for i, entry in enumerate(file.edges) if self._check_ends(i, entry, file)]
        self._check_names(file.edges)
        self._check_cycles(file, known)
        edges: list[Edge] = []
        mismatched = set[str]()
        for i in known:
            entry = file.edges[i]
            source, consumer = _source(entry, stages), stages.get(entry.consumer)
            self._check_way(i, entry, file)
            self._check_transforming_end(i, entry, file)
            tensors = None
            transforms_at_producer = entry.transform is not None and _is_external(file.stages[entry.consumer])
            if source is not None and consumer is not None:
                tensors = self._tensors(i, entry, source=source, consumer=consumer)
                self._check_ramp(i, entry, consumer)
            if source is not None and not transforms_at_producer:
                self._check_frames(i, entry, source)
            elif tensors is not None and entry.transform is not None:
                gives = load_descriptor(TransformDescriptor, entry.transform).gives
                self._check_frames(i, entry, Endpoint(f"transform {entry.transform!r}", gives))
            if tensors is None:
                mismatched.add(entry.consumer)
            resolved: dict[str, Any] = {
                "name": entry.edge_name,
                "transforms_at_producer": transforms_at_producer,
                "apart": _is_apart(entry, file.stages[entry.consumer]),
                "condition": self.conditions.resolve(("edges", i, "when"), entry.when or ()),
            }
            edges.append(Edge.model_construct(**{**dict(entry), **(tensors or EdgeTensors())._asdict(), **resolved}))
        # An edge to an unknown stage is already reported, and the intended stage may seem to have no input.
        for stage in stages.values() if len(known) == len(file.edges) else ():
            if stage.name not in mismatched:
                self._check_fed(stage, [edge for edge in edges if edge.consumer == stage.name])
        self._check_joins(file)
        return tuple(edges)

    def _check_joins(self, file: PipelineFile) -> None:
        for name, stage in file.stages.items():
            names = {each for edge in file.edges if edge.consumer == name for each in (edge.edge_name, edge.producer)}
            for joined in stage.join if isinstance(stage.join, list) else ():
                if joined not in names:
                    text = f"no edge to stage {name!r} has the name or producer {joined!r}; {suggest(joined, names)}"
                    self.problems.add(("stages", name, "join"), text)

    def _check_ends(self, index: int, edge: EdgeEntry, file: PipelineFile) -> bool:
        ends = {"from": edge.producer, "to": edge.consumer}
        known = {"from": (*file.stages, INPUT), "to": tuple(file.stages)}
        missing = {key: name for key, name in ends.items() if name not in known[key]}
        for key, name in missing.items():
            self.problems.add(("edges", index, key), f"unknown stage {name!r}; {suggest(name, known[key])}")
        return not missing

    def _check_names(self, edges: Sequence[EdgeEntry]) -> None:
        names = [edge.edge_name for edge in edges]
        for i, name in enumerate(names):
            if name in names[:i]:
                self.problems.add(("edges", i), f"edge {name!r} exists already; give this edge another `name`")

    def _check_cycles(self, file: PipelineFile, known: Sequence[int]) -> None:
        edges = {i: file.edges[i] for i in known if not file.edges[i].is_input}
        arcs = {Arc(edge.producer, edge.consumer): i for i, edge in edges.items()}
        cycle = find_cycle(list(file.stages), arcs)
        if cycle:
            last = arcs[Arc(cycle[-2], cycle[-1])]
            self.problems.add(("edges", last), f"cycle {' -> '.join(cycle)}; remove one of these edges")

    def _check_way(self, index: int, edge: EdgeEntry, file: PipelineFile) -> None:
        if not edge.is_input:
            self._check_connector(index, edge, file.stages[edge.producer])
        elif edge.connector not in (AUTO, GRPC):
            text = f"the orchestrator sends the client's input by {GRPC}; remove `connector`"
            self.problems.add(("edges", index, "connector"), text)
        elif edge.chunk != "step" or edge.tokens != "all":
            key, cause = ("tokens", "has no prompt") if edge.chunk == "step" else ("chunk", "is sent as it is appended")
            self.problems.add(("edges", index, key), f"the client's input {cause}; remove `{key}`")

    def _check_connector(self, index: int, edge: EdgeEntry, producer: AnyStageEntry) -> None:
        known = (AUTO, *descriptors())
        if edge.connector not in known:
            text = f"unknown connector {edge.connector!r}; use one of {', '.join(known)}"
            self.problems.add(("edges", index, "connector"), text)
        elif edge.connector == SHM and isinstance(producer, StageEntry) and not producer.data_plane.shared_arena:
            text = f"shm needs a shared arena; remove data_plane.shared_arena from stage {edge.producer!r}"
            self.problems.add(("edges", index, "connector"), text)

    def _check_transforming_end(self, index: int, edge: EdgeEntry, file: PipelineFile) -> None:
        if edge.transform is None or not _is_external(file.stages[edge.consumer]):
            return
        if edge.is_input:
            ends = f"the orchestrator runs no transforms, and stage {edge.consumer!r} is external, so that none of them"
        elif _is_external(file.stages[edge.producer]):
            ends = f"stages {edge.producer!r} and {edge.consumer!r} are external, so that none of them"
        else:
            return
        text = f"{ends} can run transform {edge.transform!r}; put a function stage between them"
        self.problems.add(("edges", index, "transform"), text)

    def _check_frames(self, index: int, edge: EdgeEntry, source: Endpoint) -> None:
        carried = {name: spec for name, spec in source.tensors.items() if not spec.ticket_kind}
        first_axes = {spec.shape[:1] for spec in carried.values()}
        if isinstance(edge.policy, FramesPolicy) and (len(first_axes) > 1 or () in first_axes):
            self.problems.add(
                ("edges", index, "chunk"),
                f"the tensors that {source.name} emits have no common first axis to cut frames from ({source}); use "
                "`step` or `whole`",
            )

    def _check_uncut(self, index: int, edge: EdgeEntry, tickets: Mapping[str, TensorSpec]) -> None:
        if tickets and not isinstance(edge.policy, StepPolicy):
            text = f"the edge carries a ticket ({list_specs(tickets)}), which cannot be cut into chunks; remove `chunk`"
            self.problems.add(("edges", index, "chunk"), text)

    def _check_ramp(self, index: int, edge: EdgeEntry, consumer: Stage) -> None:
        is_audio = any(emitted.kind == "audio" for emitted in consumer.signature.emits.values())
        if isinstance(edge.chunk, FramesEntry) and edge.chunk.ramp == "auto" and not is_audio:
            text = f"`ramp: auto` needs a stage that emits audio, which {consumer.name!r} does not; list the sizes"
            self.problems.add(("edges", index, "chunk"), text)

    def _check_fed(self, stage: Stage, incoming: Sequence[Edge]) -> None:
        accepts = stage.signature.accepts
        brought = stage.signature.optional.union(*(edge.brings for edge in incoming))
        missing = {name: spec for name, spec in accepts.items() if name not in brought}
        if incoming and not accepts:
            text = f"stage {stage.name!r} takes the client's prompt and no tensors; remove its edges"
        elif not incoming and not stage.accepts_prompt:
            text = f"no edge leads to stage {stage.name!r}, which accepts {list_specs(accepts)}; add one to `edges`"
        elif incoming and missing:
            text = f"no edge brings stage {stage.name!r} its {list_specs(missing)}; add one, or change a transform"
        else:
            return
        self.problems.add(("stages", stage.name), text)

    def _tensors(self, index: int, edge: EdgeEntry, *, source: Endpoint, consumer: Stage) -> EdgeTensors | None:
        """Returns the names of the tensors on an edge, or None if the edge's tensor types or transform are invalid.

        `index` is the edge's position in the file's list of edges. Reports errors to `problems`.
        """
        given = source if edge.transform is None else self._transformed(index, edge.transform, source)
        taken = Endpoint(f"stage {consumer.name!r}", consumer.signature.accepts)
        if given is None or not self._fits(index, given, taken):
            return None
        brought = tuple(name for name in given.tensors if name in taken.tensors)
        if taken.tensors and not brought:
            self.problems.add(
                ("edges", index),
                f"{given.name} gives {given}, but {taken.name} accepts only {taken}; add a transform, or remove the "
                "edge",
            )
            return None
        tickets = {name: given.tensors[name] for name in brought if given.tensors[name].ticket_kind}
        self._check_uncut(index, edge, tickets)
        carried = brought
        if edge.transform is not None:
            carried = (*load_descriptor(TransformDescriptor, edge.transform).takes, *tickets)
        if edge.is_input and len(carried) > 1:
            self._check_kinds(index, edge, carried, optional=consumer.signature.optional)
        return EdgeTensors(carried, brought)

    def _check_kinds(self, index: int, edge: EdgeEntry, kinds: Sequence[str], *, optional: Collection[str]) -> None:
        """Checks an edge from "@input" over which several kinds of input can be streamed.

        Each packet contains only one of them. The consumer must therefore not require any of them.
        """
        required = kinds if edge.transform is not None else [name for name in kinds if name not in optional]
        if required:
            taker, remedy = f"stage {edge.consumer!r}", "add a transform that takes only one of them"
            if edge.transform is not None:
                taker, remedy = f"transform {edge.transform!r}", "choose another transform"
            text = f"{taker} requires {' and '.join(required)}, but a packet of @input has one of {', '.join(kinds)}"
            self.problems.add(("edges", index), f"{text}; {remedy}")

    def _transformed(self, index: int, name: str, given: Endpoint) -> Endpoint | None:
        try:
            transform = load_descriptor(TransformDescriptor, name)
        except StagemeshError as exc:
            self.problems.add(("edges", index, "transform"), exc.message)
            return None
        taken = Endpoint(f"transform {name!r}", transform.takes)
        if not given.tensors.keys() >= taken.tensors.keys():
            text = f"{taken.name} takes {taken}, but {given.name} emits {given}; choose another transform"
            self.problems.add(("edges", index, "transform"), text)
            return None
        # A transform passes the tickets of its packets.
        tickets = {name: spec for name, spec in given.tensors.items() if spec.ticket_kind}
        gives = Endpoint(taken.name, {**tickets, **transform.gives})
        return gives if self._fits(index, given, taken) else None

    def _fits(self, index: int, given: Endpoint, taken: Endpoint) -> bool:
        common = taken.tensors.keys() & given.tensors.keys()
        wrong = sorted(name for name in common if not taken.tensors[name].accepts(given.tensors[name]))
        for name in wrong:
            self.problems.add(
                ("edges", index),
                f"type mismatch: {given.name} gives {name}: {given.tensors[name]}, {taken.name} expects "
                f"{name}: {taken.tensors[name]}; add or change the edge's transform",
            )
        return not wrong


def _is_external(stage: AnyStageEntry) -> bool:
    return isinstance(stage, ExternalStageEntry)


def _is_apart(edge: EdgeEntry, consumer: AnyStageEntry) -> bool:
    if isinstance(consumer.join, list):
        return edge.edge_name not in consumer.join and edge.producer not in consumer.join
    return consumer.join == "any"


def _source(edge: EdgeEntry, stages: Mapping[str, Stage]) -> Endpoint | None:
    """Returns the producer of an edge, or None if it is an invalid stage."""
    if edge.is_input:
        return Endpoint("the client", INPUT_TENSORS)
    producer = stages.get(edge.producer)
    return None if producer is None else Endpoint(f"stage {producer.name!r}", emitted(producer))


def emitted(stage: Stage) -> Mapping[str, TensorSpec]:
    """Returns the types of the tensors that a stage emits, by tensor name."""
    return {name: each.spec for name, each in stage.signature.emits.items()}


def list_specs(specs: Mapping[str, TensorSpec]) -> str:
    """Formats tensor types as text for an error message. Returns "nothing" if `specs` is empty."""
    return ", ".join(f"{name}: {spec}" for name, spec in specs.items()) or "nothing"


def topological_order(nodes: Sequence[str], arcs: Collection[Arc]) -> tuple[str, ...]:
    """Sorts nodes so that producers precede consumers. Otherwise preserves the order of `nodes`.

    Omits nodes that are on a cycle or downstream of a cycle.
    """
    waits_for = {node: {arc.producer for arc in arcs if arc.consumer == node} for node in nodes}
    order: list[str] = []
    while ready := next((node for node, producers in waits_for.items() if producers <= set(order)), None):
        order.append(ready)
        del waits_for[ready]
    return tuple(order)


def find_cycle(nodes: Sequence[str], arcs: Collection[Arc]) -> tuple[str, ...]:
    """Returns the nodes of one cycle, or an empty tuple if the graph has no cycle.

    Each node is followed by one of its consumers. The first node is repeated at the end.
    """
    stuck = set(nodes) - set(topological_order(nodes, arcs))
    producers = {arc.consumer: arc.producer for arc in arcs if {arc.producer, arc.consumer} <= stuck}
    if not producers:
        return ()
    # Every stuck node has a stuck producer, so that a walk upstream reaches a node of the walk again.
    walk = [next(node for node in nodes if node in producers)]
    while (producer := producers[walk[-1]]) not in walk:
        walk.append(producer)
    return (producer, *reversed(walk[walk.index(producer) :]))
