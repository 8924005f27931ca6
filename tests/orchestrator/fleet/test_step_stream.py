"""Steps of one replica share a stream. Tests what happens to them if it breaks."""

import asyncio
import weakref
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import grpc
import pytest

from stagemesh.common import errors
from stagemesh.conformance.replicas import until
from stagemesh.orchestrator.fleet import step_stream
from stagemesh.orchestrator.fleet.replica import Replica
from stagemesh.orchestrator.fleet.replica_client import ReplicaClient
from stagemesh.orchestrator.fleet.replica_loss import REPLICA_LOST
from stagemesh.orchestrator.request.step_calls import follow_step
from stagemesh.rpc.channels import CHANNEL_OPTIONS, MAX_MESSAGE_BYTES
from stagemesh.rpc.server import Server
from stagemesh.services.stage import servicer
from stagemesh.v1 import stage_pb2
from tests.later_contract import later_class
from tests.orchestrator.mesh import serve
from tests.orchestrator.scripted_stage import (
    ACCEPTED,
    FINISHED,
    Response,
    Script,
    ScriptedStage,
    hang,
    say_hello,
    text_output,
)
from tests.rpc.call_errors import raises

BOUND_S = 10


@dataclass
class Caller:
    """A client of a scripted replica, and the events that its steps received."""

    client: ReplicaClient
    stage: ScriptedStage
    server: Server
    received: dict[str, list[str | None]] = field(default_factory=dict[str, list[str | None]])

    async def run(self, request_id: str, *, take: Callable[[Response], None] | None = None, text: str = "") -> None:
        request = stage_pb2.ExecuteStepRequest(
            request_id=request_id, step_id=f"{request_id}/a/1", streamed=[stage_pb2.StreamedOutput(tensor="text")]
        )
        request.input.text = text
        kinds = self.received.setdefault(request_id, [])
        take = take or (lambda event: kinds.append(event.WhichOneof("event")))
        async with asyncio.timeout(BOUND_S):
            await self.client.execute(request, timeout_s=BOUND_S, take=take)

    async def until_running(self, count: int) -> None:
        """Waits until the replica runs this number of steps."""
        await until(lambda: self.stage.running == count, timeout_s=BOUND_S)

    async def fails(self, request_id: str, *, take: Callable[[Response], None] | None = None) -> errors.StagemeshError:
        with pytest.raises(errors.StagemeshError) as caught:
            await self.run(request_id, take=take)
        return caught.value


@asynccontextmanager
async def _calling(
    script: Script = say_hello, *, minimal: bool = False, kind: type[ScriptedStage] = ScriptedStage
) -> AsyncGenerator[Caller]:
    stage = kind("a", script=script)
    server, endpoint = await serve(stage, minimal=minimal)
    client = ReplicaClient(stage="a", replica="a-0", endpoint=endpoint)
    try:
        yield Caller(client, stage, server)
    finally:
        await client.close()
        await server.stop(grace_s=0)


def _until_set(end: asyncio.Event) -> Script:
    """Returns a script that finishes when the event is set. A step of the request `short` finishes at once."""

    async def wait(stage: ScriptedStage, request: stage_pb2.ExecuteStepRequest) -> AsyncIterator[Response]:
        yield ACCEPTED
        if request.request_id != "short":
            await end.wait()
        yield FINISHED

    return wait


async def _fail(stage: ScriptedStage, request: stage_pb2.ExecuteStepRequest) -> AsyncIterator[Response]:
    yield ACCEPTED
    if request.request_id == "bad":
        raise errors.InternalError("out of luck")
    yield FINISHED


@pytest.mark.parametrize("minimal", [False, True], ids=["stream", "calls"])
async def test_each_step_gets_its_own_events_over_a_shared_stream_or_a_call_of_its_own(minimal: bool) -> None:
    async with _calling(minimal=minimal) as caller:
        await asyncio.gather(*(caller.run(f"r{number}", text="kept") for number in range(8)))
        await caller.run("later", text="kept")
    said = ["accepted", "progress", "output", "output", "finished"]
    assert list(caller.received.values()) == [said] * 9
    assert {request.input.text for request in caller.stage.requests} == {"kept"}
    assert caller.stage.streams == (0 if minimal else 1)


