"""Sessions whose turns run as requests that the test steers, without stages and without gRPC."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

from stagemesh.common.errors import StagemeshError
from stagemesh.common.wire.tensors import Array, inline_tensor
from stagemesh.connectors.packets import Packet
from stagemesh.orchestrator.request.lifecycle import RequestLifecycle, RequestRegistry
from stagemesh.orchestrator.request.output_record import RequestRecord
from stagemesh.orchestrator.request.timeline import Timeline
from stagemesh.orchestrator.request.validation import ValidRequest, validate
from stagemesh.orchestrator.session.answer_relay import SessionCall
from stagemesh.orchestrator.session.session import Session
from stagemesh.orchestrator.session.settings import read_settings
from stagemesh.orchestrator.session.turn_requests import TurnRequest, TurnRequests
from stagemesh.pipeline import Pipeline
from stagemesh.v1 import orchestrator_pb2, request_pb2
from tests.orchestrator.mesh import load
from tests.orchestrator.session.talk import ReceivedEvents, Request, Response


class SteeredRequest:
    """The request of a turn. The test emits its outputs and ends it."""

    def __init__(self, turn: TurnRequest) -> None:
        self.turn = turn
        self.message = turn.message
        self.record = RequestRecord(Timeline(turn.message.request_id, outputs=tuple(turn.message.outputs)))
        self.record.timeline.note_planned()
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.record.stop_by(self.stop)

    def emit(self, text: str, *, name: str = "text") -> None:
        """Emits a part of a text output."""
        position = self.record.position.counts.get((name, 0), 0)
        self.record.add_output(request_pb2.Output(name=name, text=text, position=position))

    def emit_rows(self, rows: Array, *, name: str) -> None:
        """Emits rows of a tensor."""
        position = self.record.position.counts.get((name, 0), 0)
        tensor = inline_tensor("", rows)
        self.record.add_output(request_pb2.Output(name=name, tensor=tensor, position=position))

    def end(self, error: StagemeshError | None = None) -> None:
        """Ends the request. Does nothing if it has ended."""
        if self.ended.done():
            return
        if self.turn.stream is not None:
            self.turn.stream.close()
        self.record.timeline.end(error)
        self.ended.set_result(None)
        self.record.close(error)

    def stop(self, error: StagemeshError) -> None:
        self.end(error)

    @property
    def packets(self) -> list[Packet]:
        """The packets that were streamed into the request."""
        assert self.turn.stream is not None, "the input is not streamed"
        return list(self.turn.stream._packets)


class FakeRunner(TurnRequests):
    """A runner of turns. `error` is raised by the next start, if it is set."""

    def __init__(self, pipeline: Pipeline) -> None:
        super().__init__(pipeline, RequestRegistry(), self._never_start)
        self.requests: dict[str, SteeredRequest] = {}
        self.error: StagemeshError | None = None

    def start(self, turn: TurnRequest) -> SteeredRequest:
        validate(turn.message, self._pipeline, stream=turn.stream)
        return self._run(turn)

    def listen(self, turn: TurnRequest, detection: orchestrator_pb2.TurnDetection) -> SteeredRequest:
        return self._run(turn)

    def find(self, request_id: str) -> SteeredRequest | None:
        return self.requests.get(request_id)

    def _never_start(self, request: ValidRequest, *, content: bytes, time_left_s: float | None) -> RequestLifecycle:
        raise AssertionError("turns run as steered requests")

    def _run(self, turn: TurnRequest) -> SteeredRequest:
        if self.error is not None:
            error, self.error = self.error, None
            raise error
        request = self.requests[turn.message.request_id] = SteeredRequest(turn)
        return request


class Chat(ReceivedEvents):
    """A session and its client, in one process."""

    def __init__(self, session: Session, runner: FakeRunner) -> None:
        self.session, self.runner = session, runner
        self.seq = 0
        self.received = []
        self.error: StagemeshError | None = None
        self.has_ended = False
        self._reading: asyncio.Task[None] | None = None
        self.call: SessionCall | None = None
        self.reads = asyncio.Event()
        """Whether the client reads. If it does not, events wait to be sent."""
        self.reads.set()

    def attach(self, *, is_known: bool = False, **fields: Any) -> None:
        """Attaches a call."""
        opening = orchestrator_pb2.SessionOpen(session_id=self.session.settings.session_id, **fields)
        self.call = self.session.attach(opening, is_known=is_known)
        self.has_ended, self.error = False, None
        self._reading = asyncio.ensure_future(self._read(self.call))

    async def leave(self) -> None:
        """Ends the call, as if the connection broke."""
        assert self.call is not None, "attach first"
        assert self._reading is not None, "attach first"
        self.stop_reading()
        await asyncio.wait([self._reading])
        self.session.detach(self.call)
        await settle()

    async def reattach(self, **fields: Any) -> None:
        """Attaches another call, forgets what has arrived, and waits until the session is idle."""
        if self.session.is_attached:
            await self.leave()
        self.received.clear()
        self.attach(is_known=True, **fields)
        await settle()

    def stop_reading(self) -> None:
        """Stops reading the events of the call."""
        if self._reading is not None:
            self._reading.cancel()

    def send(self, *, seq: int | None = None, **event: Any) -> int:
        """Sends an event with the next number. Returns the number."""
        assert self.call is not None, "attach first"
        self.seq = self.seq + 1 if seq is None else seq
        self.session.handle(self.call, Request(seq=self.seq, **event))
        return self.seq

    def say(self, text: str) -> int:
        """Appends a text."""
        return self.send(append={"part": {"text": text}})

    def commit(self, text: str = "") -> int:
        """Appends a text, if one is given, and commits the open turn."""
        if text:
            self.say(text)
        return self.send(commit={})

    async def answer(self, turn: int, *texts: str, error: StagemeshError | None = None) -> None:
        """Emits texts as the answer of a turn, ends its request, and waits until the session is idle."""
        for text in texts:
            self.request(turn).emit(text)
        self.request(turn).end(error)
        await settle()

    async def turn(self, number: int, text: str, answer: str) -> None:
        """Commits a text, and answers its turn."""
        self.commit(text)
        await self.answer(number, answer)

    def hear(self, samples: Array, *, rate_hz: int = 16_000) -> int:
        """Appends audio."""
        audio = request_pb2.Audio(samples=inline_tensor("", samples), sample_rate_hz=rate_hz)
        return self.send(append={"part": {"audio": audio}})

    def request(self, turn: int, name: str = "") -> SteeredRequest:
        """Returns the request of a turn."""
        return self.runner.requests[f"{self.session.settings.session_id}.{turn}{name}"]

    def last(self, kind: str) -> Response:
        """Returns the last event of a kind."""
        return next(event for event in reversed(self.received) if event.WhichOneof("event") == kind)

    async def rejection(self) -> str:
        """Waits until the session is idle, and returns the reason of the last rejection."""
        await settle()
        return self.last("rejected").rejected.error.reason

    def prompt(self, turn: int) -> list[str]:
        """Returns the texts of the messages in the prompt of a turn."""
        return [message.content for message in self.request(turn).message.input.conversation.messages]

    async def _read(self, call: SessionCall) -> None:
        try:
            async for event in call.events():
                self.received.append(Response.FromString(event))
                await self.reads.wait()
        except StagemeshError as exc:
            self.error = exc
        self.has_ended = True


async def settle() -> None:
    """Lets all tasks run until they wait."""
    for _ in range(300):
        await asyncio.sleep(0)


@asynccontextmanager
async def chatting(
    folder: Path, text: str, *, clock: Callable[[], float] = lambda: 0.0, linger_s: int = 60, **fields: Any
) -> AsyncGenerator[Chat]:
    """Opens a session for a pipeline file, and attaches its first call."""
    pipeline = load(folder, text)
    opening = orchestrator_pb2.SessionOpen(**{"session_id": "s", **fields})
    tasks = set[asyncio.Task[None]]()

    def spawn(work: Coroutine[object, object, None]) -> "asyncio.Task[None]":
        task = asyncio.ensure_future(work)
        tasks.add(task)
        return task

    runner = FakeRunner(pipeline)
    session = Session(read_settings(opening, pipeline), runner, pipeline, spawn=spawn, clock=clock)
    chat = Chat(session, runner)
    chat.attach(linger_s=linger_s)
    try:
        yield chat
    finally:
        session.stop()
        chat.stop_reading()
        for task in tasks:
            task.cancel()
        for task in tasks:
            with suppress(asyncio.CancelledError):
                await task
