"""What a request has made so far, kept for every caller that attaches to it."""

import sys
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from contextlib import aclosing

from stagemesh.common.errors import OverloadedError, StagemeshError
from stagemesh.common.journal import Journal
from stagemesh.orchestrator.request.resume import Resumption
from stagemesh.orchestrator.request.timeline import Timeline
from stagemesh.v1 import orchestrator_pb2, request_pb2, stage_pb2


class RequestRecord:
    """The merged events of a request: where it stands while it waits, then admitted, outputs numbered by name, and
    finished last.
    """

    def __init__(self, timeline: Timeline | None = None) -> None:
        self.timeline = timeline or Timeline()
        self.journal: Journal[bytes] = Journal()
        """Serialized: as a message, a token's text takes over ten times as much."""
        self.size_bytes = 0
        self._taken_bytes = 0
        """What the fastest caller has taken of it."""
        self._unread_limit_bytes = sys.maxsize
        self._stop: Callable[[StagemeshError], None] = lambda _: None
        self._began_s = time.monotonic()
        self._started_s: float | None = None
        self._first_output_s: float | None = None
        self._next_seqs = Counter[str]()
        self._finished: dict[str, stage_pb2.StepFinished] = {}

    def limit_unread(self, limit_bytes: int, stop: Callable[[StagemeshError], None]) -> None:
        """Calls `stop` once callers follow, and all of them are more than `limit_bytes` behind."""
        self._unread_limit_bytes, self._stop = limit_bytes, stop

    def add_admitted(self, *, request_id: str, seed: int, replicas: Mapping[str, str]) -> None:
        """The request is planned and runs."""
        admitted = orchestrator_pb2.RequestAdmitted(request_id=request_id, seed=seed, replicas=replicas)
        self._append(orchestrator_pb2.GenerateResponse(admitted=admitted))

    def add_queued(self, *, request_id: str, position: int, expected_wait_s: float) -> None:
        """The request waits to be admitted."""
        queued = orchestrator_pb2.RequestQueued(
            request_id=request_id, position=position, expected_wait_s=expected_wait_s
        )
        self._append(orchestrator_pb2.GenerateResponse(queued=queued))

    def add_progress(self, stage: str, progress: stage_pb2.StepProgress) -> None:
        """A stage got on."""
        event = orchestrator_pb2.RequestProgress(stage=stage, progress=progress)
        self._append(orchestrator_pb2.GenerateResponse(progress=event))

    def add_output(self, name: str, output: request_pb2.Output) -> None:
        """A piece of the pipeline's output `name`; one that nobody asked for ("") is dropped."""
        if not name:
            return
        if self._first_output_s is None:
            self._first_output_s = self._elapsed_s()
        event = orchestrator_pb2.GenerateResponse(output=output)
        piece, seq = event.output, self._next_seqs[name]
        piece.name, piece.seq = name, seq
        self._next_seqs[name] = seq + 1
        self._append(event)

    def note_started(self) -> None:
        """A stage has taken the request."""
        if self._started_s is None:
            self._started_s = self._elapsed_s()

    def note_finished(self, stage: str, finished: stage_pb2.StepFinished) -> None:
        """A stage is done."""
        self._finished[stage] = finished

    @property
    def edges(self) -> Iterator[request_pb2.EdgeUsage]:
        """What crossed the edges of the stages that are done."""
        return (edge for finished in self._finished.values() for edge in finished.edges)

    @property
    def has_outputs(self) -> bool:
        """Whether a piece of an output has come."""
        return self._first_output_s is not None

    def has_finished(self, stage: str) -> bool:
        """Whether the stage is done."""
        return stage in self._finished

    def finish(self) -> None:
        """The request succeeded: says so and ends all readers."""
        timings = request_pb2.Timings(
            started_s=self._started_s or 0.0, first_output_s=self._first_output_s, finished_s=self._elapsed_s()
        )
        finished = orchestrator_pb2.RequestFinished(stages=self._finished, timings=timings)
        self._append(orchestrator_pb2.GenerateResponse(finished=finished))
        self._close(None)

    def close(self, error: StagemeshError) -> None:
        """The request failed: ends all readers with the cause. Closing twice is harmless."""
        self._close(error)

    async def follow(
        self, *, next_seqs: Mapping[str, int], next_positions: Mapping[str, int] | None = None
    ) -> AsyncGenerator[bytes]:
        """The events from the first one, without what the caller has of the outputs, each a serialized
        GenerateResponse; iterate within `aclosing`.
        """
        resumption = Resumption(next_seqs=next_seqs, next_positions=next_positions or {})
        # Who comes late is given the time to catch up.
        taken_bytes, self._taken_bytes = 0, self.size_bytes
        async with aclosing(self.journal.follow()) as events:
            async for item in events:
                # The one before is taken.
                self._taken_bytes = max(self._taken_bytes, taken_bytes)
                taken_bytes += len(item)
                rest = _rest(item, resumption) if resumption.leaves_out else item
                if rest is not None:
                    yield rest

    def _append(self, event: orchestrator_pb2.GenerateResponse) -> None:
        # A stage that is told to stop may still have sent something.
        if not self.journal.closed:
            item = event.SerializeToString()
            self.size_bytes += len(item)
            self.journal.append(item)
            if self.size_bytes - self._taken_bytes > self._unread_limit_bytes:
                self._check_read()

    def _close(self, error: StagemeshError | None) -> None:
        # Who stops the request holds its record, mostly: a circle would outlive both.
        self._stop = lambda _: None
        self.journal.close(error)

    def _check_read(self) -> None:
        if self.journal.readers:
            limit = f"more than {self._unread_limit_bytes:,} bytes (limits.max_unread_bytes)"
            what = f"the client is {limit} behind what the request makes; have it read faster, or ask for less"
            self._stop(OverloadedError(what, reason="CLIENT_TOO_SLOW"))

    def _elapsed_s(self) -> float:
        return time.monotonic() - self._began_s


def _rest(item: bytes, resumption: Resumption) -> bytes | None:
    event = orchestrator_pb2.GenerateResponse.FromString(item)
    if not event.HasField("output"):
        return item
    rest = resumption.rest_of(event.output)
    if rest is event.output:
        return item
    return None if rest is None else orchestrator_pb2.GenerateResponse(output=rest).SerializeToString()