class LaterStage(ScriptedStage):
    """A stage of a later version, which sends a message of another kind for each of the first two calls."""

    async def ExecuteSteps(self, request_iterator: Any, context: Any) -> None:  # type: ignore[override]
        messages = [later_class("StepMessage")(call=number, later="news", ignorable=number == 2) for number in (1, 2)]
        await context.write(later_class("ExecuteStepsResponse")(messages=messages).SerializeToString())
        await cast("Any", super().ExecuteSteps(request_iterator, context))


async def test_a_message_of_an_unknown_kind_ends_its_step_unless_it_is_ignorable() -> None:
    async with _calling(kind=LaterStage) as caller:
        error, _, _ = await asyncio.gather(caller.fails("refused"), caller.run("ignored"), caller.run("other"))
    assert (error.reason, error.metadata["replica"]) == ("UNKNOWN_KIND", "a-0")
    assert "sent a StepMessage of an unknown kind (field 1000)" in error.message
    assert caller.received["ignored"] == caller.received["other"] != []


@pytest.mark.parametrize("minimal", [False, True], ids=["stream", "calls"])
async def test_steps_end_with_their_client_or_their_replica(minimal: bool) -> None:
    async with _calling(hang, minimal=minimal) as caller:
        running = asyncio.create_task(caller.fails("r"))
        await caller.until_running(1)
        await (caller.server.stop(grace_s=0) if minimal else caller.client.close())
        error = await running
    assert error.reason == REPLICA_LOST if minimal else "is no longer connected" in error.message


@pytest.mark.parametrize("minimal", [False, True])
async def test_a_step_that_fails_fails_alone(minimal: bool) -> None:
    async with _calling(_fail, minimal=minimal) as caller:
        error, _ = await asyncio.gather(caller.fails("bad"), caller.run("good"))
    assert (error.message, error.metadata["replica"]) == ("out of luck", "a-0")
    assert caller.received["good"] == ["accepted", "finished"]


@pytest.mark.parametrize("minimal", [False, True], ids=["stream", "calls"])
async def test_cancelling_a_call_cancels_its_step_and_no_other(minimal: bool) -> None:
    async with _calling(hang, minimal=minimal) as caller:
        leaving = asyncio.create_task(caller.run("leaves"))
        staying = asyncio.create_task(caller.run("stays"))
        await caller.until_running(2)
        leaving.cancel()
        await caller.until_running(1)
        assert not staying.done()
        staying.cancel()
        await asyncio.gather(leaving, staying, return_exceptions=True)
        await caller.until_running(0)


async def test_a_replica_that_terminates_loses_its_steps_and_is_called_over_a_new_stream() -> None:
    async with _calling(hang) as caller:
        running = [asyncio.create_task(caller.fails(name)) for name in ("one", "two")]
        await caller.until_running(2)
        await caller.server.stop(grace_s=0)
        lost = await asyncio.gather(*running)
        unreachable = await caller.fails("three")
    assert [error.reason for error in (*lost, unreachable)] == [REPLICA_LOST] * 3
    assert all("became unreachable while the request ran" in error.message for error in lost)
    assert "cannot be reached" in unreachable.message


async def test_a_stream_whose_end_is_announced_is_closed_and_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    # The replica must not end the stream first.
    monkeypatch.setattr(servicer, "_READ_S", 60.0)
    end = asyncio.Event()
    async with _calling(_until_set(end)) as caller:
        running = [asyncio.create_task(caller.run(name)) for name in ("one", "two")]
        await caller.until_running(2)
        caller.stage.closing.set()
        end.set()
        await asyncio.gather(*running)
        steps = caller.client._steps
        await until(lambda: steps is not None and steps.is_closed and not caller.stage.open_streams, timeout_s=BOUND_S)
        caller.stage.closing.clear()
        await caller.run("three")
    assert caller.received == {name: ["accepted", "finished"] for name in ("one", "two", "three")}
    assert caller.stage.streams == 2


