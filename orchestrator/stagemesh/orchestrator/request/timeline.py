"""The timeline of a request: a few times and counts for each attempt of each stage, and what a step waits for."""

import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import copy, deepcopy
from dataclasses import KW_ONLY, dataclass, field
from enum import Enum
from typing import NamedTuple

from stagemesh.common.errors import CancelledRequestError, StagemeshError
from stagemesh.common.plugins.descriptors import INPUT
from stagemesh.common.requests.output_position import OutputKey
from stagemesh.common.wire.telemetry import MAX_SPANS, Playout, StepTrace
from stagemesh.orchestrator.fleet.replica import Replica
from stagemesh.orchestrator.spans import TraceContext
from stagemesh.v1 import control_pb2, request_pb2, stage_pb2

_MAX_SPANS_BYTES = 8 << 20
_MAX_DROPPED = 1 << 32


class RequestState(Enum):
    """The state of a request. Each value is the name of the protobuf enum value without the enum's prefix."""

    QUEUED = "QUEUED"
    RUNNING = "RUNNING"
    FINISHED = "FINISHED"
    FAILED = "FAILED"
    CANCELLED = "CANCELLED"

    @property
    def is_over(self) -> bool:
        """Whether the request has ended, successfully or not."""
        return self not in {RequestState.QUEUED, RequestState.RUNNING}


class Rebinding(NamedTuple):
    """A replacement of a step's upstream or downstream replicas: its time, and the names of the affected edges."""

    at_s: float
    edges: tuple[str, ...]


@dataclass(eq=False, kw_only=True, slots=True)
class StepNotes:
    """The timeline's entry for one attempt of a stage: the attempt's times and counts."""

    stage: str
    replica: str
    attempt: int
    index: int = 0
    """The index of the choice for which the stage works."""
    began_s: float
    """The time at which the request was received, in seconds on `clock`."""
    clock: Callable[[], float]
    planned_s: float = 0.0
    sent_s: float | None = None
    accepted_s: float | None = None
    first_output_s: float | None = None
    last_event_s: float | None = None
    """The time at which the step's last event arrived, or None if no event has arrived."""
    ended_s: float | None = None
    queue_position: int = 0
    outputs: int = 0
    reported_engine_steps: int = 0
    total_engine_steps: int | None = None
    """The total number of engine steps, or None if the engine does not report it."""
    resumed_engine_steps: int | None = None
    """The number of engine steps before the checkpoint from which the attempt resumed, or None if it did not resume."""
    rebindings: tuple[Rebinding, ...] = ()
    finished: stage_pb2.StepFinished | None = None
    usage: request_pb2.Usage | None = None
    """The work of an attempt that did not finish, as far as it is known."""
    error: StagemeshError | None = None
    spans: stage_pb2.StepSpans | None = None
    """The spans that the replica has reported. None if it has reported none."""
    input_spans: stage_pb2.StepSpans | None = None
    """The spans of streamed input, with times since the request's receipt. None if the orchestrator has sent none."""

    def __post_init__(self) -> None:
        self.planned_s = self._elapsed_s()

    @property
    def engine_steps(self) -> int:
        """The number of completed engine steps."""
        return max(self.reported_engine_steps, self.finished.usage.engine_steps if self.finished is not None else 0)

    def note_sent(self) -> None:
        self.sent_s = self._elapsed_s()

    def note_accepted(self, accepted: stage_pb2.StepAccepted) -> None:
        self.accepted_s = self.last_event_s = self._elapsed_s()
        self.queue_position = accepted.queue_position

    def note_output(self) -> None:
        """Counts an output fragment, and records the time of its arrival."""
        self.last_event_s = now_s = self.clock() - self.began_s
        if not self.outputs:
            self.first_output_s = now_s
        self.outputs += 1

    def note_progress(self, progress: stage_pb2.StepProgress) -> None:
        """Stores the number of completed engine steps, and the total number if the engine reports it."""
        self.last_event_s = self.clock() - self.began_s
        self.reported_engine_steps = progress.engine_steps
        if progress.HasField("total_engine_steps"):
            self.total_engine_steps = progress.total_engine_steps

    def note_rebound(self, edges: Sequence[str]) -> None:
        """Records that the replicas at the other end of these edges were replaced at the current time."""
        self.rebindings += (Rebinding(self._elapsed_s(), tuple(edges)),)

    def note_input(self, trace: StepTrace) -> None:
        """Adds the spans of streamed input over one edge."""
        if self.input_spans is None:
            self.input_spans = stage_pb2.StepSpans()
        self.input_spans.MergeFrom(trace.take())

    def note_spans(self, spans: stage_pb2.StepSpans) -> None:
        """Adds spans of the replica."""
        if self.spans is None:
            self.spans = stage_pb2.StepSpans()
        # A stage that sends too many, or too large ones, could fill the memory.
        room = MAX_SPANS - len(self.spans.spans)
        fits = self.spans.ByteSize() + spans.ByteSize() <= _MAX_SPANS_BYTES
        kept = spans.spans[: max(0, room)] if fits else []
        self.spans.spans.extend(kept)
        # An external stage may report any number.
        self.spans.dropped += min(spans.dropped, _MAX_DROPPED) + len(spans.spans) - len(kept)

    def note_finished(self, finished: stage_pb2.StepFinished) -> None:
        """Stores the step's final statistics."""
        self.last_event_s = self._elapsed_s()
        self.finished = finished

    def end(self, error: StagemeshError | None) -> None:
        """Records the time at which the attempt ended, and its error, or None if it succeeded.

        Ignores further calls.
        """
        if self.ended_s is None:
            self.ended_s, self.error = self._elapsed_s(), _without_frames(error)

    def _elapsed_s(self) -> float:
        return self.clock() - self.began_s


