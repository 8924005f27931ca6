"""Checks that what flows over the edges fits together."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from stagemesh.connectors.base import ConnectorName, FramesPolicy
from stagemesh.connectors.errors import StagemeshError
from stagemesh.connectors.tensors import TensorSpec
from stagemesh.orchestrator.spec.graph import Arc, find_cycle
from stagemesh.orchestrator.spec.model import Edge, Stage
from stagemesh.orchestrator.spec.problems import Problems, suggest
from stagemesh.orchestrator.spec.schema import EdgeShape, PipelineShape
from stagemesh.orchestrator.spec.stages import Catalog


@dataclass(frozen=True)
class EdgeResolver:
    """Turns the file's edges into checked ones; what is wrong goes to `problems`."""

    catalog: Catalog
    problems: Problems

    def resolve(self, shape: PipelineShape, stages: Mapping[str, Stage]) -> tuple[Edge, ...]:
        """The edges whose ends exist, with all that is wrong about them noted."""
        known = [i for i, edge in enumerate(shape.edges) if self._check_ends(i, edge, shape)]
        self._check_names(shape.edges)
        self._check_cycles(shape, known)
        given: dict[str, dict[str, TensorSpec]] = {}
        broken = set[str]()
        for i in known:
            edge = shape.edges[i]
            self._check_transport(i, edge, stages.get(edge.producer))
            tensors = self._carried(i, edge, stages)
            if tensors is None:
                broken.add(edge.consumer)
            else:
                given.setdefault(edge.consumer, {}).update(tensors)
        # A dangling edge is problem enough: whom it was to feed is not known.
        for stage in stages.values() if len(known) == len(shape.edges) else ():
            if stage.name not in broken:
                self._check_fed(stage, given.get(stage.name))
        return tuple(_edge(shape.edges[i]) for i in known)

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
        if edge.connector == ConnectorName.NIXL.value:
            self.problems.add(
                ("edges", index, "connector"), "connector nixl is not built in this version: use auto, shm or grpc"
            )
        if producer is not None and isinstance(edge.policy, FramesPolicy):
            first_axes = {emitted.spec.shape[:1] for emitted in producer.signature.emits.values()}
            if len(first_axes) > 1 or () in first_axes:
                self.problems.add(
                    ("edges", index, "chunk"),
                    f"the tensors that stage {edge.producer!r} emits have no first axis in common to cut frames from "
                    f"({_list(_emitted(producer))}); use `step` or `whole`",
                )

    def _carried(self, index: int, edge: EdgeShape, stages: Mapping[str, Stage]) -> Mapping[str, TensorSpec] | None:
        """What the consumer gets over this edge; None where that is wrong or not known."""
        producer, consumer = stages.get(edge.producer), stages.get(edge.consumer)
        if producer is None or consumer is None:
            return None
        carried = _emitted(producer)
        if edge.transform is not None:
            try:
                card = self.catalog.transform(edge.transform)
            except StagemeshError as exc:
                self.problems.add(("edges", index, "transform"), exc.message)
                return None
            taker = f"transform {edge.transform!r}"
            lacks = [name for name in card.takes if name not in carried]
            fits = self._check_types(index, f"stage {producer.name!r}", carried, taker, card.takes)
            if lacks:
                self.problems.add(
                    ("edges", index, "transform"),
                    f"{taker} takes {_list(card.takes)}, but stage {producer.name!r} emits {_list(carried)}; "
                    "choose another transform",
                )
            if lacks or not fits:
                return None
            carried = card.gives
        giver = f"transform {edge.transform!r}" if edge.transform else f"stage {producer.name!r}"
        accepts = consumer.signature.accepts
        if not self._check_types(index, giver, carried, f"stage {consumer.name!r}", accepts):
            return None
        if accepts and not set(carried) & set(accepts):
            self.problems.add(
                ("edges", index),
                f"{giver} gives {_list(carried)}, of which stage {consumer.name!r} accepts nothing "
                f"(it accepts {_list(accepts)}); add a transform, or remove the edge",
            )
            return None
        return {name: spec for name, spec in carried.items() if name in accepts}

    def _check_types(
        self, index: int, giver: str, given: Mapping[str, TensorSpec], taker: str, taken: Mapping[str, TensorSpec]
    ) -> bool:
        wrong = [name for name, spec in taken.items() if name in given and not spec.accepts(given[name])]
        for name in wrong:
            self.problems.add(
                ("edges", index),
                f"type mismatch: {giver} gives {name}: {given[name]}, {taker} expects {name}: {taken[name]}; "
                "add or change the edge's transform",
            )
        return not wrong

    def _check_fed(self, stage: Stage, given: Mapping[str, TensorSpec] | None) -> None:
        accepts = stage.signature.accepts
        if given is not None and not accepts:
            self.problems.add(
                ("stages", stage.name),
                f"stage {stage.name!r} takes the client's prompt and no tensors; remove its edges",
            )
        missing = {name: spec for name, spec in accepts.items() if name not in (given or {})}
        if missing and given is None:
            self.problems.add(
                ("stages", stage.name),
                f"no edge leads to stage {stage.name!r}, which accepts {_list(accepts)}; add one to `edges`",
            )
        elif missing:
            self.problems.add(
                ("stages", stage.name),
                f"no edge brings stage {stage.name!r} its {_list(missing)}; add one, or change a transform",
            )


def _edge(shape: EdgeShape) -> Edge:
    return Edge(
        name=shape.edge_name,
        producer=shape.producer,
        consumer=shape.consumer,
        transform=shape.transform or "",
        connector=ConnectorName(shape.connector),
        policy=shape.policy,
    )


def _emitted(stage: Stage) -> Mapping[str, TensorSpec]:
    return {name: emitted.spec for name, emitted in stage.signature.emits.items()}


def _list(specs: Mapping[str, TensorSpec]) -> str:
    return ", ".join(f"{name}: {spec}" for name, spec in specs.items()) or "nothing"
