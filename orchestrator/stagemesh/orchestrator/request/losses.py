"""What was lost of a request and is to be mended, until somebody looks."""

import asyncio
from collections.abc import Callable, Mapping
from typing import NamedTuple

from stagemesh.common.errors import StagemeshError
from stagemesh.orchestrator.fleet.replica import Replica
from stagemesh.orchestrator.request.root_cause import Failure

_RESTARTED = "REPLICA_RESTARTED"
_ENGINE_DIED = "ENGINE_DIED"
_BAD_CHECKPOINTS = frozenset({"INVALID_CHECKPOINT", "UNSUPPORTED", "CHECKPOINT_GONE"})


class Taken(NamedTuple):
    """By stage, why its step is lost, and why it cannot give what it gave."""

    lost: Mapping[str, StagemeshError]
    fresh: Mapping[str, StagemeshError]


class Losses:
    """Of one request. A step that was told to stop by nobody we know of is doubtful: a neighbour's loss explains it."""

    def __init__(self) -> None:
        self._lost: dict[str, StagemeshError] = {}
        self._fresh: dict[str, StagemeshError] = {}
        self._doubtful: dict[str, Failure] = {}
        self._doubted_s = self._lost_s = float("-inf")

    def has(self, stage: str) -> bool:
        """Whether the stage's step is known to be lost."""
        return stage in self._lost or stage in self._doubtful

    def add(self, failure: Failure) -> None:
        """A stage's step is lost."""
        self._lost[failure.stage] = failure.error
        self._lost_s = _now_s()

    def add_fresh(self, stage: str, error: StagemeshError) -> None:
        """A stage has to run from the start again, whether or not it runs still."""
        self._fresh[stage] = error
        self._lost_s = _now_s()

    def add_doubtful(self, failure: Failure) -> None:
        """A stage's step was stopped."""
        self._doubtful[failure.stage] = failure
        self._doubted_s = _now_s()

    def settle(self, settle_s: float, *, wake: Callable[[], None]) -> list[Failure]:
        """Doubtful ones that nothing explained for so long; others are lost, once something does. May call `wake`."""
        if not self._doubtful:
            return []
        if abs(self._doubted_s - self._lost_s) < settle_s:
            self._lost |= {stage: failure.error for stage, failure in self._doubtful.items()}
            self._doubtful.clear()
            return []
        left_s = self._doubted_s + settle_s - _now_s()
        if left_s > 0:
            asyncio.get_running_loop().call_later(left_s, wake)
            return []
        failures = list(self._doubtful.values())
        self._doubtful.clear()
        return failures

    def take(self) -> Taken:
        """All that is to be mended now."""
        taken = Taken(self._lost, self._fresh)
        self._lost, self._fresh = {}, {}
        return taken


def is_death(error: StagemeshError, replica: Replica) -> bool:
    """Whether the error is that the replica's process died, or is about to."""
    return error.reason in {_ENGINE_DIED, _RESTARTED} or (replica.gone is not None and replica.died)


def rejects_checkpoint(error: StagemeshError) -> bool:
    """Whether a step failed because it could not go on from where it was to."""
    return error.reason in _BAD_CHECKPOINTS


def _now_s() -> float:
    return asyncio.get_running_loop().time()
