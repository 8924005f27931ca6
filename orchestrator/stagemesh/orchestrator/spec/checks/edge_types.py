"""Checks the types of the tensors on an edge, from the producer over the transform to the consumer."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from stagemesh.common.errors import StagemeshError
from stagemesh.common.tensors import TensorSpec
from stagemesh.orchestrator.spec.checks.problems import Problems
from stagemesh.orchestrator.spec.checks.stages import Catalog
from stagemesh.orchestrator.spec.model import Stage
from stagemesh.orchestrator.spec.schema import EdgeEntry


class Endpoint(NamedTuple):
    """A stage or transform on an edge, with the types of the tensors that it emits or accepts."""

    name: str
    tensors: Mapping[str, TensorSpec]

    def __str__(self) -> str:
        return list_specs(self.tensors)


class EdgeTensors(NamedTuple):
    """The names of the tensors that an edge transfers (`carried`) and that the consumer then receives (`brought`)."""

    carried: tuple[str, ...]
    brought: tuple[str, ...]


@dataclass(frozen=True)
class EdgeTypes:
    """Determines which tensors each edge transfers. Reports type mismatches to `problems`."""

    catalog: Catalog
    problems: Problems

    def resolve(self, index: int, edge: EdgeEntry, *, producer: Stage, consumer: Stage) -> EdgeTensors | None:
        """Returns the tensors on an edge, or None if their types do not match.

        `index` is the edge's position in the file.
        """
        source = Endpoint(f"stage {producer.name!r}", emitted(producer))
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
        carried = brought if edge.transform is None else tuple(self.catalog.transform(edge.transform).takes)
        return EdgeTensors(carried, brought)

    def _transformed(self, index: int, name: str, given: Endpoint) -> Endpoint | None:
        try:
            transform = self.catalog.transform(name)
        except StagemeshError as exc:
            self.problems.add(("edges", index, "transform"), exc.message)
            return None
        taken = Endpoint(f"transform {name!r}", transform.takes)
        if not given.tensors.keys() >= taken.tensors.keys():
            self.problems.add(
                ("edges", index, "transform"),
                f"{taken.name} takes {taken}, but {given.name} emits {given}; choose another transform",
            )
            return None
        return Endpoint(taken.name, transform.gives) if self._fits(index, given, taken) else None

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


def emitted(stage: Stage) -> Mapping[str, TensorSpec]:
    """Returns the types of the tensors that a stage emits, by tensor name."""
    return {name: each.spec for name, each in stage.signature.emits.items()}


def list_specs(specs: Mapping[str, TensorSpec]) -> str:
    """Formats tensor types for a message. Returns "nothing" if there are none."""
    return ", ".join(f"{name}: {spec}" for name, spec in specs.items()) or "nothing"
