"""The baseline: assigns requests to replicas round robin, regardless of their load."""

from collections.abc import Collection, Iterator, Sequence
from itertools import cycle, islice

from stagemesh.orchestrator.fleet.replica import Replica
from stagemesh.orchestrator.fleet.replica_registry import ReadyReplicas
from stagemesh.orchestrator.planning.planner import LeastWork


class RoundRobin(LeastWork):
    """Cycles through the replicas that are ready when a stage is first planned."""

    def __init__(self) -> None:
        super().__init__()
        self._turns: dict[ReadyReplicas, Iterator[Replica]] = {}

    def choose(
        self,
        ready: ReadyReplicas,
        *,
        near: Sequence[Replica] = (),  # noqa: ARG002
        avoid: Collection[Replica] = (),
    ) -> Replica | None:
        """Returns the next replica that is not in `avoid`, or None."""
        measurements = self._turns.setdefault(ready, cycle(list(ready.all)))
        return next((replica for replica in islice(measurements, len(ready.all)) if replica not in avoid), None)