@dataclass(eq=False, slots=True)
class Timeline:
    """The state and the times of one request. Requests are numbered in the order of receipt (`number`)."""

    request_id: str = ""
    _: KW_ONLY
    caller: str = ""
    number: int = 0
    priority: int = 0
    outputs: tuple[str, ...] = ()
    choices: int = 1
    timeout_s: float = 0.0
    clock: Callable[[], float] = time.monotonic
    received_at_s: float = field(default_factory=time.time)
    """The wall-clock time of receipt in seconds since the Unix epoch. Used only for display."""
    steps: list[StepNotes] = field(default_factory=list[StepNotes])
    inputs: list[request_pb2.EdgeUsage] = field(default_factory=list[request_pb2.EdgeUsage])
    """The chunks and bytes of streamed input that the orchestrator has sent, for each attempt of an edge."""
    playouts: dict[OutputKey, Playout] = field(default_factory=dict[OutputKey, Playout])
    """The play-out of each output of each choice that is streamed as audio."""
    trace: TraceContext | None = None
    """The trace of the request, or None if it is not traced."""
    planned_s: float | None = None
    ended_s: float | None = None
    error: StagemeshError | None = None
    _began_s: float = field(init=False)

    def __post_init__(self) -> None:
        self._began_s = self.clock()

    @property
    def state(self) -> RequestState:
        if self.ended_s is None:
            return RequestState.QUEUED if self.planned_s is None else RequestState.RUNNING
        if self.error is None:
            return RequestState.FINISHED
        return RequestState.CANCELLED if isinstance(self.error, CancelledRequestError) else RequestState.FAILED

    @property
    def age_s(self) -> float:
        """The seconds from the receipt of the request to its end, or to the current time if it has not ended."""
        return self.elapsed_s() if self.ended_s is None else self.ended_s

    @property
    def at_work(self) -> list[StepNotes]:
        """The attempts that have not ended. The attempt whose last event is the oldest comes first."""
        return sorted((step for step in self.steps if step.ended_s is None), key=lambda step: step.last_event_s or 0.0)

    @property
    def started_s(self) -> float | None:
        """The time at which the first stage accepted the request, in seconds, or None if no stage has accepted it."""
        return min((step.accepted_s for step in self.steps if step.accepted_s is not None), default=None)

    def elapsed_s(self) -> float:
        """Returns the seconds since the request was received."""
        return self.clock() - self._began_s

    def finished_steps(self, index: int = 0) -> Mapping[str, stage_pb2.StepFinished]:
        """Returns the final statistics of each stage's newest attempt for a choice, by stage name.

        `index` is the index of the choice. The statistics of an attempt that has not finished contain only its work, as
        far as it is known.
        """
        steps = (step for step in self.steps if step.index == index)
        return {step.stage: step.finished or stage_pb2.StepFinished(usage=step.usage) for step in steps}

    def note_audio(self, key: OutputKey, *, samples: int, sample_rate_hz: int) -> None:
        """Adds a part of an output that is streamed as audio."""
        # An external stage may report any rate.
        if sample_rate_hz:
            now_s = self.elapsed_s()
            playout = self.playouts.setdefault(key, Playout(now_s))
            playout.add(now_s, duration_s=samples / sample_rate_hz)

    def note_planned(self) -> None:
        """Records the time at which the request was first planned. Ignores further calls."""
        if self.planned_s is None:
            self.planned_s = self.elapsed_s()

    def begin(self, stage: str, *, replica: str, attempt: int, index: int = 0) -> StepNotes:
        """Adds an entry for a new attempt of a stage to the timeline, and returns the entry.

        `index` is the index of the choice for which the stage works.
        """
        notes = StepNotes(
            stage=stage, replica=replica, attempt=attempt, index=index, began_s=self._began_s, clock=self.clock
        )
        self.steps.append(notes)
        return notes

    def end(self, error: StagemeshError | None) -> None:
        """Records the end of the request and of all its running attempts.

        `error` is None if the request succeeded.
        """
        self.ended_s, self.error = self.elapsed_s(), _without_frames(error)
        for step in self.steps:
            step.end(error)


