"""The nixl connector between real processes: on one host, and over tcp between network namespaces."""

import asyncio
import signal
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from typing import Any

import psutil
import pytest

from stagemesh.common.errors import NotReadyError
from stagemesh.common.plugins.connectors import NIXL
from stagemesh.conformance.replicas import End
from stagemesh.connectors.base import Producer
from stagemesh.connectors.nixl.connector import NixlConnector, NixlOffer
from stagemesh.connectors.nixl.environment import describe
from stagemesh.connectors.nixl.reads import READ_TIMEOUT_S
from tests.connectors.namespaces import ENVIRONMENT, Namespaces, namespaces
from tests.connectors.nixl_process import nixl_process
from tests.connectors.replicas import Replica, ReplicaError
from tests.rpc.call_errors import raises

KIB, MIB = 1 << 10, 1 << 20


@asynccontextmanager
async def processes(*names: str, tcp: bool = False, **limits: Any) -> AsyncIterator[list[Replica]]:
    """Runs processes on this host, which share memory unless `tcp` is set. `limits` are for `nixl_process`."""
    async with AsyncExitStack() as stack:
        started = [nixl_process(name, environment=ENVIRONMENT if tcp else {}, **limits) for name in names]
        yield [await stack.enter_async_context(process) for process in started]


@asynccontextmanager
async def connected(*others: str, **options: Any) -> AsyncIterator[list[Replica]]:
    """Runs the producer "a-0", the consumer "b-0", which has connected to it, and others, as `processes` does."""
    async with processes("a-0", "b-0", *others, **options) as started:
        producer, consumer, *_ = started
        await connect(consumer, producer)
        yield started


@asynccontextmanager
async def hosts(*names: str) -> AsyncIterator[tuple[Namespaces, list[Replica]]]:
    """Runs each process on its own host."""
    with namespaces() as network:
        async with AsyncExitStack() as stack:
            started = [
                nixl_process(name, within=network.within(number), environment=ENVIRONMENT)
                for number, name in enumerate(names)
            ]
            yield network, [await stack.enter_async_context(process) for process in started]


async def connect(consumer: Replica, producer: Replica) -> None:
    """Connects to another process by its offer."""
    await consumer.call("connect", offer=await producer.call("offer"), replica=producer.name)


async def write(producer: Replica, sizes: Sequence[int], *, seed: int = 1) -> dict[str, Any]:
    """Makes the producer write. Returns the arguments with which a consumer fetches the bytes."""
    return {"replica": producer.name, "places": await producer.call("write", sizes=sizes, seed=seed), "seed": seed}


async def read(consumer: Replica, producer: Replica, sizes: Sequence[int], *, seed: int = 1) -> bool:
    """Makes the producer write, and fetches the bytes. Returns whether they are intact."""
    return bool(await consumer.call("fetch", **await write(producer, sizes, seed=seed)))


# -- data


async def test_bytes_arrive_between_hosts() -> None:
    async with hosts("a-0", "b-0") as (_, (producer, consumer)):
        await connect(consumer, producer)
        for seed, size in enumerate((1, 4 * KIB, 64 * KIB - 1, MIB, 16 * MIB)):
            assert await read(consumer, producer, [size], seed=seed)


@pytest.mark.parametrize("tcp", [False, True])
async def test_many_ranges_of_all_sizes_arrive_in_one_fetch(*, tcp: bool) -> None:
    sizes = [0, 1, 63, 64, 65, 0, 4095, 4096, 4097, 3 * MIB, 7] * 40
    async with connected(tcp=tcp, arena_bytes=256 * MIB, landing_bytes=256 * MIB) as (producer, consumer):
        assert await read(consumer, producer, sizes)


async def test_fetches_overlap() -> None:
    async with connected(tcp=True) as (producer, consumer):
        assert all(await asyncio.gather(*(read(consumer, producer, [64 * KIB, MIB], seed=seed) for seed in range(20))))


async def test_fetches_wait_for_landing_memory() -> None:
    async with connected(landing_bytes=4 * MIB) as (producer, consumer):
        fetch = {**await write(producer, [2 * MIB - 64 * KIB]), "keep": True}
        assert [await consumer.call("fetch", **fetch) for _ in range(2)] == [True, True]
        third = consumer.start("fetch", **fetch)
        assert await consumer.call("landing_bytes") > 3 * MIB
        assert not third.done()
        await consumer.call("drop")
        assert await third


async def test_vanished_host_does_not_delay_reads_from_others() -> None:
    async with hosts("a-0", "b-0", "c-0") as (network, (near, vanished, consumer)):
        await connect(consumer, near)
        offer = await vanished.call("offer")
        network.cut(1)
        connecting = consumer.start("connect", offer=offer, replica="b-0")
        await asyncio.sleep(0)
        assert await read(consumer, near, [4 * KIB])
        assert not connecting.done(), "the read waited for the connection"
        with pytest.raises(ReplicaError, match=" CONNECTOR_UNAVAILABLE: "):
            await connecting
        async with asyncio.timeout(READ_TIMEOUT_S):
            await consumer.call("close")


# -- rejected offers, within one process


