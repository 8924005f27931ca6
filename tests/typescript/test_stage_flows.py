"""The flows of the stage in TypeScript, as consumer and producer, under the faults of the conformance kit."""

import asyncio
import random
from contextlib import AsyncExitStack

import grpc
import pytest

from stagemesh.common.errors import InvalidRequestError, StagemeshError
from stagemesh.conformance import assert_same, receive_all, send_all
from stagemesh.conformance.fault_suite import proxied
from stagemesh.conformance.replicas import until
from stagemesh.connectors.data_plane import DataPlane
from stagemesh.v1 import chunk_pb2
from tests.connectors.hosts import started_host
from tests.connectors.relay_faults import Direction, Fault, Faults
from tests.connectors.relays import relayed
from tests.typescript.nodes import QUICK
from tests.typescript.stage_harness import chain, inlet_from, outlet_to, text, texts, upper, upper_stage

CHUNKS = 12
CHUNK_BYTES = 20_000


@pytest.mark.parametrize("size_bytes", [0, 1, 4096, 4097, 60_000, 300_000, 3 << 20])
async def test_every_size_arrives(size_bytes: int) -> None:
    async with chain(window_bytes=100_000) as running:
        await running.convey(texts(4, size_bytes))
        (finished,) = [event.finished for event in running.step.events if event.HasField("finished")]
        (edge,) = finished.edges
        assert (edge.connector, edge.chunks, edge.size_bytes) == (chunk_pb2.CONNECTOR_GRPC, 4, 4 * size_bytes)


async def test_chunk_of_almost_the_window_follows_a_small_one() -> None:
    async with chain(window_bytes=64 << 10) as running:
        await running.convey([text(seq, size) for seq, size in enumerate([12_000, 62_000, 12_000, 62_000, 40_000])])


async def test_requests_at_once_arrive_apart() -> None:
    async with upper_stage(*QUICK) as stage, started_host("a-0") as a, started_host("c-0") as c:

        async def run(number: int) -> None:
            name, sent = f"r{number}", texts(20 + number, 7_000)
            inlet = inlet_from(c.plane, name)
            step = await stage.start(name, consumer=c.endpoint)
            outlet = outlet_to(stage.endpoint, a.plane, name)
            _, received = await asyncio.gather(send_all(outlet, sent), receive_all(inlet))
            assert_same(received, upper(sent))
            await step.finished()

        await asyncio.gather(*map(run, range(8)))


