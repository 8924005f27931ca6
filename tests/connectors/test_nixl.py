"""The nixl connector between real processes: on one host, and over tcp between network namespaces."""

import asyncio
import signal
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace

import numpy as np
import psutil
import pytest

from stagemesh.common.errors import InvalidChunkError, NotReadyError
from stagemesh.connectors.arena.arena import Arena, Written
from stagemesh.connectors.base import ArenaRange, MemoryAccount, Producer
from stagemesh.connectors.nixl.connector import NixlConnector, NixlOffer, NixlReader
from stagemesh.connectors.nixl.environment import describe
from stagemesh.connectors.nixl.reads import READ_TIMEOUT_S
from tests.connectors.namespaces import ENVIRONMENT, namespaces
from tests.connectors.nixl_process import Driven, content, nixl_process

KIB, MIB = 1 << 10, 1 << 20
SIZES = [1, 4 * KIB, 64 * KIB - 1, MIB, 16 * MIB]


@asynccontextmanager
async def processes(
    *names: str, tcp: bool = False, arena_bytes: int = 64 * MIB, landing_bytes: int = 64 * MIB
) -> AsyncIterator[list[Driven]]:
    """Runs processes on this host, which share memory unless `tcp` is set."""
    environment = ENVIRONMENT if tcp else {}
    async with AsyncExitStack() as stack:
        started = [
            nixl_process(name, environment=environment, arena_bytes=arena_bytes, landing_bytes=landing_bytes)
            for name in names
        ]
        yield [await stack.enter_async_context(process) for process in started]


@asynccontextmanager
async def hosts() -> AsyncIterator[list[Driven]]:
    """Runs a producer and a consumer on two hosts."""
    with namespaces() as network:
        async with AsyncExitStack() as stack:
            started = [
                nixl_process(name, within=network.within(number), environment=ENVIRONMENT)
                for number, name in enumerate(("a-0", "b-0"))
            ]
            yield [await stack.enter_async_context(process) for process in started]


# -- data


async def test_bytes_arrive_unchanged() -> None:
    async with processes("a-0", "b-0") as (producer, consumer):
        assert "error" not in await consumer.connect(producer)
        for seed, size in enumerate(SIZES):
            assert (await consumer.read(producer, [size], seed=seed))["intact"]


async def test_bytes_arrive_between_hosts() -> None:
    async with hosts() as (producer, consumer):
        assert "error" not in await consumer.connect(producer)
        for seed, size in enumerate(SIZES):
            assert (await consumer.read(producer, [size], seed=seed))["intact"]


@pytest.mark.parametrize("tcp", [False, True])
async def test_many_ranges_of_all_sizes_arrive_in_one_fetch(*, tcp: bool) -> None:
    sizes = [0, 1, 63, 64, 65, 0, 4095, 4096, 4097, 3 * MIB, 7] * 40
    async with processes("a-0", "b-0", tcp=tcp, arena_bytes=256 * MIB, landing_bytes=256 * MIB) as (producer, consumer):
        await consumer.connect(producer)
        assert (await consumer.read(producer, sizes))["intact"]


async def test_fetches_overlap() -> None:
    async with processes("a-0", "b-0", tcp=True) as (producer, consumer):
        await consumer.connect(producer)
        reads = (consumer.read(producer, [64 * KIB, MIB], seed=seed) for seed in range(20))
        assert all(answer["intact"] for answer in await asyncio.gather(*reads))


async def test_fetches_wait_for_landing_memory() -> None:
    async with processes("a-0", "b-0", landing_bytes=4 * MIB) as (producer, consumer):
        await consumer.connect(producer)
        places = (await producer.do("write", sizes=[2 * MIB - 64 * KIB], seed=1))["places"]
        fetch = {"replica": "a-0", "places": places, "seed": 1, "keep": True}
        assert [(await consumer.do("fetch", **fetch))["intact"] for _ in range(2)] == [True, True]
        third = asyncio.create_task(consumer.do("fetch", **fetch))
        assert (await consumer.do("usage"))["landing_bytes"] > 3 * MIB
        assert not third.done()
        await consumer.do("drop")
        assert (await third)["intact"]


