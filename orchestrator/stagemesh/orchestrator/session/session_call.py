"""One call of a client that is attached to a session: the events that wait to be sent."""

from collections.abc import AsyncGenerator
from copy import copy

from stagemesh.common.errors import StagemeshError
from stagemesh.common.notification import Notifier
from stagemesh.orchestrator.session.answer import Answer
from stagemesh.orchestrator.session.responses import generated_response

_MAX_WAITING = 4
"""The maximum number of events of an answer that wait to be sent."""
_MAX_UNREAD = 256
"""The number of events that wait to be sent above which no further event of the client is read."""


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