@dataclass
class StageTotals:
    """Totals of one stage over all requests: output fragments, engine steps, finished attempts and failed attempts."""

    outputs: int = 0
    engine_steps: int = 0
    finished: int = 0
    failed: int = 0

    def add(self, notes: StepNotes) -> None:
        """Adds the counts of one attempt of the stage."""
        self.outputs += notes.outputs
        self.engine_steps += notes.engine_steps
        self.finished += notes.finished is not None
        self.failed += notes.ended_s is not None and notes.finished is None


@dataclass
class EdgeTotals:
    """Totals of one edge over all requests: transferred chunks and bytes.

    The chunks and bytes of a request are counted if the edge's producer has finished.
    """

    chunks: int = 0
    size_bytes: int = 0

    def add(self, usage: request_pb2.EdgeUsage) -> None:
        self.chunks += usage.chunks
        self.size_bytes += usage.size_bytes


class Totals:
    """Totals over requests: the number of requests in each state, and the totals of each stage and each edge."""

    def __init__(self) -> None:
        self.requests = Counter[RequestState]()
        self.stages: dict[str, StageTotals] = {}
        self.edges: dict[str, EdgeTotals] = {}

    def add(self, timeline: Timeline) -> None:
        """Counts a request in its current state, and adds the counts of its attempts so far."""
        self.requests[timeline.state] += 1
        for notes in timeline.steps:
            self.stages.setdefault(notes.stage, StageTotals()).add(notes)
            for usage in notes.finished.edges if notes.finished is not None else ():
                self.edges.setdefault(usage.edge, EdgeTotals()).add(usage)
        for sent in timeline.inputs:
            self.edges.setdefault(sent.edge, EdgeTotals()).add(sent)

    def together_with(self, running: Iterable[Timeline]) -> "Totals":
        """Returns new totals that also include the requests in `running`. Leaves these totals unchanged."""
        both = deepcopy(self)
        for timeline in running:
            both.add(timeline)
        return both