async def test_vanished_host_does_not_delay_reads_from_others() -> None:
    with namespaces() as network:
        async with AsyncExitStack() as stack:
            started = [
                nixl_process(name, within=network.within(number), environment=ENVIRONMENT)
                for number, name in enumerate(("a-0", "b-0", "c-0"))
            ]
            near, vanished, consumer = [await stack.enter_async_context(process) for process in started]
            await consumer.connect(near)
            offer = (await vanished.do("offer"))["offer"]
            network.cut(1)
            connecting = asyncio.create_task(consumer.do("connect", offer=offer, replica="b-0"))
            await asyncio.sleep(0)
            assert (await consumer.read(near, [4 * KIB]))["intact"]
            assert not connecting.done(), "the read waited for the connection"
            assert (await connecting)["reason"] == "CONNECTOR_UNAVAILABLE"
            assert (await consumer.do("close"))["took_s"] < READ_TIMEOUT_S


# -- rejected offers and ranges, within one process


@asynccontextmanager
async def connector(name: str) -> AsyncIterator[tuple[NixlConnector, Arena]]:
    """Yields a connector in this process and its arena, which is also its landing memory."""
    arena = Arena(8 * MIB)

    async def landing() -> Arena:
        return arena

    made = NixlConnector(arena, landing=landing, replica=name, incarnation="1")
    try:
        yield made, arena
    finally:
        await made.close()
        arena.close()


@asynccontextmanager
async def connected_reader() -> AsyncIterator[tuple[NixlReader, Arena, Written]]:
    """Yields a reader of an arena, the arena, and the tensors that were written there."""
    async with connector("a-0") as (producer, arena), connector("b-0") as (consumer, _):
        written = await arena.write({"x": content(20_000, 1)}, MemoryAccount())
        yield await consumer.connect(await producer.offer(), Producer("a-0", "1", None)), arena, written


def place_of(written: Written) -> ArenaRange:
    return ArenaRange(written.region.offset, 20_000, written.region.generation)


async def test_reassigned_region_is_not_delivered() -> None:
    async with connected_reader() as (reader, arena, written):
        place = place_of(written)
        written.region.release()
        with pytest.raises(InvalidChunkError) as refused:
            await reader.fetch([place], MemoryAccount())
        assert refused.value.reason == "STALE_REGION"
        again = await arena.write({"x": content(20_000, 2)}, MemoryAccount())
        assert again.region.offset == place.offset
        with pytest.raises(InvalidChunkError):
            await reader.fetch([place_of(again), place], MemoryAccount())
        [view] = await reader.fetch([place_of(again)], MemoryAccount())
        np.testing.assert_array_equal(view, content(20_000, 2))


HUGE = (1 << 64) - 1


@pytest.mark.parametrize(
    "change",
    [
        {"offset": 0},
        {"offset": HUGE},
        {"offset": 8 * MIB, "size_bytes": 8 * MIB},
        {"size_bytes": -1},
        {"size_bytes": HUGE},
        {"generation": 0},
        {"generation": HUGE},
        {"generation": 1 << 64},
    ],
)
async def test_range_outside_the_region_is_rejected(change: dict[str, int]) -> None:
    async with connected_reader() as (reader, _, written):
        with pytest.raises(InvalidChunkError):
            await reader.fetch([place_of(written)._replace(**change)], MemoryAccount())
        assert (await reader.fetch([place_of(written)], MemoryAccount()))[0].nbytes == 20_000


