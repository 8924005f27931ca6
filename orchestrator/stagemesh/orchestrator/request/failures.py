"""Classifies the failures of a request's steps: recoverable failures, and the root cause of the request's end.

If one stage breaks, its upstream and downstream stages soon fail too: a consumer receives an Abort or loses its
producer, and when a consumer ends, its producer is rejected. The client must receive the error of the stage that broke.
"""

import asyncio
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

from stagemesh.common.errors import Code, StagemeshError, UnavailableError
from stagemesh.common.notifier import Notifier
from stagemesh.orchestrator.fleet.replica import Replica
from stagemesh.orchestrator.fleet.replica_client import REPLICA_LOST
from stagemesh.orchestrator.request.recovery import Phase
from stagemesh.orchestrator.request.step_state import StepState

POISON_REQUEST = "POISON_REQUEST"
NOT_REBOUND = "NOT_REBOUND"
_RESTARTED = "REPLICA_RESTARTED"
_ENGINE_DIED = "ENGINE_DIED"
# A producer receives this reason from a consumer that has released the request.
_NOT_EXPECTED = "UNKNOWN_FLOW"
# The replica drains, sleeps or loads. Another replica may run the step.
_NOT_READY = "NOT_READY"
# One end of an edge receives these reasons from the other end, which has been rebound.
_REPLACED = frozenset({"STALE_ATTEMPT", "STALE_INCARNATION"})
_BAD_CHECKPOINT = frozenset({"INVALID_CHECKPOINT", "UNSUPPORTED", "CHECKPOINT_GONE"})

SETTLE_S = 1.0
"""The time in seconds for which an inconclusive cause waits for a more certain cause.

A killed process is noticed within milliseconds.
"""


class CauseRank(IntEnum):
    """The certainty that a failure is the root cause. A lower rank is more certain. LOST and OWN are conclusive."""

    LOST = 0
    """The stage's own replica terminated."""
    OWN = 1
    """The stage reports its own error."""
    ECHO = 2
    """The stage reports an error that it received from another stage."""
    PEER_LOST = 3
    """The stage lost its upstream or downstream replica, or that replica no longer expects the stage."""
    CANCELLED = 4
    """The stage was stopped."""


@dataclass(frozen=True)
class Failure:
    """The error with which a stage's step ended."""

    stage: str
    error: StagemeshError

    @property
    def rank(self) -> CauseRank:
        """The certainty that this failure is the root cause."""
        error = self.error
        if error.reason == REPLICA_LOST:
            return CauseRank.LOST
        if error.code in (Code.CANCELLED, Code.ABORTED):
            return CauseRank.CANCELLED
        if error.code is Code.UNAVAILABLE or error.reason == _NOT_EXPECTED:
            return CauseRank.PEER_LOST
        return CauseRank.OWN if error.metadata.get("stage", self.stage) == self.stage else CauseRank.ECHO

    @property
    def is_recoverable(self) -> bool:
        """Whether the stage may succeed on another replica or with other upstream and downstream replicas."""
        if self.rank in (CauseRank.LOST, CauseRank.PEER_LOST) or self.error.reason == _NOT_READY:
            return True
        return self.error.reason in _REPLACED and "edge" in self.error.metadata

    @property
    def is_conclusive(self) -> bool:
        """Whether no later failure can be a more certain cause."""
        return self.rank <= CauseRank.OWN


def root_cause(failures: Sequence[Failure]) -> Failure:
    """Returns the failure that is most certainly the root cause. Of equally certain failures, returns the first."""
    return min(failures, key=lambda failure: failure.rank)


class Losses(NamedTuple):
    """The steps to recover, with their errors by stage."""

    lost: Mapping[str, StagemeshError]
    """The errors of steps that ended, by stage."""
    fresh: Mapping[str, StagemeshError]
    """The errors of steps that cannot send their data again, by stage. These stages must restart from the beginning."""


class Failures:
    """The failures of one request. Fires `changed` for each failure.

    If a step was cancelled although this orchestrator did not request it, the failure is doubtful: the loss of another
    stage within SETTLE_S may explain it.
    """

    def __init__(self, changed: Notifier) -> None:
        self.final: list[Failure] = []
        """The failures that end the request."""
        self._changed = changed
        self._lost: dict[str, StagemeshError] = {}
        self._fresh: dict[str, StagemeshError] = {}
        self._doubtful: dict[str, Failure] = {}
        self._doubted_s = self._lost_s = float("-inf")

    def add(self, state: StepState, attempt: int, error: StagemeshError) -> None:
        """Adds the failure of an attempt of a stage.

        Does nothing if a newer attempt exists, if the stage has finished, or if a failure of the attempt is already
        known.
        """
        known = state.name in self._lost or state.name in self._doubtful
        if state.attempt != attempt or state.phase is Phase.FINISHED or known:
            return
        # A copy, because the error itself refers to the frames that it passed, and therefore to the run.
        failure = Failure(state.name, copy(error))
        if _is_death(error, state.replica) and state.at_work and state.replica not in state.dead_replicas:
            state.dead_replicas |= {state.replica}
            if state.alone:
                failure = Failure(state.name, _poison(state, error))
        if failure.error.reason == POISON_REQUEST:
            self.final.append(failure)
        elif state.resumed is not None and error.reason in _BAD_CHECKPOINT:
            self.require_fresh(state.name, error)
        elif failure.is_recoverable:
            if error.reason != NOT_REBOUND:
                state.avoid |= {state.replica}
            self._lost[state.name] = failure.error
            self._lost_s = _now_s()
        elif failure.rank is CauseRank.CANCELLED:
            self._doubtful[state.name] = failure
            self._doubted_s = _now_s()
        else:
            self.final.append(failure)
        self._changed.fire()

    def add_final(self, stage: str, error: StagemeshError) -> None:
        """Adds a failure that ends the request."""
        self.final.append(Failure(stage, error))
        self._changed.fire()

    def require_fresh(self, stage: str, error: StagemeshError) -> None:
        """Records that a stage must restart from the beginning, even if its step is still running."""
        self._fresh[stage] = error
        self._lost_s = _now_s()
        self._changed.fire()

    def take_losses(self) -> Losses:
        """Returns the steps to recover, and removes them. Decides on doubtful failures first."""
        self._settle_doubtful()
        losses = Losses(self._lost, self._fresh)
        self._lost, self._fresh = {}, {}
        return losses

    def _settle_doubtful(self) -> None:
        """Treats doubtful failures as losses if another stage is lost within SETTLE_S, and as final otherwise."""
        if not self._doubtful:
            return
        left_s = self._doubted_s + SETTLE_S - _now_s()
        if abs(self._doubted_s - self._lost_s) < SETTLE_S:
            self._lost |= {stage: failure.error for stage, failure in self._doubtful.items()}
        elif left_s > 0:
            asyncio.get_running_loop().call_later(left_s, self._changed.fire)
            return
        else:
            self.final += self._doubtful.values()
        self._doubtful.clear()


def _is_death(error: StagemeshError, replica: Replica) -> bool:
    """Returns whether the error means that the replica's process has died or is about to die."""
    return error.reason in {_ENGINE_DIED, _RESTARTED} or (replica.end_cause is not None and replica.died)


def _poison(state: StepState, error: StagemeshError) -> UnavailableError:
    return UnavailableError(
        f"{len(state.dead_replicas)} processes of stage {state.name!r} died while they ran the request, the last of "
        f"them while it ran no other request ({error.message}); the request is probably the cause",
        reason=POISON_REQUEST,
        metadata={"stage": state.name},
    )


def _now_s() -> float:
    return asyncio.get_running_loop().time()
