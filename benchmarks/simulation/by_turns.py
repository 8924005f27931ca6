"""The baseline: replicas take requests by turns, whatever they have to do."""

from collections.abc import Collection, Iterator, Sequence
from itertools import cycle, islice

from stagemesh.orchestrator.fleet.replica import Replica
from stagemesh.orchestrator.fleet.replica_registry import ReadyReplicas


class ByTurns:
    """Round robin over the replicas that are ready when a stage is first asked for; see Choice."""

    def __init__(self) -> None:
        self._turns: dict[ReadyReplicas, Iterator[Replica]] = {}

    def choose(
        self,
        ready: ReadyReplicas,
        *,
        near: Sequence[Replica] = (),  # noqa: ARG002
        avoid: Collection[Replica] = (),
    ) -> Replica | None:
        """The next one."""
        turns = self._turns.setdefault(ready, cycle(list(ready.all)))
        return next((replica for replica in islice(turns, len(ready.all)) if replica not in avoid), None)
