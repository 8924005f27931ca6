"""Classifies the failures of a request's steps as recoverable or final, and finds the root cause of final failures.

If one stage fails, its upstream and downstream stages soon fail too. A consumer receives an Abort message or loses the
connection to its producer. A producer is rejected by a consumer that has ended. The client must receive the error of
the stage that failed first.
"""

import asyncio
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

from stagemesh.common.errors import ENGINE_DIED, Code, InternalError, StagemeshError
from stagemesh.common.notification import Notifier
from stagemesh.orchestrator.fleet.replica import Replica
from stagemesh.orchestrator.fleet.replica_loss import REPLICA_LOST
from stagemesh.orchestrator.request.recovery import Phase, StepState

POISON_REQUEST = "POISON_REQUEST"
NOT_REBOUND = "NOT_REBOUND"
_RESTARTED = "REPLICA_RESTARTED"
# A producer receives this reason from a consumer that has released the request.
_NOT_EXPECTED = "UNKNOWN_FLOW"
# The replica drains, sleeps or loads. Another replica may run the step.
_NOT_READY = "NOT_READY"
# The process of the replica has restarted since another orchestrator started the step, or it has forgotten the step.
_NOT_STARTED = "UNKNOWN_STEP"
# A replica receives these reasons from the replica at the other end of an edge if that replica has been rebound.
_REPLACED = frozenset({"STALE_ATTEMPT", "STALE_INCARNATION"})
_BAD_CHECKPOINT = frozenset({"INVALID_CHECKPOINT", "UNSUPPORTED"})

SETTLE_S = 1.0
"""The time to wait for a conclusive failure if all known failures are inconclusive, in seconds.

This time suffices, because the end of a killed process is noticed within milliseconds.
"""


class CauseRank(IntEnum):
    """The rank of a failure. The lower the rank, the more likely the failure is the root cause.

    A failure with the rank LOST or OWN is certain to be a root cause.
    """

    LOST = 0
    """The replica that ran the stage terminated or became unreachable."""
    OWN = 1
    """The stage reported an error that occurred in the stage itself."""
    ECHO = 2
    """The stage reported an error that the stage had received from another stage."""
    PEER_LOST = 3
    """The stage cannot reach a replica of an adjacent stage, or that replica has already released the request."""
    CANCELLED = 4
    """The stage's step was cancelled."""


@dataclass(frozen=True)
class Failure:
    """The error with which a stage's step ended."""

    stage: str
    error: StagemeshError

    @property
    def rank(self) -> CauseRank:
        """The rank of this failure, derived from its error."""
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
        """Whether the stage may succeed on another replica, or with other upstream or downstream replicas."""
        if self.rank in (CauseRank.LOST, CauseRank.PEER_LOST) or self.error.reason in (_NOT_READY, _NOT_STARTED):
            return True
        return self.error.reason in _REPLACED and "edge" in self.error.metadata

    @property
    def is_conclusive(self) -> bool:
        """Whether this failure is certain to be a root cause. There is then no need to wait for later failures."""
        return self.rank <= CauseRank.OWN


def root_cause(failures: Sequence[Failure]) -> Failure:
    """Returns the failure that is most likely the root cause. If several are equally likely, returns the first one."""
    return min(failures, key=lambda failure: failure.rank)


class Losses(NamedTuple):
    """The stages that must be recovered, each with the error that is the reason."""

    lost: Mapping[str, StagemeshError]
    """The errors of steps that ended but can be recovered, by stage name."""
    fresh: Mapping[str, StagemeshError]
    """The errors of stages that must restart from the beginning instead of from a checkpoint, by stage name."""


class Failures:
    """Collects the failures of one request's steps. Fires the notifier `changed` for each failure.

    A failure is doubtful if the step was cancelled although this orchestrator did not request the cancellation. If
    another stage is lost within SETTLE_S seconds of the cancellation, that loss explains the cancellation, and the
    cancelled step is recovered too. Otherwise, the doubtful failure becomes final.
    """

    def __init__(self, changed: Notifier) -> None:
        self.final: list[Failure] = []
        """The failures that end the request, oldest first."""
        self._changed = changed
        self._lost: dict[str, StagemeshError] = {}
        self._fresh: dict[str, StagemeshError] = {}
        self._doubtful: dict[str, Failure] = {}
        self._doubted_s = self._lost_s = float("-inf")

    def add(self, state: StepState, attempt: int, error: StagemeshError) -> None:
        """Adds the failure of the attempt number `attempt` of a stage. `state` is the current state of the stage.

        Ignores the failure if a newer attempt exists, if the stage has finished, or if a failure of the same attempt
        was already added.
        """
        known = state.name in self._lost or state.name in self._doubtful
        if state.attempt != attempt or state.phase is Phase.FINISHED or known:
            return
        # Store a copy, because the traceback of the raised error refers to the request's run.
        failure = Failure(state.name, copy(error))
        if error.code in (Code.UNAUTHENTICATED, Code.PERMISSION_DENIED):
            # The stage has rejected the orchestrator. The client's credentials are a matter of the orchestrator alone.
            problem = f"stage {state.name!r} rejected the orchestrator: {error.message}"
            failure = Failure(state.name, InternalError(problem, metadata=error.metadata))
        if _is_death(error, state.replica) and state.at_work and state.replica not in state.dead_replicas:
            state.dead_replicas |= {state.replica}
            if state.alone:
                failure = Failure(state.name, _poison(state, error))
        if failure.error.reason == POISON_REQUEST:
            self.final.append(failure)
        elif state.resumed is not None and error.reason in _BAD_CHECKPOINT:
            self.require_fresh(state.name, error)
        elif failure.is_recoverable:
            if error.reason not in (NOT_REBOUND, _NOT_STARTED):
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
        """Adds a failure of a stage from which the request cannot recover."""
        self.final.append(Failure(stage, error))
        self._changed.fire()

    def require_fresh(self, stage: str, error: StagemeshError) -> None:
        """Requires a stage to restart from the beginning instead of from its checkpoint, even if its step is running.

        `error` is the reason for the restart.
        """
        self._fresh[stage] = error
        self._lost_s = _now_s()
        self._changed.fire()

    def take_losses(self) -> Losses:
        """Returns the stages that must be recovered, and removes them from this object.

        First converts doubtful failures to losses or final failures, if this can be decided already.
        """
        self._settle_doubtful()
        losses = Losses(self._lost, self._fresh)
        self._lost, self._fresh = {}, {}
        return losses

    def _settle_doubtful(self) -> None:
        """Converts doubtful failures to losses if another stage was lost within SETTLE_S seconds of the cancellation.

        If no other stage was lost, converts them to final failures after SETTLE_S seconds. Until then, leaves them
        unchanged.
        """
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
    """Returns whether the process of `replica` has died, or `error` means that the process died or is about to die."""
    return error.reason in {ENGINE_DIED, _RESTARTED} or (replica.end_cause is not None and replica.died)


def _poison(state: StepState, error: StagemeshError) -> InternalError:
    return InternalError(
        f"{len(state.dead_replicas)} processes of stage {state.name!r} died while they ran the request, the last of "
        f"them while it ran no other request ({error.message}); the request is probably the cause",
        reason=POISON_REQUEST,
        metadata={"stage": state.name},
    )


def _now_s() -> float:
    return asyncio.get_running_loop().time()
