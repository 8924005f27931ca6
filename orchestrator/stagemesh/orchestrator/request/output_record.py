"""The record of one request's events. Every caller can read all events from the first one. Tracks the callers."""

import asyncio
import sys
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from contextlib import aclosing
from itertools import product

from stagemesh.common.errors import CancelledRequestError, OverloadedError, StagemeshError, UnavailableError
from stagemesh.common.notification import Journal
from stagemesh.common.requests.output_position import OutputKey, Position, after, length_of
from stagemesh.orchestrator.request.timeline import Timeline
from stagemesh.v1 import orchestrator_pb2, request_pb2

MAX_LINGER_S = 60
_EMPTY = request_pb2.Finish(reason=request_pb2.FINISH_REASON_EMPTY)
NOT_RUNNING = "NOT_RUNNING"
"""The error reason of requests that an orchestrator ends because it stops."""
_RETRY_AFTER_S = 1.0
TAKEN_OVER_REASONS = ("STEP_EXISTS", "STALE_ATTEMPT")
"""The reasons for which a stage rejects or ends a step because another or a later attempt of the request exists."""
MAX_ATTEMPT = 1 << 31
"""The attempt from which on a request does not run again."""
CALLER_DISCONNECTED = "CALLER_DISCONNECTED"
"""The error reason of requests whose client has left."""


def not_running(message: str = "the orchestrator is starting or stopping; try again") -> UnavailableError:
    """Returns the error of requests that an orchestrator rejects or ends because it starts or stops."""
    return UnavailableError(message, reason=NOT_RUNNING, retry_after_s=_RETRY_AFTER_S)


def is_taken_over(error: StagemeshError | None) -> bool:
    """Returns whether a request ends with `error` because another orchestrator runs it in later attempts."""
    if error is None or error.reason not in TAKEN_OVER_REASONS:
        return False
    return error.facts.get("attempt", 0) < MAX_ATTEMPT


