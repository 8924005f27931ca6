"""Steps whose peers are replaced while they run, over the real data plane."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace

import grpc
import pytest

from stagemesh.common.errors import StagemeshError
from stagemesh.common.process.stage_process import StageConfig
from stagemesh.connectors import lost_peers
from stagemesh.rpc.channels import open_channel
from stagemesh.rpc.error_mapping import from_rpc_error
from stagemesh.rpc.handlers import add_stage_service
from stagemesh.rpc.server import Server
from stagemesh.services.stage.servicer import StageServicer
from stagemesh.v1 import chunk_pb2, stage_pb2, stage_pb2_grpc
from tests.stage.replicas import Replica, make_runtime, stage_config, step_request

EDGE = "thinker->talker"
STEPS = 40
SERVERS: dict[str, Server] = {}
CONNECTORS = {"shm": chunk_pb2.CONNECTOR_SHM, "grpc": chunk_pb2.CONNECTOR_GRPC}


class Stage:
    """Replicas of one stage, started one after the other."""

    def __init__(self, config: StageConfig, stack: AsyncExitStack) -> None:
        self._config, self._stack = config, stack
        self._count = 0

    async def replica(self, **options: float) -> Replica:
        """Starts another replica."""
        name = f"{self._config.stage}-{self._count}"
        self._count += 1
        config = replace(self._config, replica=name, options={**self._config.options, **options})
        runtime = make_runtime(config)
        self._stack.push_async_callback(runtime.close)
        await runtime.start()
        server = Server("127.0.0.1:0")
        add_stage_service(StageServicer(runtime), server.grpc)
        endpoint = f"127.0.0.1:{await server.start()}"
        SERVERS[endpoint] = server
        self._stack.push_async_callback(server.stop, grace_s=0)
        channel = await self._stack.enter_async_context(open_channel(endpoint))
        return Replica(runtime, endpoint, stage_pb2_grpc.StageServiceStub(channel))


@dataclass
class Received:
    """The events that a caller of a step receives."""

    task: "asyncio.Task[None]"
    events: list[stage_pb2.ExecuteStepResponse]

    @property
    def text(self) -> str:
        return "".join(event.output.text for event in self.events)

    @property
    def checkpoints(self) -> list[stage_pb2.Checkpoint]:
        return [event.checkpoint for event in self.events if event.HasField("checkpoint")]

    async def outputs(self, count: int) -> None:
        """Returns once this number of events has arrived."""
        await until(lambda: sum(event.HasField("output") for event in self.events) >= count)


async def until(holds: object) -> None:
    async with asyncio.timeout(10):
        while not holds():  # type: ignore[operator]
            await asyncio.sleep(0.002)


def receive(replica: Replica, request: stage_pb2.ExecuteStepRequest) -> Received:
    events: list[stage_pb2.ExecuteStepResponse] = []

    async def follow() -> None:
        async for event in replica.stub.ExecuteStep(request, timeout=30):
            events.append(event)  # noqa: PERF401 - they are read as they come

    return Received(asyncio.create_task(follow()), events)


@asynccontextmanager
async def stages(*, checkpoint_steps: int = 0) -> AsyncGenerator[tuple[Stage, Stage]]:
    async with AsyncExitStack() as stack:
        thinker = stage_config(steps=STEPS, step_s=0.02, size_bytes=200, checkpoint_steps=checkpoint_steps)
        yield Stage(thinker, stack), Stage(stage_config("talker", function="relay"), stack)


def thinking(
    talker: Replica, *, connector: str = "shm", attempt: int = 1, edge: int = 1
) -> stage_pb2.ExecuteStepRequest:
    request = step_request(attempt=attempt)
    request.outputs.append(output(talker, connector=connector, edge=edge))
    return request


def output(talker: Replica, *, connector: str = "shm", edge: int) -> stage_pb2.OutputBinding:
    return stage_pb2.OutputBinding(
        edge=EDGE,
        consumer=talker.runtime.config.replica,
        endpoint=talker.endpoint,
        connector=CONNECTORS[connector],
        attempt=edge,
    )


def talking(thinker: Replica, *, attempt: int = 1, edge: int = 1, transform: str = "") -> stage_pb2.ExecuteStepRequest:
    return stage_pb2.ExecuteStepRequest(
        request_id="r",
        step_id=f"r/talker/{attempt}",
        attempt=attempt,
        inputs=[fed_by(thinker, edge=edge, transform=transform)],
        streamed=[stage_pb2.StreamedOutput(tensor="text")],
    )


def fed_by(thinker: Replica, *, edge: int, transform: str = "") -> stage_pb2.InputBinding:
    return stage_pb2.InputBinding(edge=EDGE, producer=thinker.runtime.config.replica, attempt=edge, transform=transform)


def rebind_output(talker: Replica, *, edge: int = 2, connector: str = "shm") -> stage_pb2.RebindStepRequest:
    return stage_pb2.RebindStepRequest(
        request_id="r", step_id="r/thinker/1", outputs=[output(talker, edge=edge, connector=connector)]
    )


def rebind_input(thinker: Replica, *, edge: int = 2, **first_rows: int) -> stage_pb2.RebindStepRequest:
    rebinding = stage_pb2.InputRebinding(binding=fed_by(thinker, edge=edge), first_rows=first_rows)
    return stage_pb2.RebindStepRequest(request_id="r", step_id="r/talker/1", inputs=[rebinding])


async def kill(replica: Replica) -> None:
    """Closes a replica abruptly, as similar to a dead process as possible within one process."""
    await SERVERS[replica.endpoint].stop(grace_s=0)
    await replica.runtime.data_plane.close()


async def accepted(received: Received) -> None:
    await until(lambda: received.events or received.task.done())


@pytest.mark.parametrize("connector", CONNECTORS)
@pytest.mark.parametrize("kills", [True, False])
async def test_a_new_consumer_receives_all_chunks_from_the_first(connector: str, *, kills: bool) -> None:
    async with stages() as (thinkers, talkers):
        thinker, first, second = await thinkers.replica(), await talkers.replica(), await talkers.replica()
        lost = receive(first, talking(thinker))
        await accepted(lost)
        thought = receive(thinker, thinking(first, connector=connector))
        await lost.outputs(5)
        if kills:
            await kill(first)
        talked = receive(second, talking(thinker, attempt=2, edge=2))
        await accepted(talked)
        await thinker.stub.RebindStep(rebind_output(second, connector=connector))
        await asyncio.gather(thought.task, talked.task)
        assert talked.text == thought.text
        assert len(thought.text) == STEPS * 200
        assert thought.events[-1].finished.edges[0].chunks == STEPS
        lost.task.cancel()


async def test_a_consumer_can_be_replaced_during_a_replay() -> None:
    async with stages() as (thinkers, talkers):
        thinker = await thinkers.replica()
        replicas = [await talkers.replica(step_s=0.02) for _ in range(3)] + [await talkers.replica()]
        received = [receive(replicas[0], talking(thinker))]
        await accepted(received[0])
        thought = receive(thinker, thinking(replicas[0]))
        for number, replica in enumerate(replicas[1:], start=2):
            await received[-1].outputs(3)
            await kill(replicas[number - 2])
            received.append(receive(replica, talking(thinker, attempt=number, edge=number)))
            await accepted(received[-1])
            await thinker.stub.RebindStep(rebind_output(replica, edge=number))
        await asyncio.gather(thought.task, received[-1].task)
        assert received[-1].text == thought.text
        for one in received:
            one.task.cancel()


async def test_a_finished_step_still_feeds_a_new_consumer() -> None:
    async with stages() as (thinkers, talkers):
        thinker, first = await thinkers.replica(step_s=0.0), await talkers.replica(step_s=0.05)
        second = await talkers.replica()
        lost = receive(first, talking(thinker))
        await accepted(lost)
        thought = receive(thinker, thinking(first))
        await thought.task
        await kill(first)
        talked = receive(second, talking(thinker, attempt=2, edge=2))
        await accepted(talked)
        await thinker.stub.RebindStep(rebind_output(second))
        await talked.task
        assert talked.text == thought.text
        await until(lambda: all(left.is_over for left in thinker.runtime._runs._left.values()))
        await until(lambda: not thinker.runtime.load().arena_used_bytes)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await thinker.stub.RebindStep(rebind_output(second, edge=3))
        assert reason_of(caught.value) == "UNKNOWN_STEP"
        lost.task.cancel()


@pytest.mark.parametrize("resumes", [True, False])
@pytest.mark.parametrize("kills", [True, False])
async def test_a_consumer_drops_rows_that_a_new_producer_repeats(*, kills: bool, resumes: bool) -> None:
    async with stages(checkpoint_steps=4) as (thinkers, talkers):
        first, second, talker = await thinkers.replica(), await thinkers.replica(), await talkers.replica()
        talked = receive(talker, talking(first))
        await accepted(talked)
        lost = receive(first, thinking(talker))
        await talked.outputs(11)
        if kills:
            await kill(first)
        request = thinking(talker, attempt=2, edge=2)
        rows = {}
        if resumes:
            request.resume_from.CopyFrom(lost.checkpoints[1])
            rows = dict(lost.checkpoints[1].rows)
            assert rows == {"text": 8 * 200}
        await talker.stub.RebindStep(rebind_input(second, **rows))
        again = receive(second, request)
        await asyncio.gather(again.task, talked.task)
        whole = await _whole(thinkers)
        assert talked.text == whole
        assert again.text == whole[sum(rows.values()) :]
        lost.task.cancel()


async def test_the_transform_keeps_its_state_over_a_rebinding() -> None:
    async with stages() as (thinkers, talkers):
        first, second, talker = await thinkers.replica(), await thinkers.replica(), await talkers.replica()
        talked = receive(talker, talking(first, transform="text.sentences"))
        await accepted(talked)
        lost = receive(first, thinking(talker))
        await talked.outputs(3)
        await kill(first)
        await talker.stub.RebindStep(rebind_input(second))
        again = receive(second, thinking(talker, attempt=2, edge=2))
        await asyncio.gather(again.task, talked.task)
        assert "".join(talked.text.split()) == "".join(again.text.split())
        lost.task.cancel()


async def test_a_producer_that_repeats_received_rows_only_finishes() -> None:
    async with stages() as (thinkers, talkers):
        first, second = await thinkers.replica(step_s=0.0), await thinkers.replica(step_s=0.001)
        talker = await talkers.replica(step_s=0.01)
        talked = receive(talker, talking(first))
        await accepted(talked)
        await receive(first, thinking(talker)).task
        await talker.stub.RebindStep(rebind_input(second))
        again = receive(second, thinking(talker, attempt=2, edge=2))
        await asyncio.gather(again.task, talked.task)
        assert talked.text == again.text
        await until(lambda: not talker.runtime.data_plane.consumer._flows)
        await until(lambda: not second.runtime.load().arena_used_bytes)


async def test_a_checkpoint_beyond_the_received_rows_is_rejected() -> None:
    async with stages() as (thinkers, talkers):
        first, second, talker = await thinkers.replica(), await thinkers.replica(), await talkers.replica()
        talked = receive(talker, talking(first))
        await accepted(talked)
        thought = receive(first, thinking(talker))
        await talked.outputs(2)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await talker.stub.RebindStep(rebind_input(second, text=1_000_000))
        error = error_of(caught.value)
        assert error.reason == "ROWS_MISSING"
        assert 400 <= int(error.metadata["rows"]) < STEPS * 200
        await asyncio.gather(thought.task, talked.task)
        assert talked.text == thought.text


async def test_a_rebinding_without_the_first_chunk_is_rejected() -> None:
    async with stages() as (thinkers, talkers):
        thinker, first, second = await thinkers.replica(), await talkers.replica(), await talkers.replica()
        talked = receive(first, talking(thinker))
        await accepted(talked)
        thought = receive(thinker, thinking(first))
        await talked.outputs(3)
        retention = thinker.runtime.data_plane._retention
        retention.evict_oldest()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await thinker.stub.RebindStep(rebind_output(second))
        assert error_of(caught.value).reason == "CHUNK_GONE"
        assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        await asyncio.gather(thought.task, talked.task)
        assert talked.text == thought.text


async def test_a_repeated_rebinding_does_nothing_and_an_older_one_is_rejected() -> None:
    async with stages() as (thinkers, talkers):
        thinker, first, second = await thinkers.replica(), await talkers.replica(), await talkers.replica()
        lost = receive(first, talking(thinker))
        await accepted(lost)
        thought = receive(thinker, thinking(first))
        await lost.outputs(3)
        talked = receive(second, talking(thinker, attempt=3, edge=3))
        await accepted(talked)
        for _ in range(2):
            await thinker.stub.RebindStep(rebind_output(second, edge=3))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await thinker.stub.RebindStep(rebind_output(first, edge=2))
        assert error_of(caught.value).reason == "STALE_ATTEMPT"
        await asyncio.gather(thought.task, talked.task)
        assert talked.text == thought.text
        lost.task.cancel()


async def test_edges_without_a_new_peer_fail_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lost_peers, "REBIND_S", 0.1)
    monkeypatch.setattr(lost_peers, "LOST_PRODUCER_S", 0.1)
    async with stages() as (thinkers, talkers):
        thinker, middle, last = await thinkers.replica(), await talkers.replica(), await talkers.replica()
        final = receive(last, _relayed(middle))
        await accepted(final)
        request = talking(thinker)
        request.outputs.append(output(last, edge=1))
        request.outputs[0].edge = "talker->last"
        received = receive(middle, request)
        await accepted(received)
        thought = receive(thinker, thinking(middle))
        await final.outputs(3)
        await kill(middle)
        for one, reasons in ((thought, {"CONNECTION_LOST", "UNAVAILABLE", "PEER_LOST"}), (final, {"PEER_LOST"})):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await one.task
            assert error_of(caught.value).reason in reasons
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        received.task.cancel()


async def test_rebinding_an_unknown_step_is_not_found() -> None:
    async with stages() as (thinkers, talkers):
        thinker, talker = await thinkers.replica(), await talkers.replica()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await thinker.stub.RebindStep(rebind_output(talker))
        assert error_of(caught.value).reason == "UNKNOWN_STEP"
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND


def _relayed(middle: Replica) -> stage_pb2.ExecuteStepRequest:
    request = talking(middle)
    request.inputs[0].edge = "talker->last"
    return request


async def _whole(thinkers: Stage) -> str:
    """Returns the output of a thinker without any failure."""
    alone = receive(await thinkers.replica(step_s=0.0), step_request())
    await alone.task
    return alone.text


def error_of(error: grpc.aio.AioRpcError) -> StagemeshError:
    return from_rpc_error(error, peer="stage")


def reason_of(error: grpc.aio.AioRpcError) -> str:
    return error_of(error).reason
