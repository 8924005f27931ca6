"""What happened to a request and when: a few numbers for each attempt at a stage's share, however long it runs.

Times are seconds since the request was received. Notes are made for every output, so that each costs well under a
microsecond; whatever can be worked out later is.
"""

import time
from collections.abc import Callable, Sequence
from copy import copy
from enum import Enum
from typing import NamedTuple

from stagemesh.common.errors import CancelledRequestError, StagemeshError
from stagemesh.v1 import stage_pb2


class RequestState(Enum):
    """How far a request is; the value is the wire's name without its prefix."""

    QUEUED = "QUEUED"
    RUNNING = "RUNNING"
    FINISHED = "FINISHED"
    FAILED = "FAILED"
    CANCELLED = "CANCELLED"

    @property
    def is_over(self) -> bool:
        """Whether nothing more comes."""
        return self not in {RequestState.QUEUED, RequestState.RUNNING}


class Rebinding(NamedTuple):
    """When neighbours of a step were replaced, and at the far end of which edges."""

    at_s: float
    edges: tuple[str, ...]


class StepNotes:
    """An attempt at a stage's share of a request."""

    __slots__ = (
        "_began_s",
        "_clock",
        "_steps",
        "accepted_s",
        "attempt",
        "ended_s",
        "error",
        "finished",
        "first_output_s",
        "heard_s",
        "outputs",
        "planned_s",
        "queue_position",
        "rebindings",
        "replica",
        "resumed_steps",
        "sent_s",
        "stage",
        "total_steps",
    )

    def __init__(self, *, stage: str, replica: str, attempt: int, began_s: float, clock: Callable[[], float]) -> None:
        self.stage, self.replica, self.attempt = stage, replica, attempt
        self._began_s, self._clock = began_s, clock
        self.planned_s = self._elapsed_s()
        self.sent_s: float | None = None
        self.accepted_s: float | None = None
        self.first_output_s: float | None = None
        self.heard_s: float | None = None
        self.ended_s: float | None = None
        self.queue_position = self.outputs = 0
        self._steps = 0
        self.total_steps: int | None = None
        """Engine steps in all, where the engine knows."""
        self.resumed_steps: int | None = None
        """Those of the checkpoint that it goes on from."""
        self.rebindings: tuple[Rebinding, ...] = ()
        self.finished: stage_pb2.StepFinished | None = None
        self.error: StagemeshError | None = None

    @property
    def steps(self) -> int:
        """Engine steps that are done."""
        return max(self._steps, self.finished.usage.steps if self.finished is not None else 0)

    def note_sent(self) -> None:
        """Its consumers are ready, and it is on its way to its replica."""
        self.sent_s = self._elapsed_s()

    def note_accepted(self, accepted: stage_pb2.StepAccepted) -> None:
        """The replica has it."""
        self.accepted_s = self.heard_s = self._elapsed_s()
        self.queue_position = accepted.queue_position

    def note_output(self) -> None:
        """A piece of output came."""
        self.heard_s = now_s = self._clock() - self._began_s
        if not self.outputs:
            self.first_output_s = now_s
        self.outputs += 1

    def note_progress(self, progress: stage_pb2.StepProgress) -> None:
        """The engine got on."""
        self.heard_s = self._clock() - self._began_s
        self._steps = progress.steps
        if progress.HasField("total_steps"):
            self.total_steps = progress.total_steps

    def note_rebound(self, edges: Sequence[str]) -> None:
        """It goes on with other neighbours."""
        self.rebindings += (Rebinding(self._elapsed_s(), tuple(edges)),)

    def note_finished(self, finished: stage_pb2.StepFinished) -> None:
        """The stage is done."""
        self.heard_s = self._elapsed_s()
        self.finished = finished

    def end(self, error: StagemeshError | None) -> None:
        """It has ended, in whatever way; only the first call counts."""
        if self.ended_s is None:
            self.ended_s, self.error = self._elapsed_s(), _remembered(error)

    def _elapsed_s(self) -> float:
        return self._clock() - self._began_s


class Timeline:
    """A request's life. `number` orders requests by when they were received."""

    def __init__(
        self,
        request_id: str = "",
        *,
        number: int = 0,
        priority: int = 0,
        outputs: Sequence[str] = (),
        timeout_s: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.request_id, self.number, self.priority = request_id, number, priority
        self.outputs, self.timeout_s = tuple(outputs), timeout_s
        self.received_at_s = time.time()
        """By the wall clock, for people."""
        self.steps: list[StepNotes] = []
        self.planned_s: float | None = None
        self.ended_s: float | None = None
        self.error: StagemeshError | None = None
        self._clock = clock
        self._began_s = clock()

    @property
    def state(self) -> RequestState:
        """How far it is."""
        if self.ended_s is None:
            return RequestState.QUEUED if self.planned_s is None else RequestState.RUNNING
        if self.error is None:
            return RequestState.FINISHED
        return RequestState.CANCELLED if isinstance(self.error, CancelledRequestError) else RequestState.FAILED

    @property
    def age_s(self) -> float:
        """Until now, or until its end."""
        return self.elapsed_s() if self.ended_s is None else self.ended_s

    @property
    def at_work(self) -> list[StepNotes]:
        """The attempts that have not ended, the one that was heard of longest ago first."""
        return sorted((step for step in self.steps if step.ended_s is None), key=lambda step: step.heard_s or 0.0)

    def elapsed_s(self) -> float:
        """Seconds since it was received."""
        return self._clock() - self._began_s

    def note_planned(self) -> None:
        """Its first plan is made."""
        if self.planned_s is None:
            self.planned_s = self.elapsed_s()

    def begin(self, stage: str, *, replica: str, attempt: int) -> StepNotes:
        """Opens the notes of an attempt at a stage's share."""
        notes = StepNotes(stage=stage, replica=replica, attempt=attempt, began_s=self._began_s, clock=self._clock)
        self.steps.append(notes)
        return notes

    def end(self, error: StagemeshError | None) -> None:
        """The request has ended, and with it whatever was at work for it."""
        self.ended_s, self.error = self.elapsed_s(), _remembered(error)
        for step in self.steps:
            step.end(error)


def _remembered(error: StagemeshError | None) -> StagemeshError | None:
    """A copy: one that was raised holds on to the frames that it came through, and so to all that the request made."""
    return None if error is None else copy(error)