class RequestRecord:
    """The events of one request, merged over all stages and choices: queued, admitted, progress, output and finished.

    Contains each part of an output once, although a restarted stage repeats parts. The record stops the request if all
    callers have disconnected, or if even the fastest caller has too many unread bytes.
    """

    def __init__(self, timeline: Timeline | None = None) -> None:
        self.timeline = timeline or Timeline()
        self.journal: Journal[bytes] = Journal()
        """The serialized events. A parsed event with one token's text would need over ten times as much memory."""
        self.size_bytes = 0
        self.abandoned = False
        """Whether the request was stopped because its last caller disconnected and no caller reattached within the
        time limit.
        """
        self.first_outputs_s: dict[OutputKey, float] = {}
        """The time at which the first part of each output of each choice arrived, in seconds since the request was
        received.
        """
        self.position = Position()
        """The end of each output of each choice in the record."""
        self._stop: Callable[[StagemeshError], None] = _ignore
        self._max_unread_bytes = sys.maxsize
        self._read_bytes = 0
        """The number of bytes of the record that the fastest caller has read."""
        self._linger_s = 0
        self._timer: asyncio.TimerHandle | None = None
        self.journal.on_abandoned = self._wait_for_return

    def add(self, event: orchestrator_pb2.GenerateResponse) -> None:
        """Adds an event. Ignores the event if the record is closed."""
        # A stopped stage may still send events.
        if not self.journal.closed:
            item = event.SerializeToString()
            self.size_bytes += len(item)
            self.journal.append(item)
            self._check_read()

    def add_output(self, output: request_pb2.Output) -> None:
        """Adds what the record does not contain yet of a part of a pipeline output.

        The finish reason END of an output without content becomes EMPTY. Raises the errors of `Position.remainder`.
        """
        rest = self.position.remainder(output)
        if rest is None:
            return
        key = rest.name, rest.index
        if not rest.position and rest.WhichOneof("content"):
            self.first_outputs_s.setdefault(key, self.timeline.elapsed_s())
        if rest.HasField("audio"):
            self.timeline.note_audio(key, samples=length_of(rest), sample_rate_hz=rest.audio.sample_rate_hz)
        if rest.finish.reason == request_pb2.FINISH_REASON_END and not self.position.counts.get(key):
            rest.finish.CopyFrom(_EMPTY)
        self.add(orchestrator_pb2.GenerateResponse(output=rest))

    @property
    def edges(self) -> Iterator[request_pb2.EdgeUsage]:
        """The numbers of chunks and bytes that finished stages have sent, for each of their outgoing edges."""
        choices = map(self.timeline.finished_steps, range(self.timeline.choices))
        return (edge for stages in choices for finished in stages.values() for edge in finished.edges)

    def has_outputs(self, index: int) -> bool:
        """Returns whether any output fragment of a choice was added. `index` is the index of the choice."""
        return any(key[1] == index for key in self.position.counts)

    def close(self, error: StagemeshError | None) -> None:
        """Adds the last events, and closes the record. This ends all iterators that `follow` has returned. Idempotent.

        `error` is the error that these iterators raise, or None if the request succeeded. If another orchestrator has
        taken the request over, they raise UnavailableError (NOT_RUNNING). The callers then call again.
        """
        if is_taken_over(error):
            error = not_running("another orchestrator has taken the request over; call again")
        self._cancel_timer()
        # The function that stops the request usually refers to its record. A reference cycle would keep both alive.
        self._stop = _ignore
        # If this orchestrator stops, the request may continue at another one.
        is_left = error is not None and error.reason == NOT_RUNNING
        if not self.journal.closed and self.timeline.planned_s is not None and not is_left:
            self._finish_outputs(error)
            timings = request_pb2.Timings(
                started_s=self.timeline.started_s,
                first_output_s=min(self.first_outputs_s.values(), default=None),
                finished_s=self.timeline.age_s,
            )
            choices = [
                orchestrator_pb2.FinishedChoice(stages=self.timeline.finished_steps(index))
                for index in range(self.timeline.choices)
            ]
            finished = orchestrator_pb2.RequestFinished(choices=choices, timings=timings)
            self.add(orchestrator_pb2.GenerateResponse(finished=finished))
        self.journal.close(error)

    def _finish_outputs(self, error: StagemeshError | None) -> None:
        """Adds the last part of each output of which it is missing. `error` is None if the request succeeded."""
        reason = request_pb2.FINISH_REASON_FAILED if error is not None else request_pb2.FINISH_REASON_END
        if isinstance(error, CancelledRequestError):
            reason = request_pb2.FINISH_REASON_CANCELLED
        finish = request_pb2.Finish(reason=reason)
        for name, index in product(self.timeline.outputs, range(self.timeline.choices)):
            position = self.position.counts.get((name, index), 0)
            self.add_output(request_pb2.Output(name=name, index=index, position=position, finish=finish))

    def stop_by(self, stop: Callable[[StagemeshError], None], *, max_unread_bytes: int = sys.maxsize) -> None:
        """Sets the function that stops the request.

        The function is called if all callers have disconnected, or if even the fastest caller has more than
        `max_unread_bytes` unread bytes.
        """
        self._stop, self._max_unread_bytes = stop, max_unread_bytes

    def expect(self, *, linger_s: int) -> None:
        """Announces a caller that is about to read the events, so that the request is not stopped for lack of callers.

        After the last caller has disconnected, the request continues for `linger_s` seconds, but at most MAX_LINGER_S
        seconds.
        """
        self._linger_s = min(linger_s, MAX_LINGER_S)
        self._cancel_timer()

    def dismiss(self) -> None:
        """Stops the request as soon as no caller reads its events, without waiting for a caller to return."""
        self.expect(linger_s=0)
        if not self.journal.readers:
            self._abandon()

    async def follow(self, *, next_positions: Mapping[OutputKey, int]) -> AsyncGenerator[bytes]:
        """Yields all past and future events of the request, each as a serialized GenerateResponse.

        Omits what the caller already has: an output in `next_positions` starts at that position, for example the index
        of a token or audio sample. Other outputs start at the beginning.

        Raises the error with which the request failed, and the errors of `Resumption`. Iterate within `aclosing`.
        """
        resumption = Resumption(next_positions)
        # A caller that attaches late must have time to read the earlier events.
        read_bytes = 0
        self._read_bytes = self.size_bytes
        async with aclosing(self.journal.follow()) as events:
            async for item in events:
                # The caller asks for this event because it has read the previous event.
                self._read_bytes = max(self._read_bytes, read_bytes)
                read_bytes += len(item)
                rest = resumption.rest_of(item)
                if rest is not None:
                    yield rest

    def events_after(self, next_positions: Mapping[OutputKey, int]) -> list[bytes]:
        """Returns the events so far, as `follow` yields them. Raises the errors of `Resumption`."""
        rests = map(Resumption(next_positions).rest_of, self.journal.items)
        return [rest for rest in rests if rest is not None]

    def _check_read(self) -> None:
        if self.size_bytes - self._read_bytes > self._max_unread_bytes and self.journal.readers:
            limit = f"more than {self._max_unread_bytes:,} bytes (limits.max_unread_bytes)"
            message = f"the client is {limit} behind the request's outputs; read them faster, or request less"
            self._stop(OverloadedError(message, reason="CLIENT_TOO_SLOW"))

    def _wait_for_return(self) -> None:
        if not self._linger_s:
            self._abandon()
            return
        self._cancel_timer()
        self._timer = asyncio.get_running_loop().call_later(self._linger_s, self._abandon)

    def _abandon(self) -> None:
        if not self.journal.readers and not self.journal.closed:
            self.abandoned = True
            self._stop(CancelledRequestError("the client disconnected", reason=CALLER_DISCONNECTED))

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class Resumption:
    """A filter that removes what a caller already has from the events for this caller.

    The caller may have received outputs from another orchestrator, which divided them into other parts.
    `next_positions` contains the position at which each output continues. An output that it does not contain starts at
    the beginning.
    """

    def __init__(self, next_positions: Mapping[OutputKey, int]) -> None:
        self._behind = {key: position for key, position in next_positions.items() if position}
        """The outputs whose replay has not reached the caller's position yet, with this position."""

    def rest_of(self, item: bytes) -> bytes | None:
        """Returns the part of an event that the caller lacks, or None. `item` is a serialized GenerateResponse."""
        event = orchestrator_pb2.GenerateResponse.FromString(item) if self._behind else None
        if event is None or not event.HasField("output"):
            return item
        rest = self.remainder(event.output)
        if rest is event.output:
            return item
        return None if rest is None else orchestrator_pb2.GenerateResponse(output=rest).SerializeToString()

    def remainder(self, output: request_pb2.Output) -> request_pb2.Output | None:
        """Returns the part of `output` that the caller does not have yet, or None if the caller has all of `output`.

        Raises InvalidRequestError (INVALID_POSITION) if the caller's position is within a character.
        """
        key = output.name, output.index
        wanted = self._behind.get(key)
        if wanted is None:
            return output
        if output.position + length_of(output) >= wanted:
            del self._behind[key]
        return after(output, wanted - output.position)


def _ignore(error: StagemeshError) -> None:
    """Does nothing. Replaces the function that stops a request before the request starts and after the request ends."""