@asynccontextmanager
async def connector(name: str) -> AsyncIterator[NixlConnector]:
    """Yields a connector in this process."""
    end = End(NIXL, replica=name)
    assert isinstance(end.connector, NixlConnector)
    yield end.connector
    await end.close()


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
    async with connector("a-0") as producer, connector("b-0") as consumer:
        offer = await producer.offer()
        forged = replace(NixlOffer.parse(offer), **change).pack()  # type: ignore[arg-type]
        with raises(NotReadyError, reason="CONNECTOR_UNAVAILABLE"):
            await consumer.connect(forged, Producer("a-0", "1", None))
        await consumer.connect(offer, Producer("a-0", "1", None))


async def test_closed_connector_makes_no_offer() -> None:
    async with connector("a-0") as producer:
        await producer.close()
        with pytest.raises(NotReadyError):
            await producer.offer()


def test_description_names_the_transport_and_its_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_TLS", "tcp")
    assert describe() == "tcp (UCX_TLS)"


# -- faults


@pytest.mark.parametrize("tcp", [False, True])
async def test_killed_producer_fails_its_reads_and_no_others(*, tcp: bool) -> None:
    async with connected("c-0", tcp=tcp) as (producer, consumer, other):
        await connect(consumer, other)
        fetch = await write(producer, [16 * MIB])
        reads = [consumer.start("fetch", **fetch) for _ in range(3)]
        producer.kill()
        await asyncio.gather(*reads, return_exceptions=True)
        async with asyncio.timeout(READ_TIMEOUT_S):
            await fails(consumer, **fetch)
        assert await read(consumer, other, [MIB])
        assert await consumer.call("landing_bytes") == 0


@pytest.mark.parametrize("tcp", [False, True])
async def test_killed_consumer_does_not_harm_the_producer(*, tcp: bool) -> None:
    async with connected("c-0", tcp=tcp) as (producer, consumer, other):
        fetch = await write(producer, [16 * MIB])
        reads = [consumer.start("fetch", **fetch) for _ in range(2)]
        await asyncio.wait(reads, return_when=asyncio.FIRST_COMPLETED)
        consumer.kill()
        await asyncio.gather(*reads, return_exceptions=True)
        await connect(other, producer)
        assert await read(other, producer, [MIB])


async def test_silent_producer_is_abandoned_and_its_landing_memory_retained() -> None:
    async with connected(tcp=True) as (producer, consumer):
        fetch = await write(producer, [8 * MIB])
        offer = await producer.call("offer")
        assert await consumer.call("fetch", **fetch)
        producer.signal(signal.SIGSTOP)
        began_s = time.monotonic()
        await fails(consumer, **fetch)
        assert READ_TIMEOUT_S <= time.monotonic() - began_s < READ_TIMEOUT_S + 5
        assert await consumer.call("landing_bytes") >= 8 * MIB
        # The peer cannot be connected again while a transfer may still write.
        await consumer.call("leave", replica="a-0")
        with pytest.raises(ReplicaError, match=" CONNECTOR_UNAVAILABLE: "):
            await consumer.call("connect", offer=offer, replica="a-0")
        producer.signal(signal.SIGCONT)
        await consumer.wait("landing_bytes", lambda size_bytes: size_bytes == 0, timeout_s=5.0)
        await consumer.call("connect", offer=offer, replica="a-0")
        assert await consumer.call("fetch", **fetch)


async def fails(consumer: Replica, **fetch: object) -> None:
    with pytest.raises(ReplicaError, match=r"^UnavailableError "):
        await consumer.call("fetch", **fetch)


async def test_connector_closes_while_a_producer_is_silent() -> None:
    async with connected(tcp=True) as (producer, consumer):
        fetch = await write(producer, [8 * MIB])
        producer.signal(signal.SIGSTOP)
        reading = asyncio.create_task(fails(consumer, **fetch))
        await asyncio.sleep(0.1)
        async with asyncio.timeout(READ_TIMEOUT_S):
            await consumer.call("close")
        await reading
        assert await consumer.call("landing_bytes") == 0


async def test_producer_that_closes_fails_its_reads_and_keeps_running() -> None:
    async with connected(tcp=True) as (producer, consumer):
        fetch = await write(producer, [16 * MIB])
        reads = [consumer.start("fetch", **fetch) for _ in range(3)]
        await producer.call("close")
        for ended in await asyncio.gather(*reads, return_exceptions=True):
            assert ended is True or (isinstance(ended, ReplicaError) and ended.kind == "UnavailableError")
        assert await producer.call("landing_bytes") == 0


async def test_restarted_producer_is_another_producer() -> None:
    async with processes("b-0") as (consumer,):
        for seed in range(3):
            async with processes("a-0") as (producer,):
                await connect(consumer, producer)
                assert await read(consumer, producer, [MIB], seed=seed)


@pytest.mark.parametrize("tcp", [False, True])
async def test_idle_connection_costs_no_processor(*, tcp: bool) -> None:
    async with connected(tcp=tcp) as pair:
        producer, consumer = pair
        assert await read(consumer, producer, [MIB])
        # The read's transfers have ended by then.
        await asyncio.sleep(0.5)
        spent = [psutil.Process(each.process_id).cpu_times() for each in pair]
        await asyncio.sleep(2)
        again = [psutil.Process(each.process_id).cpu_times() for each in pair]
        assert all(b.user + b.system - a.user - a.system <= 0.1 for a, b in zip(spent, again, strict=True))
