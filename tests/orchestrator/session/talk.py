"""A client of Converse that numbers its events and records what it receives."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import grpc

from stagemesh.common.errors import StagemeshError
from stagemesh.rpc.error_mapping import from_rpc_error
from stagemesh.v1 import orchestrator_pb2, orchestrator_pb2_grpc

Request = orchestrator_pb2.ConverseRequest
Response = orchestrator_pb2.ConverseResponse


class ReceivedEvents:
    """The events that a client has received."""

    received: list[Response]

    def text(self, turn: int, name: str = "text") -> str:
        """Returns the text of an output of a turn that has arrived."""
        outputs = (event.generated.output for event in self.received if event.turn == turn)
        return "".join(output.text for output in outputs if output.name == name)

    def kinds(self, turn: int) -> list[str]:
        """Returns the kinds of the events of a turn that have arrived, apart from the events of its request."""
        kinds = (event.WhichOneof("event") or "" for event in self.received if event.turn == turn)
        return [kind for kind in kinds if kind != "generated"]


class Talk(ReceivedEvents):
    """One call of Converse."""

    def __init__(self, stub: "orchestrator_pb2_grpc.OrchestratorServiceAsyncStub", *, seq: int = 0) -> None:
        self.call: Any = stub.Converse(timeout=60)
        self.seq = seq
        """The number of the last event."""
        self.received = []

    async def open(self, **fields: Any) -> orchestrator_pb2.SessionOpened:
        """Opens the session."""
        await self.call.write(Request(open=orchestrator_pb2.SessionOpen(**fields)))
        return (await self.next("opened")).opened

    async def send(self, *, seq: int | None = None, **event: Any) -> int:
        """Sends an event with the next number, and returns the number."""
        self.seq = self.seq + 1 if seq is None else seq
        await self.call.write(Request(seq=self.seq, **event))
        return self.seq

    async def say(self, text: str) -> int:
        """Appends a text."""
        return await self.send(append={"part": {"text": text}})

    async def commit(self, text: str = "") -> int:
        """Appends a text, if one is given, and commits the open turn."""
        if text:
            await self.say(text)
        return await self.send(commit={})

    async def interrupt(self, turn: int = 0) -> int:
        """Interrupts a turn."""
        return await self.send(interrupt={"turn": turn})

    async def close(self) -> int:
        """Closes the session."""
        return await self.send(close={})

    async def next(self, kind: str, where: Callable[[Response], bool] = lambda _: True) -> Response:
        """Returns the next event of this kind for which `where` is true."""
        async with asyncio.timeout(30):
            while True:
                event = await self.call.read()
                assert isinstance(event, Response), f"the call ended before {kind}: {self.received}"
                self.received.append(event)
                if event.WhichOneof("event") == kind and where(event):
                    return event

    async def output(self, text: str) -> None:
        """Waits for the part of an output with this text."""
        await self.next("generated", lambda event: event.generated.output.text == text)

    async def rejection(self) -> orchestrator_pb2.EventRejected:
        """Returns the next rejection."""
        return (await self.next("rejected")).rejected

    async def turn(self, text: str) -> str:
        """Says a text, and returns the answer of the turn."""
        await self.commit(text)
        return (await self.next("ended")).ended.answer

    async def rest(self) -> Sequence[Response]:
        """Returns the remaining events until the call ends."""
        async with asyncio.timeout(30):
            while isinstance(event := await self.call.read(), Response):
                self.received.append(event)
        return self.received

    async def failure(self) -> StagemeshError:
        """Returns the error with which the call ends."""
        try:
            await self.rest()
            code = await self.call.code()
        except grpc.aio.AioRpcError as exc:
            return from_rpc_error(exc, peer="the orchestrator")
        if code is grpc.StatusCode.OK:
            raise AssertionError("the call succeeded")
        error = grpc.aio.AioRpcError(
            code, await self.call.initial_metadata(), await self.call.trailing_metadata(), await self.call.details()
        )
        return from_rpc_error(error, peer="the orchestrator")


@asynccontextmanager
async def talking(
    stub: "orchestrator_pb2_grpc.OrchestratorServiceAsyncStub", *, seq: int = 0, **fields: Any
) -> AsyncGenerator[Talk]:
    """Opens a session, and cancels the call at the end of the block."""
    talk = Talk(stub, seq=seq)
    try:
        await talk.open(**fields)
        yield talk
    finally:
        talk.call.cancel()