async def test_a_stream_without_steps_ends_and_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_stream, "_IDLE_S", 0.05)
    async with _calling() as caller:
        await caller.run("one")
        await until(lambda: caller.stage.open_streams == 0, timeout_s=BOUND_S)
        await caller.run("two")
    assert caller.received["one"] == caller.received["two"] != []
    assert caller.stage.streams == 2


async def test_a_stream_with_a_long_step_stays_open(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_stream, "_IDLE_S", 0.0)
    end = asyncio.Event()
    async with _calling(_until_set(end)) as caller:
        long = asyncio.create_task(caller.run("long"))
        await caller.until_running(1)
        await caller.run("short")
        steps = caller.client._steps
        assert steps is not None
        steps._end_if_idle()
        assert not steps.is_closed
        end.set()
        await long
        await until(lambda: steps.is_closed and not caller.stage.open_streams, timeout_s=BOUND_S)
    assert caller.stage.streams == 1


async def test_a_request_larger_than_a_message_is_rejected_and_others_continue() -> None:
    async with _calling(hang) as caller:
        running = asyncio.create_task(caller.run("r"))
        await caller.until_running(1)
        with pytest.raises(errors.InvalidRequestError, match="shorten the input"):
            await caller.run("large", text="x" * MAX_MESSAGE_BYTES)
        assert not running.done()
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def test_a_step_cancelled_before_it_was_sent_never_starts() -> None:
    async with _calling(hang) as caller:
        # Each message is larger than the send window: the last one waits for the others.
        large = [asyncio.create_task(caller.run(f"large-{number}", text="x" * (7 << 20))) for number in range(3)]
        small = asyncio.create_task(caller.run("small"))
        await asyncio.sleep(0)
        small.cancel()
        await caller.until_running(len(large))
        last = asyncio.create_task(caller.run("last"))
        await caller.until_running(len(large) + 1)
        assert "small" not in [request.request_id for request in caller.stage.requests]
        for task in (*large, last):
            task.cancel()
        await asyncio.gather(*large, small, last, return_exceptions=True)


class _Held:
    """An object that a step refers to while it runs. It refuses each event."""

    def take(self, event: Response) -> None:
        raise errors.UnavailableError(f"{event.WhichOneof('event')} is not wanted", reason="NOT_WANTED")


@pytest.mark.usefixtures("no_collector")
async def test_a_step_that_an_error_of_take_ends_is_freed_at_once() -> None:
    async with _calling(hang) as caller:
        held = _Held()
        gone = weakref.ref(held)
        with raises(errors.UnavailableError, reason="NOT_WANTED", match="accepted is not wanted"):
            await caller.run("r", take=held.take)
        del held
        assert gone() is None
        await caller.until_running(0)


async def _never_accept(stage: ScriptedStage, request: stage_pb2.ExecuteStepRequest) -> AsyncIterator[Response]:
    await asyncio.Event().wait()
    yield ACCEPTED


@pytest.mark.usefixtures("no_collector")
async def test_a_step_that_is_cancelled_before_it_was_accepted_is_freed_at_once() -> None:
    async with _calling(_never_accept) as caller:
        held = _Held()
        gone = weakref.ref(held)
        replica = cast("Replica", SimpleNamespace(stage="a", client=caller.client, end_cause=None))
        order = stage_pb2.ExecuteStepRequest(request_id="r", step_id="r/a/1").SerializeToString()
        deadline_s = asyncio.get_running_loop().time() + BOUND_S
        following = asyncio.create_task(follow_step(replica, order, deadline_s=deadline_s, take=held.take))
        await caller.until_running(1)
        following.cancel()
        await asyncio.wait([following])
        del held, following
        assert gone() is None


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "is not UTF-8": lambda data: data.replace(b"BAD", b"\xff\xfe\xfd"),
    "larger than max": lambda data: data + bytes(MAX_MESSAGE_BYTES),
}