@pytest.mark.parametrize(
    "change",
    [
        {"agent": "c-0/1/ffff"},
        {"metadata": b""},
        {"metadata": b"x" * 500},
        {"token": bytes(16)},
        {"address": 4096},
        {"settings": "UCX_TCP_TX_SEG_SIZE=8k,UCX_TCP_RX_SEG_SIZE=8k"},
        {"agent": "a-0/1/ffff"},
    ],
)
async def test_offer_of_another_arena_is_rejected(change: dict[str, object]) -> None:
    async with connector("a-0") as (producer, _), connector("b-0") as (consumer, _):
        offer = await producer.offer()
        forged = replace(NixlOffer.parse(offer), **change).pack()  # type: ignore[arg-type]
        with pytest.raises(NotReadyError) as refused:
            await consumer.connect(forged, Producer("a-0", "1", None))
        assert refused.value.reason == "CONNECTOR_UNAVAILABLE"
        await consumer.connect(offer, Producer("a-0", "1", None))


@pytest.mark.parametrize("cut", [0, 10, 60, -1])
async def test_garbled_offer_is_rejected(cut: int) -> None:
    async with connector("a-0") as (producer, _), connector("b-0") as (consumer, _):
        offer = await producer.offer()
        for garbled in (offer[:cut], b"\0" + offer[1:]):
            with pytest.raises(NotReadyError):
                await consumer.connect(garbled, Producer("a-0", "1", None))


async def test_closing_twice_is_harmless_and_ends_reading() -> None:
    async with connector("a-0") as (producer, _), connector("b-0") as (consumer, _):
        reader = await consumer.connect(await producer.offer(), Producer("a-0", "1", None))
        for closed in (reader, consumer, producer):
            await closed.close()
            await closed.close()
        with pytest.raises(NotReadyError):
            await producer.offer()


async def test_readers_of_one_arena_share_a_connection() -> None:
    async with connector("a-0") as (producer, arena), connector("b-0") as (consumer, _):
        written = await arena.write({"x": content(20_000, 1)}, MemoryAccount())
        offer, whose = await producer.offer(), Producer("a-0", "1", None)
        first, second = await asyncio.gather(consumer.connect(offer, whose), consumer.connect(offer, whose))
        await first.close()
        assert isinstance(second, NixlReader)
        assert (await second.fetch([place_of(written)], MemoryAccount()))[0].nbytes == 20_000
        await second.close()
        third = await consumer.connect(offer, whose)
        assert isinstance(third, NixlReader)
        assert (await third.fetch([place_of(written)], MemoryAccount()))[0].nbytes == 20_000


def test_description_names_the_transport_and_its_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_TLS", "tcp")
    assert describe() == "tcp (UCX_TLS)"


# -- faults


@pytest.mark.parametrize("tcp", [False, True])
async def test_killed_producer_fails_its_reads_and_no_others(*, tcp: bool) -> None:
    async with processes("a-0", "b-0", "c-0", tcp=tcp) as (producer, consumer, other):
        await consumer.connect(producer)
        await consumer.connect(other)
        places = (await producer.do("write", sizes=[16 * MIB], seed=1))["places"]
        reads = [consumer.do("fetch", replica="a-0", places=places, seed=1) for _ in range(3)]
        under_way = asyncio.gather(*reads)
        producer.signal(signal.SIGKILL)
        await under_way
        answer = await consumer.do("fetch", replica="a-0", places=places, seed=1)
        assert (answer["error"], answer["took_s"] < READ_TIMEOUT_S) == ("UnavailableError", True)
        assert (await consumer.read(other, [MIB]))["intact"]
        assert (await consumer.do("usage"))["landing_bytes"] == 0


@pytest.mark.parametrize("tcp", [False, True])
async def test_killed_consumer_does_not_harm_the_producer(*, tcp: bool) -> None:
    async with processes("a-0", "b-0", "c-0", tcp=tcp) as (producer, consumer, other):
        await consumer.connect(producer)
        places = (await producer.do("write", sizes=[16 * MIB], seed=1))["places"]
        reads = [consumer.do("fetch", replica="a-0", places=places, seed=1) for _ in range(2)]
        under_way = [asyncio.ensure_future(read) for read in reads]
        await asyncio.wait(under_way, return_when=asyncio.FIRST_COMPLETED)
        consumer.signal(signal.SIGKILL)
        for read in under_way:
            read.cancel()
        await other.connect(producer)
        assert (await other.read(producer, [MIB]))["intact"]


