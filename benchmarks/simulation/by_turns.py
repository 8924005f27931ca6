"""The baseline: round robin, which ignores the replicas' loads."""

from collections.abc import Collection, Iterator, Sequence
from itertools import cycle, islice

from stagemesh.orchestrator.fleet.replica import Replica
from stagemesh.orchestrator.fleet.replica_registry import ReadyReplicas


class ByTurns:
    """Chooses in turn among the replicas that are ready at a stage's first request."""

    def __init__(self) -> None:
        self._turns: dict[ReadyReplicas, Iterator[Replica]] = {}

    def choose(
        self,
        ready: ReadyReplicas,
        *,
        near: Sequence[Replica] = (),  # noqa: ARG002
        avoid: Collection[Replica] = (),
    ) -> Replica | None:
        """Returns the next replica."""
        turns = self._turns.setdefault(ready, cycle(list(ready.all)))
        return next((replica for replica in islice(turns, len(ready.all)) if replica not in avoid), None)
