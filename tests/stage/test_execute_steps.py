"""Calls of many steps over one ExecuteSteps stream, over a real connection."""

import asyncio
from collections import defaultdict
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any, TypeAlias, cast

import grpc
import pytest

from stagemesh.common.errors import InternalError
from stagemesh.common.notification import Journal
from stagemesh.common.process.stage_process import StageConfig
from stagemesh.conformance import until
from stagemesh.rpc.channels import MAX_FIELDS, MAX_MESSAGE_BYTES
from stagemesh.services.engines.base import Engine
from stagemesh.services.stage import servicer
from stagemesh.services.stage.servicer import StepSession
from stagemesh.services.stage.step import run
from stagemesh.v1 import request_pb2, stage_pb2
from tests.stage.gated_engine import GatedEngine
from tests.stage.replicas import Replica, ready_runtime, served, served_stage, stage_config, step_request

Request: TypeAlias = stage_pb2.ExecuteStepsRequest
Event: TypeAlias = stage_pb2.ExecuteStepResponse

eventually = partial(until, timeout_s=10)
METHOD = "/stagemesh.v1.StageService/ExecuteSteps"


class Caller:
    """One stream and its received messages by call."""

    def __init__(self, replica: Replica) -> None:
        self.call = replica.stub.ExecuteSteps()
        self.received: dict[int, list[stage_pb2.StepMessage]] = defaultdict(list)
        self.is_closing = False

    async def begin(self, number: int, step: stage_pb2.ExecuteStepRequest, *, timeout_s: float | None = None) -> None:
        await self.call.write(Request(call=number, start=stage_pb2.StartStep(step=step, timeout_s=timeout_s)))

    async def cancel(self, number: int) -> None:
        await self.call.write(Request(call=number, cancel=stage_pb2.CancelCall()))

    async def until_received(self, number: int, *kinds: str) -> None:
        """Reads until the call has received events of these kinds."""
        while self.kinds(number)[: len(kinds)] != list(kinds):
            await self._read()

    async def until_ended(self, *numbers: int) -> None:
        while not all(self.kinds(number)[-1:] == ["ended"] for number in numbers):
            await self._read()

    def kinds(self, number: int) -> list[str | None]:
        return [each.event.WhichOneof("event") or each.WhichOneof("message") for each in self.received[number]]

    def reason(self, number: int) -> str:
        return self.received[number][-1].ended.error.reason

    async def status(self) -> grpc.StatusCode:
        """Reads to the end of the stream and returns its status."""
        with suppress(grpc.aio.AioRpcError):
            while isinstance(await self.call.read(), stage_pb2.ExecuteStepsResponse):
                pass
        return await self.call.code()

    async def until_closing(self) -> None:
        while not self.is_closing:
            await self._read()

    async def _read(self) -> None:
        async with asyncio.timeout(5):
            response = await self.call.read()
        assert isinstance(response, stage_pb2.ExecuteStepsResponse), "the stream ended"
        self.is_closing |= response.closing
        for message in response.messages:
            self.received[message.call].append(message)


@asynccontextmanager
async def calling(config: StageConfig | None = None, *, engine: Engine | None = None) -> AsyncGenerator[Caller]:
    """Yields the caller of a replica."""
    async with served_stage(config, engine=engine) as replica:
        yield Caller(replica)


async def test_a_message_of_many_elements_is_not_parsed() -> None:
    async with served_stage() as replica:
        caller = Caller(replica)
        await caller.begin(1, stage_pb2.ExecuteStepRequest(absent=[""] * (2 * MAX_FIELDS)))
        assert await caller.status() is grpc.StatusCode.INVALID_ARGUMENT
        assert "start.step.absent" in await caller.call.details()


async def test_an_error_ends_its_own_call_and_names_the_stage() -> None:
    async with calling(stage_config(fail_at_step=1)) as caller:
        await caller.begin(1, step_request("a"))
        await caller.begin(2, step_request("b"))
        await caller.until_ended(1, 2)
    error = caller.received[1][-1].ended.error
    assert "fails at step 1" in error.message
    assert dict(error.metadata) == {"stage": "thinker", "replica": "thinker-0", "request_id": "a"}
    assert caller.received[2][-1].ended.error.metadata["request_id"] == "b"


async def test_a_full_replica_says_when_to_retry() -> None:
    async with calling(engine=GatedEngine()) as caller:
        for number in range(5):
            await caller.begin(number, step_request(f"r{number}"))
        await caller.until_ended(4)
    error = caller.received[4][-1].ended.error
    assert (error.code, error.retry_after_s) == (grpc.StatusCode.RESOURCE_EXHAUSTED.value[0], 2.5)
    assert "max_queued" in error.message


async def test_cancelling_a_call_stops_its_step_only(engine: GatedEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "ABANDON_S", 0.0)
    async with calling(engine=engine) as caller:
        for number, request_id in ((1, "leaves"), (2, "stays")):
            await caller.begin(number, step_request(request_id))
            await caller.until_received(number, "accepted", "output")
        await caller.cancel(1)
        await eventually(lambda: engine.released == ["leaves"])
        await caller.cancel(1)
        engine.gate.set()
        await caller.until_ended(2)
    assert caller.kinds(1) == ["accepted", "output"]


async def test_the_end_of_the_stream_cancels_all_calls(engine: GatedEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "ABANDON_S", 0.0)
    async with calling(engine=engine) as caller:
        for number in (1, 2):
            await caller.begin(number, step_request(f"r{number}"))
            await caller.until_received(number, "accepted", "output")
        caller.call.cancel()
        await eventually(lambda: len(engine.released) == 2)
    assert sorted(engine.released) == ["r1", "r2"]


