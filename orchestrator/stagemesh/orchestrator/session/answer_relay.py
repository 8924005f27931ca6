"""One call of a client that is attached to a session, and the relay of an answer to it."""

import logging
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from copy import copy
from dataclasses import dataclass, field
from typing import Any

from stagemesh.common.errors import InternalError, StagemeshError
from stagemesh.common.notification import Notifier
from stagemesh.common.requests.output_position import INVALID_POSITION, OutputKey
from stagemesh.common.wire.encoding import embedded, tag_of
from stagemesh.orchestrator.request.output_record import MAX_LINGER_S
from stagemesh.orchestrator.session.turn_requests import Answer, Spawn, Task
from stagemesh.v1 import orchestrator_pb2

_GENERATED = tag_of(orchestrator_pb2.ConverseResponse.DESCRIPTOR, "generated")
_MAX_WAITING = 4
"""The maximum number of events of an answer that wait to be sent."""
_MAX_UNREAD = 256
"""The number of events that wait to be sent above which no further event of the client is read."""
_log = logging.getLogger(__name__)


def response(turn: int = 0, **event: Any) -> bytes:
    """Returns a serialized event. `turn` is the turn to which it belongs, or 0 if it belongs to none."""
    return orchestrator_pb2.ConverseResponse(turn=turn, **event).SerializeToString()


def generated_response(turn: int, event: bytes) -> bytes:
    """Returns a serialized event that contains `event`, a serialized GenerateResponse of the request of a turn.

    Does not parse `event`, because an answer consists of many of them.
    """
    return response(turn) + embedded(_GENERATED, event)


class SessionCall:
    """The events for one call of a client, in order, and the end of the call."""

    __slots__ = ("_changed", "_error", "_events", "_waiting", "has_ended")

    def __init__(self) -> None:
        # A deque would need a kilobyte of memory in each idle session.
        self._events: list[bytes | tuple[Answer, bytes]] = []
        """Serialized events, and events of an answer's request, each with its answer."""
        self._waiting = 0
        """The number of events of an answer in `_events`."""
        self.has_ended = False
        """Whether the call ends when the waiting events have been sent."""
        self._error: StagemeshError | None = None
        self._changed = Notifier()

    def send(self, event: bytes) -> None:
        """Adds a serialized ConverseResponse. Has no effect when the client has been sent the end of the call."""
        self._events.append(event)
        self._changed.fire()

    async def send_generated(self, answer: Answer, event: bytes) -> None:
        """Adds an event of an answer's request. Waits while several others wait to be sent."""
        while self._waiting >= _MAX_WAITING:
            await self._changed.wait()
        self._events.append((answer, event))
        self._waiting += 1
        self._changed.fire()

    async def wait_for_space(self) -> None:
        """Waits while the client leaves too many events unread, for example rejections of its own events."""
        while len(self._events) > _MAX_UNREAD:
            await self._changed.wait()

    def drop(self, answer: Answer) -> None:
        """Drops the events of an answer that wait to be sent."""
        kept = [event for event in self._events if isinstance(event, bytes) or event[0] is not answer]
        self._waiting -= len(self._events) - len(kept)
        self._events = kept
        self._changed.fire()

    def end(self, error: StagemeshError | None = None) -> None:
        """Ends the call after the events that wait. `error` is the error with which it ends. Idempotent."""
        if not self.has_ended:
            self.has_ended, self._error = True, error
            self._changed.fire()

    async def events(self) -> AsyncGenerator[bytes]:
        """Yields the serialized events until the call ends. Raises the error with which it ends."""
        while True:
            while self._events:
                yield self._take()
            if self.has_ended:
                break
            await self._changed.wait()
        if self._error is not None:
            raise copy(self._error)

    def _take(self) -> bytes:
        event = self._events.pop(0)
        self._changed.fire()
        if isinstance(event, bytes):
            return event
        self._waiting -= 1
        answer, generated = event
        answer.note_sent(generated)
        return generated_response(answer.turn, generated)


@dataclass(frozen=True, slots=True)
class ClientPosition:
    """The position of a client when it attaches.

    `turn` is the oldest turn whose end it has not received, or 0 if it does not name one. `positions` are its positions
    in the outputs of this turn, which were made in `generation`.
    """

    turn: int = 0
    positions: Mapping[OutputKey, int] = field(default_factory=dict[OutputKey, int])
    generation: str = ""
    earlier_calls: int = 0


class AnswerRelay:
    """Relays one answer at a time while a call is attached.

    `over` is called with an answer and its error, or None, when the client has been sent everything, or when the
    request of an answer ends while no call is attached.
    """

    def __init__(self, *, over: Callable[[Answer, StagemeshError | None], None], spawn: Spawn) -> None:
        self.client = ClientPosition()
        """The position of the client when it attached."""
        self._over, self._spawn = over, spawn
        self._call: SessionCall | None = None
        self._linger_s = 0
        self._answer: Answer | None = None
        """The answer that is relayed when a call is attached."""
        self._task: Task | None = None

    def attach(self, call: SessionCall, client: ClientPosition, *, linger_s: int) -> None:
        """Attaches a call. An answer that is being given is relayed when `relay` is called."""
        self._call, self.client, self._linger_s = call, client, min(linger_s, MAX_LINGER_S)

    def detach(self) -> None:
        """Detaches the call. The request of the answer continues for a while."""
        self._stop_task()
        self._call, answer = None, self._answer
        if answer is not None and answer.request.ended.done():
            self._note_end(answer)

    def relay(self, answer: Answer) -> None:
        """Relays an answer from the client's position on, now or when a call is attached. Idempotent."""
        if self._answer is not answer:
            assert self._task is None, "the former answer is over"
            self._answer = answer
            answer.request.ended.add_done_callback(lambda _: self._note_end(answer))
        if self._call is not None and self._task is None:
            positions = self.client.positions if self.client.turn == answer.turn else dict[OutputKey, int]()
            self._task = self._spawn(self._run(answer, self._call, positions))

    def stop(self, answer: Answer) -> None:
        """Stops relaying an answer, and drops its events that were not sent yet."""
        self._stop_task()
        if self._call is not None:
            self._call.drop(answer)
        self._answer = None

    async def _run(self, answer: Answer, call: SessionCall, positions: Mapping[OutputKey, int]) -> None:
        error: StagemeshError | None = None
        try:
            async with aclosing(answer.follow(positions, linger_s=self._linger_s)) as events:
                async for event in events:
                    await call.send_generated(answer, event)
        except StagemeshError as exc:
            error = exc.with_traceback(None)
            if error.reason == INVALID_POSITION:
                # The answer continues without this call.
                self._task = None
                call.end(error)
                return
        except Exception:  # noqa: BLE001
            _log.exception("the answer to turn %d failed unexpectedly", answer.turn)
            error = InternalError("the orchestrator failed; its log has the details")
        self._answer = self._task = None
        self._over(answer, error)

    def _note_end(self, answer: Answer) -> None:
        if answer is self._answer and self._call is None:
            self._answer = None
            self._over(answer, answer.request.record.timeline.error)

    def _stop_task(self) -> None:
        if self._task is not None:
            self._task.cancel()
            self._task = None