class _DamagingReplica(grpc.GenericRpcHandler):
    """Serves the steps of a stage. Damages each message with the text "BAD"."""

    def __init__(self, stage: ScriptedStage, damage: Callable[[bytes], bytes]) -> None:
        self.stage, self._damage = stage, damage
        self.alone = Counter[str]()
        """The number of calls of ExecuteStep by request."""

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
        _, _, method = handler_call_details.method.rpartition("/")
        make: Any = grpc.stream_stream_rpc_method_handler
        return make({"ExecuteSteps": self._steps, "ExecuteStep": self._step, "Describe": self._describe}[method])

    async def _steps(self, requests: Any, _context: Any) -> AsyncIterator[bytes]:
        session = servicer.StepSession(self.stage._attach, closing=self.stage.closing, where={"stage": "a"})
        async for data in session.serve(requests):
            yield self._sent(data)

    async def _step(self, requests: Any, _context: Any) -> AsyncIterator[bytes]:
        request = stage_pb2.ExecuteStepRequest.FromString(await anext(aiter(requests)))
        self.alone[request.request_id] += 1
        async for event in self.stage._execute(request, None):
            yield self._sent(event.SerializeToString())

    async def _describe(self, _requests: Any, _context: Any) -> AsyncIterator[bytes]:
        yield stage_pb2.DescribeResponse(incarnation="i").SerializeToString()

    def _sent(self, data: bytes) -> bytes:
        return self._damage(data) if b"BAD" in data else data


@pytest.mark.parametrize("limits", ["the orchestrator's", "the replica's"])
@pytest.mark.parametrize("problem", DAMAGES)
async def test_a_message_that_cannot_be_received_fails_its_step_alone(problem: str, limits: str) -> None:
    go = asyncio.Event()

    async def script(_stage: ScriptedStage, request: stage_pb2.ExecuteStepRequest) -> AsyncIterator[Response]:
        yield ACCEPTED
        if request.request_id == "good":
            await go.wait()
        yield text_output("text", "BAD" if request.request_id == "bad" else "good")
        yield FINISHED

    replica = _DamagingReplica(ScriptedStage("a", script=script), DAMAGES[problem])
    options: Any = CHANNEL_OPTIONS if limits == "the replica's" else [("grpc.max_send_message_length", -1)]
    server = grpc.aio.server(handlers=[replica], options=options)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    client = ReplicaClient(stage="a", replica="a-0", endpoint=f"127.0.0.1:{port}")
    target = cast("Replica", SimpleNamespace(stage="a", name="a-0", client=client, end_cause=None, incarnation="i"))
    received: dict[str, list[str | None]] = {"good": [], "bad": []}

    async def follow(name: str) -> None:
        order = stage_pb2.ExecuteStepRequest(request_id=name, step_id=f"{name}/a/1").SerializeToString()
        deadline_s = asyncio.get_running_loop().time() + BOUND_S
        take = lambda event: received[name].append(event.WhichOneof("event"))  # noqa: E731
        await follow_step(target, order, deadline_s=deadline_s, take=take)

    good = asyncio.create_task(follow("good"))
    await until(lambda: received["good"] == ["accepted"], timeout_s=BOUND_S)
    with pytest.raises(errors.InternalError, match=f"stage 'a' .*cannot be read: .*{problem}") as caught:
        await follow("bad")
    go.set()
    await good
    await client.close()
    await server.stop(None)
    assert (caught.value.reason, caught.value.metadata["replica"]) == ("INTERNAL", "a-0")
    assert received == {"good": ["accepted", "output", "finished"], "bad": ["accepted"]}
    assert replica.alone["bad"] == 1


async def test_a_service_without_the_method_does_not_count_as_lost() -> None:
    server = Server("127.0.0.1:0")
    endpoint = f"127.0.0.1:{await server.start()}"
    client = ReplicaClient(stage="a", replica="a-0", endpoint=endpoint)
    with pytest.raises(errors.UnsupportedError, match=r"replica a-0 .* Method not found") as caught:
        await client.execute(stage_pb2.ExecuteStepRequest(), timeout_s=BOUND_S, take=lambda _: None)
    await client.close()
    await server.stop(grace_s=0)
    assert caught.value.metadata["replica"] == "a-0"
