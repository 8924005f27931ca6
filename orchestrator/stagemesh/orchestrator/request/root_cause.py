"""Finds the root among the failures of a request's stages.

When one stage breaks, its neighbours soon fail too: the consumer hears an Abort or loses its producer, the
producer is refused. The client is to hear of the one that broke.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

from stagemesh.common.errors import Code, StagemeshError
from stagemesh.orchestrator.fleet.stage_client import REPLICA_LOST

# What a producer hears from a consumer that has let go of the request.
_NOT_EXPECTED = "UNKNOWN_FLOW"
# The replica drains, sleeps or loads; another one may take the step.
_NOT_READY = "NOT_READY"
# What an end of an edge hears from the other one, which goes on with somebody else.
_REPLACED = frozenset({"STALE_ATTEMPT", "STALE_INCARNATION"})


class StageOutcome(IntEnum):
    """How surely an error is the root; lower is surer. Up to OWN nothing surer can come."""

    LOST = 0
    """The replica itself went away."""
    OWN = 1
    """The stage says what it did not manage."""
    ECHO = 2
    """The stage passes on what another one reported."""
    NEIGHBOUR = 3
    """The stage lost a peer, or was no longer expected by it."""
    CANCELLED = 4
    """The stage was told to stop."""


@dataclass(frozen=True)
class Failure:
    """How one stage's step ended."""

    stage: str
    error: StagemeshError

    @property
    def standing(self) -> StageOutcome:
        """How surely this is the root."""
        error = self.error
        if error.reason == REPLICA_LOST:
            return StageOutcome.LOST
        if error.code in (Code.CANCELLED, Code.ABORTED):
            return StageOutcome.CANCELLED
        if error.code is Code.UNAVAILABLE or error.reason == _NOT_EXPECTED:
            return StageOutcome.NEIGHBOUR
        return StageOutcome.OWN if error.metadata.get("stage", self.stage) == self.stage else StageOutcome.ECHO

    @property
    def mendable(self) -> bool:
        """Whether the stage may do better on another replica or with another neighbour; it has given no verdict."""
        if self.standing in (StageOutcome.LOST, StageOutcome.NEIGHBOUR) or self.error.reason == _NOT_READY:
            return True
        return self.error.reason in _REPLACED and "edge" in self.error.metadata

    @property
    def conclusive(self) -> bool:
        """Whether nothing surer can come."""
        return self.standing <= StageOutcome.OWN


def root_cause(failures: Sequence[Failure]) -> Failure:
    """The surest of the failures, the first of equals."""
    return min(failures, key=lambda failure: failure.standing)
