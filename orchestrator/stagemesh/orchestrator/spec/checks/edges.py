"""Checks that what flows over the edges fits together."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from stagemesh.common.connector_descriptors import AUTO, descriptors
from stagemesh.common.tensors import TensorSpec
from stagemesh.connectors.edge import FramesPolicy
from stagemesh.orchestrator.spec.checks.edge_types import CarriedTensors, emitted, list_specs
from stagemesh.orchestrator.spec.checks.problems import Problems, suggest
from stagemesh.orchestrator.spec.checks.stages import Catalog
from stagemesh.orchestrator.spec.checks.whens import WhenResolver
from stagemesh.orchestrator.spec.graph import Arc, find_cycle
from stagemesh.orchestrator.spec.model import Edge, Stage
from stagemesh.orchestrator.spec.schema import EdgeShape, PipelineShape


@dataclass(frozen=True)
class EdgeResolver:
    """Turns the file's edges into checked ones; what is wrong goes to `problems`."""

    catalog: Catalog
    problems: Problems
    whens: WhenResolver

    def resolve(self, shape: PipelineShape, stages: Mapping[str, Stage]) -> tuple[Edge, ...]:
        """The edges whose ends exist, with all that is wrong about them noted."""
        carried = CarriedTensors(self.catalog, self.problems)
        known = [i for i, edge in enumerate(shape.edges) if self._check_ends(i, edge, shape)]
        self._check_names(shape.edges)
        self._check_cycles(shape, known)
        given: dict[str, dict[str, TensorSpec]] = {}
        names: dict[int, tuple[str, ...]] = {}
        brings: dict[int, tuple[str, ...]] = {}
        doubtful = set[str]()
        for i in known:
            edge = shape.edges[i]
            producer, consumer = stages.get(edge.producer), stages.get(edge.consumer)
            self._check_transport(i, edge, producer)
            tensors = None
            if producer is not None and consumer is not None:
                tensors = carried.over(i, edge, producer=producer, consumer=consumer)
            if tensors is None:
                doubtful.add(edge.consumer)
            else:
                given.setdefault(edge.consumer, {}).update(tensors)
                names[i] = tuple(carried.taken_by(edge.transform) if edge.transform else tensors)
                brings[i] = tuple(tensors)
        # A dangling edge is problem enough: whom it was to feed is not known.
        for stage in stages.values() if len(known) == len(shape.edges) else ():
            if stage.name not in doubtful:
                self._check_fed(stage, given.get(stage.name))
        self._check_joins(shape)
        return tuple(
            replace(
                _edge(shape.edges[i], names.get(i, ())),
                when=self.whens.resolve(("edges", i, "when"), shape.edges[i].when or ()),
                apart=_is_apart(shape.edges[i], shape.stages[shape.edges[i].consumer].join),
                brings=brings.get(i, ()),
            )
            for i in known
        )

    def _check_joins(self, shape: PipelineShape) -> None:
        for name, stage in shape.stages.items():
            names = {each for edge in shape.edges if edge.consumer == name for each in (edge.edge_name, edge.producer)}
            for joined in stage.join if isinstance(stage.join, list) else ():
                if joined not in names:
                    remedy = suggest(joined, names)
                    self.problems.add(
                        ("stages", name, "join"),
                        f"no edge {joined!r} leads to stage {name!r}, nor one from it; {remedy}",
                    )

    def _check_ends(self, index: int, edge: EdgeShape, shape: PipelineShape) -> bool:
        ends = {"from": edge.producer, "to": edge.consumer}
        missing = {key: name for key, name in ends.items() if name not in shape.stages}
        for key, name in missing.items():
            self.problems.add(("edges", index, key), f"edge to no stage: {name!r}; {suggest(name, shape.stages)}")
        return not missing

    def _check_names(self, edges: Sequence[EdgeShape]) -> None:
        names = [edge.edge_name for edge in edges]
        for i, name in enumerate(names):
            if name in names[:i]:
                self.problems.add(("edges", i), f"edge {name!r} exists already; give this one another `name`")

    def _check_cycles(self, shape: PipelineShape, known: Sequence[int]) -> None:
        arcs = {Arc(shape.edges[i].producer, shape.edges[i].consumer): i for i in known}
        cycle = find_cycle(list(shape.stages), arcs)
        if cycle:
            last = arcs[Arc(cycle[-2], cycle[-1])]
            self.problems.add(("edges", last), f"cycle {' -> '.join(cycle)}; remove one of these edges")

    def _check_transport(self, index: int, edge: EdgeShape, producer: Stage | None) -> None:
        if edge.connector not in {AUTO, *descriptors()}:
            self.problems.add(
                ("edges", index, "connector"),
                f"unknown connector {edge.connector!r}; use one of {', '.join((AUTO, *descriptors()))}",
            )
        if producer is not None and isinstance(edge.policy, FramesPolicy):
            first_axes = {emitted.spec.shape[:1] for emitted in producer.signature.emits.values()}
            if len(first_axes) > 1 or () in first_axes:
                self.problems.add(
                    ("edges", index, "chunk"),
                    f"the tensors that stage {edge.producer!r} emits have no first axis in common to cut frames from "
                    f"({list_specs(emitted(producer))}); use `step` or `whole`",
                )

    def _check_fed(self, stage: Stage, given: Mapping[str, TensorSpec] | None) -> None:
        accepts = stage.signature.accepts
        if given is not None and not accepts:
            self.problems.add(
                ("stages", stage.name),
                f"stage {stage.name!r} takes the client's prompt and no tensors; remove its edges",
            )
        missing = {
            name: spec
            for name, spec in accepts.items()
            if name not in (given or {}) and (given is None or name not in stage.signature.optional)
        }
        if missing and given is None:
            self.problems.add(
                ("stages", stage.name),
                f"no edge leads to stage {stage.name!r}, which accepts {list_specs(accepts)}; add one to `edges`",
            )
        elif missing:
            self.problems.add(
                ("stages", stage.name),
                f"no edge brings stage {stage.name!r} its {list_specs(missing)}; add one, or change a transform",
            )


def _is_apart(shape: EdgeShape, join: str | list[str]) -> bool:
    if isinstance(join, list):
        return shape.edge_name not in join and shape.producer not in join
    return join == "any"


def _edge(shape: EdgeShape, tensors: tuple[str, ...]) -> Edge:
    return Edge(
        name=shape.edge_name,
        producer=shape.producer,
        consumer=shape.consumer,
        transform=shape.transform or "",
        connector=shape.connector,
        policy=shape.policy,
        tensors=tensors,
        tokens=shape.tokens,
    )