async def test_silent_producer_is_abandoned_and_its_landing_memory_retained() -> None:
    async with processes("a-0", "b-0", tcp=True) as (producer, consumer):
        await consumer.connect(producer)
        places = (await producer.do("write", sizes=[8 * MIB], seed=1))["places"]
        offer = (await producer.do("offer"))["offer"]
        assert (await consumer.do("fetch", replica="a-0", places=places, seed=1))["intact"]
        producer.signal(signal.SIGSTOP)
        answer = await consumer.do("fetch", replica="a-0", places=places, seed=1)
        assert answer["error"] == "UnavailableError"
        assert READ_TIMEOUT_S <= answer["took_s"] < READ_TIMEOUT_S + 5
        assert (await consumer.do("usage"))["landing_bytes"] >= 8 * MIB
        # The peer cannot be connected again while a transfer may still write.
        await consumer.do("leave", replica="a-0")
        assert (await consumer.do("connect", offer=offer, replica="a-0"))["reason"] == "CONNECTOR_UNAVAILABLE"
        producer.signal(signal.SIGCONT)
        await until_empty(consumer)
        assert "error" not in await consumer.do("connect", offer=offer, replica="a-0")
        assert (await consumer.do("fetch", replica="a-0", places=places, seed=1))["intact"]


async def until_empty(consumer: Driven) -> None:
    end = time.monotonic() + 5
    while (await consumer.do("usage"))["landing_bytes"]:
        assert time.monotonic() < end, "the landing was never given back"
        await asyncio.sleep(0.01)


async def test_connector_closes_while_a_producer_is_silent() -> None:
    async with processes("a-0", "b-0", tcp=True) as (producer, consumer):
        await consumer.connect(producer)
        places = (await producer.do("write", sizes=[8 * MIB], seed=1))["places"]
        producer.signal(signal.SIGSTOP)
        read = asyncio.create_task(consumer.do("fetch", replica="a-0", places=places, seed=1))
        await asyncio.sleep(0.1)
        assert (await consumer.do("close"))["took_s"] < READ_TIMEOUT_S
        assert (await read)["error"] == "UnavailableError"
        assert (await consumer.do("usage"))["landing_bytes"] == 0


async def test_producer_that_closes_fails_its_reads_and_keeps_running() -> None:
    async with processes("a-0", "b-0", tcp=True) as (producer, consumer):
        await consumer.connect(producer)
        places = (await producer.do("write", sizes=[16 * MIB], seed=1))["places"]
        reads = [asyncio.create_task(consumer.do("fetch", replica="a-0", places=places, seed=1)) for _ in range(3)]
        await producer.do("close")
        assert all(
            answer.get("intact") or answer["error"] == "UnavailableError" for answer in await asyncio.gather(*reads)
        )
        assert (await producer.do("usage"))["cpu_s"] > 0


async def test_restarted_producer_is_another_producer() -> None:
    async with processes("b-0") as (consumer,):
        for seed in range(3):
            async with processes("a-0") as (producer,):
                assert "error" not in await consumer.connect(producer)
                assert (await consumer.read(producer, [MIB], seed=seed))["intact"]


@pytest.mark.parametrize("tcp", [False, True])
async def test_idle_connection_costs_no_processor(*, tcp: bool) -> None:
    async with processes("a-0", "b-0", tcp=tcp) as pair:
        producer, consumer = pair
        await consumer.connect(producer)
        assert (await consumer.read(producer, [MIB]))["intact"]
        # The read's transfers have ended by then.
        await asyncio.sleep(0.5)
        spent = [psutil.Process(each.process.pid).cpu_times() for each in pair]
        await asyncio.sleep(2)
        again = [psutil.Process(each.process.pid).cpu_times() for each in pair]
        assert all(b.user + b.system - a.user - a.system <= 0.1 for a, b in zip(spent, again, strict=True))