class History:
    """The timelines of the `keep` requests that ended last, of which the last `keep_spans` have the replicas' spans.

    A timeline without them needs a few kilobytes. The spans of a step may need hundreds.
    """

    def __init__(self, *, keep: int = 512, keep_spans: int = 64) -> None:
        self._keep = keep
        self._timelines: dict[str, Timeline] = {}
        self._traced = deque[Timeline](maxlen=keep_spans)

    def __iter__(self) -> Iterator[Timeline]:
        return iter(self._timelines.values())

    def find(self, request_id: str) -> Timeline | None:
        """Returns the timeline of the ended request with this id, or None if there is none.

        If several ended requests had this id, returns the timeline of the last of them.
        """
        return self._timelines.get(request_id)

    def add(self, timeline: Timeline) -> None:
        """Adds the timeline of an ended request. Drops the oldest timeline if there are more than `keep` timelines."""
        self._timelines.pop(timeline.request_id, None)
        self._timelines[timeline.request_id] = timeline
        if len(self._timelines) > self._keep:
            del self._timelines[next(iter(self._timelines))]
        if timeline.trace is not None:
            if len(self._traced) == self._traced.maxlen:
                for step in self._traced[0].steps:
                    step.spans = step.input_spans = None
            self._traced.append(timeline)


def _without_frames(error: StagemeshError | None) -> StagemeshError | None:
    """Returns a copy of an error without its traceback, or None if `error` is None.

    The traceback would keep all objects of the request in memory.
    """
    return None if error is None else copy(error)


async def ask_for_report(
    replica: Replica, request_id: str, *, attempt: int, timeout_s: float
) -> control_pb2.StepReport | None:
    """Returns a replica's report about one attempt at its step of a request.

    Returns None if the replica does not answer in time, does not serve StageControlService, or does not run the step.
    """
    request = control_pb2.ListStepsRequest(request_id=request_id)
    try:
        answer = await replica.client.control(request, control_pb2.ListStepsResponse, timeout_s=timeout_s)
    except StagemeshError:
        return None
    return next((step for step in answer.steps if step.attempt == attempt), None)


def describe_wait(notes: StepNotes, report: control_pb2.StepReport | None, *, unready: Sequence[str]) -> str:
    """Describes in plain English what a step waits for.

    - `notes` is the orchestrator's timeline entry for the step.
    - `report` is the replica's report about the step, or None if the replica did not answer.
    - `unready` contains the names of the downstream stages that have not accepted the request yet.

    Returns an empty string if the step is computing or has ended.
    """
    if notes.ended_s is not None:
        return ""
    if notes.sent_s is None:
        return f"{' and '.join(unready) or 'its consumers'} to accept the request"
    if notes.accepted_s is None:
        return f"{notes.replica} to accept the request"
    if report is None:
        return f"{notes.replica}, which does not report its progress"
    return _outlet_wait(report.outlets) or _inlet_wait(report.inlets) or ("" if report.started else "its engine")


def _outlet_wait(outlets: Sequence[control_pb2.FlowReport]) -> str:
    for flow in outlets:
        if not flow.connected and (flow.waiting_chunks or flow.wanted_bytes or flow.ended):
            return f"{flow.peer} to accept edge {flow.edge}"
        if flow.wanted_bytes:
            return (
                f"credit from {flow.peer} on edge {flow.edge}: it needs {flow.wanted_bytes:,} bytes, and "
                f"{flow.credit_bytes:,} remain"
            )
    ended = [flow for flow in outlets if flow.ended and flow.waiting_chunks]
    if ended and all(flow.ended for flow in outlets):
        return f"{ended[0].peer} to receive the last {ended[0].waiting_chunks} chunks of edge {ended[0].edge}"
    return ""


def _inlet_wait(inlets: Sequence[control_pb2.FlowReport]) -> str:
    for flow in inlets:
        if not flow.ended and not flow.waiting_chunks:
            if flow.peer.startswith(INPUT):
                return f"input of the client on edge {flow.edge}, of which {flow.chunks} chunks have arrived"
            return f"chunk {flow.chunks} of edge {flow.edge} from {flow.peer}"
    return ""