async def test_a_call_ends_at_its_timeout(engine: GatedEngine) -> None:
    async with calling(engine=engine) as caller:
        await caller.begin(1, step_request("late"), timeout_s=0.05)
        await caller.begin(2, step_request("never"), timeout_s=0.0)
        await caller.until_ended(1, 2)
    assert [caller.reason(number) for number in (1, 2)] == ["DEADLINE_EXCEEDED", "DEADLINE_EXCEEDED"]
    assert "allow more time" in caller.received[1][-1].ended.error.message
    assert engine.released == ["late"]
    assert caller.kinds(2) == ["ended"]


async def test_an_invalid_message_ends_the_stream() -> None:
    async with served_stage() as replica, grpc.aio.insecure_channel(replica.endpoint) as channel:
        call: grpc.aio.StreamStreamCall[bytes, bytes] = channel.stream_stream(METHOD)()
        await call.write(b"\xff")
        assert await call.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_closing_replica_ends_all_calls_then_the_stream(engine: GatedEngine) -> None:
    async with ready_runtime(engine=engine) as runtime, served(runtime) as replica:
        caller = Caller(replica)
        await caller.begin(1, step_request())
        await caller.until_received(1, "accepted", "output")
        await runtime.close()
        await caller.until_ended(1)
        assert caller.reason(1) == "SHUTTING_DOWN"
        await caller.until_closing()
        # The caller ends the stream. Its writes until then do not fail.
        await caller.cancel(1)
        await caller.call.done_writing()
        assert await caller.status() is grpc.StatusCode.OK


async def test_a_closing_replica_ends_a_stream_that_its_caller_keeps_open(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servicer, "_READ_S", 0.05)
    async with ready_runtime() as runtime, served(runtime) as replica:
        caller = Caller(replica)
        await caller.begin(1, step_request())
        await caller.until_ended(1)
        await runtime.close()
        await caller.until_closing()
        async with asyncio.timeout(5):
            assert await caller.status() is grpc.StatusCode.OK


# -- the session alone


class ReadItems(list[bytes]):
    """Items that record the highest index that was read."""

    read = 0

    def __getitem__(self, index: Any) -> Any:
        self.read = max(self.read, index)
        return super().__getitem__(index)


def _journal(*events: Event, error: Exception | None = None) -> Journal[bytes]:
    """Returns the journal of a step that has made events and has ended. An error may be of any kind."""
    journal = Journal[bytes]()
    journal.items = ReadItems(event.SerializeToString() for event in events)
    journal.close(cast("Any", error))
    return journal


def _texts(count: int, *, size_bytes: int = 1) -> Journal[bytes]:
    return _journal(*[Event(output=request_pb2.Output(text="x" * size_bytes))] * count)


@asynccontextmanager
async def _session(*journals: Journal[bytes]) -> AsyncGenerator[AsyncGenerator[bytes]]:
    """Returns the messages of a session with a call for each journal."""

    async def asked() -> AsyncIterator[bytes]:
        for number in range(1, len(journals) + 1):
            yield Request(call=number, start=stage_pb2.StartStep(step=step_request(f"r{number}"))).SerializeToString()
        await asyncio.Event().wait()

    left = iter(journals)

    def attach(step: stage_pb2.ExecuteStepRequest, time_left_s: float | None) -> Journal[bytes]:
        return next(left)

    messages = StepSession(attach, closing=asyncio.Event(), where={}).serve(asked())
    try:
        yield messages
    finally:
        await messages.aclose()


async def _next(messages: AsyncGenerator[bytes]) -> list[stage_pb2.StepMessage]:
    async with asyncio.timeout(5):
        return list(stage_pb2.ExecuteStepsResponse.FromString(await anext(messages)).messages)


async def test_simultaneous_responses_share_one_message() -> None:
    async with _session(*(_texts(1) for _ in range(8))) as messages:
        responses = await _next(messages)
    assert [each.call for each in responses if each.HasField("event")] == list(range(1, 9))


async def test_what_a_caller_does_not_read_remains_in_the_journals() -> None:
    journals = [_texts(1_000, size_bytes=64 << 10) for _ in range(2)]
    read = [cast("ReadItems", journal.items) for journal in journals]
    async with _session(*journals) as messages:
        received = await _next(messages)
        for _ in range(100):
            await asyncio.sleep(0)
        # Some messages wait in gRPC.
        assert sum(items.read for items in read) < 40
        while len(received) < 2 * (1_000 + 1):
            more = await _next(messages)
            assert len(more) <= 5, "a message has about 256 KiB"
            received += more
    for call in (1, 2):
        own = [each.HasField("event") for each in received if each.call == call]
        assert own == [True] * 1_000 + [False]


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (InternalError("no file \udce4"), "no file ?"),
        (InternalError("no file", metadata={"file": "\udce4"}), "no file"),
        (ValueError("nobody foresaw it"), "an unexpected ValueError"),
    ],
)
async def test_every_kind_of_error_reaches_the_caller(error: Exception, message: str) -> None:
    async with _session(_journal(Event(accepted=stage_pb2.StepAccepted()), error=error)) as messages:
        received = await _next(messages)
    assert message in received[-1].ended.error.message


async def test_an_event_too_large_for_a_message_ends_its_call() -> None:
    async with _session(_texts(1, size_bytes=MAX_MESSAGE_BYTES)) as messages:
        (ended,) = await _next(messages)
    assert ended.ended.error.reason == "OUTPUT_TOO_LARGE"
