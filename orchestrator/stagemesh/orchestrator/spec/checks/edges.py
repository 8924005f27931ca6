"""Checks the edges of a pipeline file: their stages, names, tensor types, connectors, chunk policies and cycles."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from stagemesh.common.connector_descriptors import AUTO, descriptors
from stagemesh.connectors.edge import FramesPolicy
from stagemesh.orchestrator.spec.checks.conditions import ConditionResolver
from stagemesh.orchestrator.spec.checks.edge_types import EdgeTypes, emitted, list_specs
from stagemesh.orchestrator.spec.checks.problems import Problems, suggest
from stagemesh.orchestrator.spec.checks.stages import Catalog
from stagemesh.orchestrator.spec.graph import Arc, find_cycle
from stagemesh.orchestrator.spec.model import Edge, Stage
from stagemesh.orchestrator.spec.schema import EdgeEntry, PipelineFile, StageEntry


@dataclass(frozen=True)
class EdgeResolver:
    """Converts the edges of a pipeline file to checked edges. Reports errors to `problems`."""

    catalog: Catalog
    problems: Problems
    conditions: ConditionResolver

    def resolve(self, file: PipelineFile, stages: Mapping[str, Stage]) -> tuple[Edge, ...]:
        """Checks all edges. Returns the edges whose producer and consumer exist."""
        types = EdgeTypes(self.catalog, self.problems)
        known = [i for i, entry in enumerate(file.edges) if self._check_ends(i, entry, file)]
        self._check_names(file.edges)
        self._check_cycles(file, known)
        edges: list[Edge] = []
        mismatched = set[str]()
        for i in known:
            entry = file.edges[i]
            producer, consumer = stages.get(entry.producer), stages.get(entry.consumer)
            self._check_connector(i, entry)
            tensors = None
            if producer is not None:
                self._check_frames(i, entry, producer)
            if producer is not None and consumer is not None:
                tensors = types.resolve(i, entry, producer=producer, consumer=consumer)
            if tensors is None:
                mismatched.add(entry.consumer)
            resolved: dict[str, Any] = {
                "name": entry.edge_name,
                "tensors": tensors.carried if tensors is not None else (),
                "brings": tensors.brought if tensors is not None else (),
                "apart": _is_apart(entry, file.stages[entry.consumer]),
                "condition": self.conditions.resolve(("edges", i, "when"), entry.when or ()),
            }
            edges.append(Edge.model_construct(**{**dict(entry), **resolved}))
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
                    self.problems.add(
                        ("stages", name, "join"),
                        f"no edge to stage {name!r} has the name or the producer {joined!r}; {suggest(joined, names)}",
                    )

    def _check_ends(self, index: int, edge: EdgeEntry, file: PipelineFile) -> bool:
        ends = {"from": edge.producer, "to": edge.consumer}
        missing = {key: name for key, name in ends.items() if name not in file.stages}
        for key, name in missing.items():
            self.problems.add(("edges", index, key), f"unknown stage {name!r}; {suggest(name, file.stages)}")
        return not missing

    def _check_names(self, edges: Sequence[EdgeEntry]) -> None:
        names = [edge.edge_name for edge in edges]
        for i, name in enumerate(names):
            if name in names[:i]:
                self.problems.add(("edges", i), f"edge {name!r} exists already; give this edge another `name`")

    def _check_cycles(self, file: PipelineFile, known: Sequence[int]) -> None:
        arcs = {Arc(file.edges[i].producer, file.edges[i].consumer): i for i in known}
        cycle = find_cycle(list(file.stages), arcs)
        if cycle:
            last = arcs[Arc(cycle[-2], cycle[-1])]
            self.problems.add(("edges", last), f"cycle {' -> '.join(cycle)}; remove one of these edges")

    def _check_connector(self, index: int, edge: EdgeEntry) -> None:
        known = (AUTO, *descriptors())
        if edge.connector not in known:
            self.problems.add(
                ("edges", index, "connector"), f"unknown connector {edge.connector!r}; use one of {', '.join(known)}"
            )

    def _check_frames(self, index: int, edge: EdgeEntry, producer: Stage) -> None:
        first_axes = {spec.shape[:1] for spec in emitted(producer).values()}
        if isinstance(edge.policy, FramesPolicy) and (len(first_axes) > 1 or () in first_axes):
            self.problems.add(
                ("edges", index, "chunk"),
                f"the tensors that stage {edge.producer!r} emits have no common first axis to cut frames from "
                f"({list_specs(emitted(producer))}); use `step` or `whole`",
            )

    def _check_fed(self, stage: Stage, incoming: Sequence[Edge]) -> None:
        accepts = stage.signature.accepts
        if incoming and not accepts:
            text = f"stage {stage.name!r} takes the client's prompt and no tensors; remove its edges"
            self.problems.add(("stages", stage.name), text)
        if not incoming and accepts:
            text = f"no edge leads to stage {stage.name!r}, which accepts {list_specs(accepts)}; add one to `edges`"
            self.problems.add(("stages", stage.name), text)
        brought = stage.signature.optional.union(*(edge.brings for edge in incoming))
        missing = {name: spec for name, spec in accepts.items() if name not in brought}
        if incoming and missing:
            text = f"no edge brings stage {stage.name!r} its {list_specs(missing)}; add one, or change a transform"
            self.problems.add(("stages", stage.name), text)


def _is_apart(edge: EdgeEntry, consumer: StageEntry) -> bool:
    if isinstance(consumer.join, list):
        return edge.edge_name not in consumer.join and edge.producer not in consumer.join
    return consumer.join == "any"
