"""Sessions of all clients behind one interface: one test states what all of them do."""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, AbstractContextManager, asynccontextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

from stagemesh.client import (
    Admitted,
    AsyncClient,
    AsyncSession,
    AudioChunk,
    Client,
    Finished,
    Message,
    OutputFinished,
    RetryPolicy,
    Session,
    SessionEvent,
    SessionOpened,
    SpeechDetected,
    Text,
    TurnCommitted,
    TurnEnded,
    TurnInterrupted,
    TurnTruncated,
)
from stagemesh.client.content import Part
from stagemesh.conformance.replicas import until
from tests.client.scripted import ScriptedOrchestrator

QUICK = RetryPolicy(attempts=3, first_pause_s=0.01, max_pause_s=0.1, reattach_s=5)

T = TypeVar("T")


@dataclass(frozen=True)
class SeenEvent:
    """An event that a program has read: its kind, and its other fields by their names in Python."""

    kind: str
    turn: int
    fields: Mapping[str, Any]


class SessionDriver(ABC):
    """A session of a client."""

    def __init__(self) -> None:
        self.events: list[SeenEvent] = []
        """The events that the program has read."""

    @property
    def kinds(self) -> list[str]:
        """The kinds of the events that the program has read."""
        return [event.kind for event in self.events]

    def seen(self, kind: str, field: str) -> list[Any]:
        """Returns a field of the events of a kind."""
        return [event.fields[field] for event in self.events if event.kind == kind]

    @abstractmethod
    async def append(self, *content: Part | Message) -> None:
        """Appends pieces to the input of the open turn."""

    @abstractmethod
    async def clear(self) -> None:
        """Drops the input of the open turn."""

    @abstractmethod
    async def commit(self) -> int:
        """Ends the input of the open turn. Returns its number."""

    @abstractmethod
    async def interrupt(self) -> Mapping[str, int]:
        """Stops the answer. Returns the confirmed positions by output."""

    @abstractmethod
    async def truncate(self, *, audio_s: float | None = None, positions: Mapping[str, int] | None = None) -> str:
        """Shortens the answer. Returns the confirmed answer."""

    @abstractmethod
    async def read_answer(self) -> None:
        """Reads the events up to the end of the turn that was committed last."""

    @abstractmethod
    async def read(self, kind: str, count: int = 1) -> None:
        """Reads the events up to the given number of events of a kind, or until the session ends."""

    @abstractmethod
    async def detached(self) -> None:
        """Waits until the session has no call, if the client shows that it has none."""

    async def answer(self) -> str:
        """Reads the answer to the turn that was committed last. Returns its text."""
        before = len(self.events)
        await self.read_answer()
        return "".join(event.fields["delta"] for event in self.events[before:] if event.kind == "text")

    async def ask(self, *lines: str) -> int:
        """Says lines that are one turn. Returns the turn's number."""
        for line in lines:
            await self.append(line)
        return await self.commit()

    async def say(self, line: str) -> str:
        """Says a line, and returns the text of the answer."""
        await self.ask(line)
        return await self.answer()


Converse: TypeAlias = Callable[..., AbstractAsyncContextManager[SessionDriver]]
"""Opens a session at orchestrators, with the arguments of `AsyncClient.converse`. Closes it at the end of the block."""

_KINDS: Mapping[type, str] = {
    SessionOpened: "opened",
    SpeechDetected: "speech",
    TurnCommitted: "committed",
    TurnInterrupted: "interrupted",
    TurnTruncated: "truncated",
    TurnEnded: "ended",
    Admitted: "admitted",
    OutputFinished: "finish",
    Text: "text",
    AudioChunk: "audio",
    Finished: "finished",
}


class PythonSession(SessionDriver):
    """A session of a client in Python. Methods of a synchronous one run in a thread."""

    def __init__(self, session: AsyncSession | Session) -> None:
        super().__init__()
        self.session = session

    async def append(self, *content: Part | Message) -> None:
        await self._call(self.session.append, *content)

    async def clear(self) -> None:
        await self._call(self.session.clear)

    async def commit(self) -> int:
        turn: int = await self._call(self.session.commit)
        return turn

    async def interrupt(self) -> Mapping[str, int]:
        interrupted: TurnInterrupted = await self._call(self.session.interrupt)
        return interrupted.positions

    async def truncate(self, *, audio_s: float | None = None, positions: Mapping[str, int] | None = None) -> str:
        truncated: TurnTruncated = await self._call(self.session.truncate, audio_s=audio_s, positions=positions)
        return truncated.answer

    async def read_answer(self) -> None:
        await self._read(self.session.answer())

    async def read(self, kind: str, count: int = 1) -> None:
        last = self.kinds.count(kind) + count
        events = aiter(self.session) if isinstance(self.session, AsyncSession) else iter(self.session)
        await self._read(events, is_last=lambda: self.kinds.count(kind) == last)

    async def detached(self) -> None:
        await until(lambda: not self.session._state.log.is_attached, timeout_s=5)

    async def _read(
        self, events: AsyncIterator[SessionEvent] | Iterator[SessionEvent], is_last: Callable[[], bool] = lambda: False
    ) -> None:
        async for event in events if isinstance(events, AsyncIterator) else _in_threads(events):
            fields = vars(event)
            self.events.append(SeenEvent(_KINDS[type(event)], fields.get("turn", 0), fields))
            if is_last():
                return

    async def _call(self, method: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        if isinstance(self.session, AsyncSession):
            return await method(*arguments, **options)
        return await asyncio.to_thread(method, *arguments, **options)


async def _in_threads(events: Iterator[SessionEvent]) -> AsyncIterator[SessionEvent]:
    while (event := await asyncio.to_thread(next, events, None)) is not None:
        yield event


@asynccontextmanager
async def _entered_in_threads(manager: AbstractContextManager[T]) -> AsyncGenerator[T]:
    value = await asyncio.to_thread(manager.__enter__)
    try:
        yield value
    finally:
        await asyncio.to_thread(manager.__exit__, None, None, None)


@asynccontextmanager
async def asynchronous(*orchestrators: ScriptedOrchestrator, **arguments: Any) -> AsyncGenerator[PythonSession]:
    """Opens a session of `AsyncClient`."""
    endpoints = [each.endpoint for each in orchestrators]
    async with AsyncClient(*endpoints, retry_policy=QUICK) as client, client.converse(**arguments) as session:
        yield PythonSession(session)


@asynccontextmanager
async def synchronous(*orchestrators: ScriptedOrchestrator, **arguments: Any) -> AsyncGenerator[PythonSession]:
    """Opens a session of `Client`."""
    endpoints = [each.endpoint for each in orchestrators]
    async with (
        _entered_in_threads(Client(*endpoints, retry_policy=QUICK)) as client,
        _entered_in_threads(client.converse(**arguments)) as session,
    ):
        yield PythonSession(session)