@pytest.mark.parametrize("size_bytes", [100, 30_000, 400_000])
async def test_cut_connections_lose_nothing(size_bytes: int) -> None:
    sent = texts(30, size_bytes)
    async with (
        upper_stage(*QUICK) as stage,
        started_host("a-0") as a,
        started_host("c-0") as c,
        proxied(stage.endpoint) as (before, stage_endpoint),
        proxied(c.endpoint) as (behind, consumer_endpoint),
    ):
        for proxy, parts in ((before, (2, 5, 8)), (behind, (1, 4, 9))):
            proxy.cut_at_bytes = [len(sent) * size_bytes * part // 10 for part in parts]
        inlet = inlet_from(c.plane, "r")
        step = await stage.start("r", consumer=consumer_endpoint)
        outlet = outlet_to(stage_endpoint, a.plane, "r")

        async def send() -> None:
            for seq, one in enumerate(sent):
                await outlet.send(one)
                if seq % 6 == 5:
                    (before if seq % 12 == 5 else behind).cut()
            await outlet.finish()

        _, received = await asyncio.gather(send(), receive_all(inlet))
        assert_same(received, upper(sent))
        await step.finished()


@pytest.fixture
def quick_producer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the Python producer notice a lost message early, and send several fragments of each chunk."""
    monkeypatch.setattr("stagemesh.connectors.peer_timeouts.REOPEN_S", 0.3)
    monkeypatch.setattr("stagemesh.connectors.stream.connection._CHECK_S", 0.1)
    monkeypatch.setattr("stagemesh.connectors.stream.connection._HANDSHAKE_S", 0.5)
    monkeypatch.setattr("stagemesh.connectors.fragments.FRAGMENT_BYTES", 8192)
    monkeypatch.setattr("stagemesh.connectors.fragments.WHOLE_CHUNK_BYTES", 8192)


@pytest.mark.parametrize("direction", Direction)
@pytest.mark.parametrize("fault", Fault)
@pytest.mark.usefixtures("quick_producer")
async def test_fault_of_a_message_is_recovered(fault: Fault, direction: Direction) -> None:
    async with (
        upper_stage(*QUICK) as stage,
        started_host("c-0", window_bytes=64 << 10) as c,
        relayed(stage.endpoint) as before,
    ):

        async def run(name: str, *, into: Faults | None = None, out_of: Faults | None = None) -> None:
            """Sends one request by a producer of its own. The faults strike on the way into the stage, or out of it."""
            producer = DataPlane(replica=name, pipeline="p", generation="g", arena_bytes=1 << 20)
            async with AsyncExitStack() as stack:
                stack.push_async_callback(producer.close)
                behind = await stack.enter_async_context(relayed(c.endpoint))
                before.faults[name], behind.faults["m-0"] = into or Faults(), out_of or Faults()
                inlet = inlet_from(c.plane, name)
                step = await stage.start(name, consumer=behind.endpoint, producer=name)
                sent = texts(CHUNKS, CHUNK_BYTES)
                sending = send_all(outlet_to(before.endpoint, producer, name), sent)
                _, received = await asyncio.gather(sending, receive_all(inlet))
                assert_same(received, upper(sent))
                await step.finished()

        unharmed = Faults(), Faults()
        await run("unharmed", into=unharmed[0], out_of=unharmed[1])
        into = [Faults(fault, direction, index) for index in _some(unharmed[0].counts[direction])]
        out_of = [Faults(fault, direction, index) for index in _some(unharmed[1].counts[direction])]
        async with asyncio.timeout(30):
            await asyncio.gather(
                *(run(f"into-{faults.index}", into=faults) for faults in into),
                *(run(f"out-of-{faults.index}", out_of=faults) for faults in out_of),
            )
        if direction is Direction.REQUESTS:
            assert all(faults.struck for faults in (*into, *out_of))


def _some(count: int) -> list[int]:
    """Returns the first and last message indices of a flow, and a few between."""
    return sorted({*range(4), *random.Random(count).sample(range(count), 4), count - 2, count - 1})


async def test_slow_consumer_holds_the_whole_chain_back() -> None:
    sent = texts(40, 20_000)
    async with chain(window_bytes=64 << 10) as running:
        sending = asyncio.create_task(send_all(running.outlet, sent))
        first = await anext(running.inlet)
        # The first packets fill the windows of both consumers. All others wait at the producer.
        await until(lambda: running.c.plane.consumer.credit_bytes < 20_000, timeout_s=10)
        assert running.outlet.usage.size_bytes <= 2 * (64 << 10) + 3 * 20_000
        assert not sending.done()
        assert_same([first, *await receive_all(running.inlet)], upper(sent))
        await sending
        await running.step.finished()


async def test_abort_arrives_after_what_was_sent() -> None:
    async with chain() as running:
        await running.outlet.send(text(0, 50_000))
        running.outlet.abort(InvalidRequestError("the engine refused"))
        assert_same([await anext(running.inlet)], upper([text(0, 50_000)]))
        with pytest.raises(InvalidRequestError, match="the engine refused") as caught:
            await anext(running.inlet)
        assert caught.value.metadata["stage"] == "upper"
        await running.inlet.aclose()
        with pytest.raises(grpc.aio.AioRpcError, match="the engine refused"):
            await running.step.finished()


async def test_consumer_that_stops_reading_stops_the_step() -> None:
    async with chain() as running:
        await running.outlet.send(text(0, 1000))
        await anext(running.inlet)
        await running.inlet.aclose()
        with pytest.raises(StagemeshError, match="stopped reading"):
            await send_all(running.outlet, texts(2000, 1000))
        with pytest.raises(grpc.aio.AioRpcError, match="stopped reading"):
            await running.step.finished()
