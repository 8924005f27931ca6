"""Checks the tensor types along an edge: producer, transform, consumer."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from stagemesh.common.errors import StagemeshError
from stagemesh.common.tensors import TensorSpec
from stagemesh.orchestrator.spec.checks.problems import Problems
from stagemesh.orchestrator.spec.checks.stages import Catalog
from stagemesh.orchestrator.spec.model import Stage
from stagemesh.orchestrator.spec.schema import EdgeShape


class Endpoint(NamedTuple):
    """Who gives or takes tensors at one point of an edge."""

    who: str
    tensors: Mapping[str, TensorSpec]

    def __str__(self) -> str:
        return list_specs(self.tensors)


@dataclass(frozen=True)
class CarriedTensors:
    """What edges bring their consumers; what does not fit goes to `problems`."""

    catalog: Catalog
    problems: Problems

    def over(self, index: int, edge: EdgeShape, *, producer: Stage, consumer: Stage) -> Mapping[str, TensorSpec] | None:
        """What the consumer gets over edge number `index`; None where that is wrong."""
        made = Endpoint(f"stage {producer.name!r}", emitted(producer))
        given = made if edge.transform is None else self._transformed(index, edge.transform, made)
        taken = Endpoint(f"stage {consumer.name!r}", consumer.signature.accepts)
        if given is None or not self._fits(index, given, taken):
            return None
        if taken.tensors and not given.tensors.keys() & taken.tensors.keys():
            self.problems.add(
                ("edges", index),
                f"{given.who} gives {given}, of which {taken.who} accepts nothing (it accepts {taken}); "
                "add a transform, or remove the edge",
            )
            return None
        return {name: spec for name, spec in given.tensors.items() if name in taken.tensors}

    def taken_by(self, transform: str) -> Mapping[str, TensorSpec]:
        """What a transform that is known to fit takes."""
        return self.catalog.transform(transform).takes

    def _transformed(self, index: int, name: str, given: Endpoint) -> Endpoint | None:
        try:
            card = self.catalog.transform(name)
        except StagemeshError as exc:
            self.problems.add(("edges", index, "transform"), exc.message)
            return None
        taken = Endpoint(f"transform {name!r}", card.takes)
        if not given.tensors.keys() >= taken.tensors.keys():
            self.problems.add(
                ("edges", index, "transform"),
                f"{taken.who} takes {taken}, but {given.who} emits {given}; choose another transform",
            )
            return None
        return Endpoint(taken.who, card.gives) if self._fits(index, given, taken) else None

    def _fits(self, index: int, given: Endpoint, taken: Endpoint) -> bool:
        common = taken.tensors.keys() & given.tensors.keys()
        wrong = sorted(name for name in common if not taken.tensors[name].accepts(given.tensors[name]))
        for name in wrong:
            self.problems.add(
                ("edges", index),
                f"type mismatch: {given.who} gives {name}: {given.tensors[name]}, {taken.who} expects "
                f"{name}: {taken.tensors[name]}; add or change the edge's transform",
            )
        return not wrong


def emitted(stage: Stage) -> Mapping[str, TensorSpec]:
    """The types of what a stage emits."""
    return {name: each.spec for name, each in stage.signature.emits.items()}


def list_specs(specs: Mapping[str, TensorSpec]) -> str:
    """Tensor types as people read them."""
    return ", ".join(f"{name}: {spec}" for name, spec in specs.items()) or "nothing"
