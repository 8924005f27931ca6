"""Records what happened to a request and when: a few numbers for each attempt of each stage.

Times are seconds since the request was received. The notes are updated for every output, so each update must cost well
under a microsecond. Values that can be computed later are not stored.
"""

import time
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from stagemesh.common.errors import CancelledRequestError, StagemeshError
from stagemesh.v1 import stage_pb2


class RequestState(Enum):
    """The state of a request. The value is the name of the wire's enum value without its prefix."""

    QUEUED = "QUEUED"
    RUNNING = "RUNNING"
    FINISHED = "FINISHED"
    FAILED = "FAILED"
    CANCELLED = "CANCELLED"

    @property
    def is_over(self) -> bool:
        """Whether the request has ended."""
        return self not in {RequestState.QUEUED, RequestState.RUNNING}


class Rebinding(NamedTuple):
    """The time at which a step got other upstream or downstream replicas, and the edges that lead to them."""

    at_s: float
    edges: tuple[str, ...]


@dataclass(eq=False, kw_only=True, slots=True)
class StepNotes:
    """The timeline of one attempt of a stage."""

    stage: str
    replica: str
    attempt: int
    began_s: float
    """When the request was received, by `clock`."""
    clock: Callable[[], float]
    planned_s: float = 0.0
    sent_s: float | None = None
    accepted_s: float | None = None
    first_output_s: float | None = None
    heard_s: float | None = None
    """When the last event of the step arrived."""
    ended_s: float | None = None
    queue_position: int = 0
    outputs: int = 0
    reported_steps: int = 0
    total_steps: int | None = None
    """The number of engine steps in all, if the engine knows it."""
    resumed_steps: int | None = None
    """The number of engine steps of the checkpoint from which the attempt resumed."""
    rebindings: tuple[Rebinding, ...] = ()
    finished: stage_pb2.StepFinished | None = None
    error: StagemeshError | None = None

    def __post_init__(self) -> None:
        self.planned_s = self._elapsed_s()

    @property
    def steps(self) -> int:
        """The number of engine steps that are done."""
        return max(self.reported_steps, self.finished.usage.steps if self.finished is not None else 0)

    def note_sent(self) -> None:
        """Records that the step is sent to its replica."""
        self.sent_s = self._elapsed_s()

    def note_accepted(self, accepted: stage_pb2.StepAccepted) -> None:
        """Records that the replica accepted the step."""
        self.accepted_s = self.heard_s = self._elapsed_s()
        self.queue_position = accepted.queue_position

    def note_output(self) -> None:
        """Records that a piece of an output arrived."""
        self.heard_s = now_s = self.clock() - self.began_s
        if not self.outputs:
            self.first_output_s = now_s
        self.outputs += 1

    def note_progress(self, progress: stage_pb2.StepProgress) -> None:
        """Records the number of engine steps that are done."""
        self.heard_s = self.clock() - self.began_s
        self.reported_steps = progress.steps
        if progress.HasField("total_steps"):
            self.total_steps = progress.total_steps

    def note_rebound(self, edges: Sequence[str]) -> None:
        """Records that the step got other replicas at the far end of these edges."""
        self.rebindings += (Rebinding(self._elapsed_s(), tuple(edges)),)

    def note_finished(self, finished: stage_pb2.StepFinished) -> None:
        """Records that the step finished."""
        self.heard_s = self._elapsed_s()
        self.finished = finished

    def end(self, error: StagemeshError | None) -> None:
        """Records that the attempt ended. Only the first call counts."""
        if self.ended_s is None:
            self.ended_s, self.error = self._elapsed_s(), _without_frames(error)

    def _elapsed_s(self) -> float:
        return self.clock() - self.began_s


class Timeline:
    """The timeline of one request. `number` orders requests by the time at which they were received."""

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
        """Wall-clock time, for display only."""
        self.steps: list[StepNotes] = []
        self.planned_s: float | None = None
        self.ended_s: float | None = None
        self.error: StagemeshError | None = None
        self._clock = clock
        self._began_s = clock()

    @property
    def state(self) -> RequestState:
        """The request's state now."""
        if self.ended_s is None:
            return RequestState.QUEUED if self.planned_s is None else RequestState.RUNNING
        if self.error is None:
            return RequestState.FINISHED
        return RequestState.CANCELLED if isinstance(self.error, CancelledRequestError) else RequestState.FAILED

    @property
    def age_s(self) -> float:
        """Seconds from the receipt of the request to now, or to its end."""
        return self.elapsed_s() if self.ended_s is None else self.ended_s

    @property
    def at_work(self) -> list[StepNotes]:
        """The attempts that have not ended. The one whose last event is the oldest comes first."""
        return sorted((step for step in self.steps if step.ended_s is None), key=lambda step: step.heard_s or 0.0)

    def elapsed_s(self) -> float:
        """Returns the seconds since the request was received."""
        return self._clock() - self._began_s

    def note_planned(self) -> None:
        """Records that the request has its first plan."""
        if self.planned_s is None:
            self.planned_s = self.elapsed_s()

    def begin(self, stage: str, *, replica: str, attempt: int) -> StepNotes:
        """Adds and returns the notes of an attempt of a stage."""
        notes = StepNotes(stage=stage, replica=replica, attempt=attempt, began_s=self._began_s, clock=self._clock)
        self.steps.append(notes)
        return notes

    def end(self, error: StagemeshError | None) -> None:
        """Records that the request ended, and with it every attempt that has not ended."""
        self.ended_s, self.error = self.elapsed_s(), _without_frames(error)
        for step in self.steps:
            step.end(error)


def _without_frames(error: StagemeshError | None) -> StagemeshError | None:
    """Copies an error: a raised one refers to the frames that it passed, and so to everything that the request made."""
    return None if error is None else copy(error)
