"""Each message of a stream in turn dropped, duplicated, swapped or cut off: nothing is lost, repeated or disordered."""

import asyncio
import gc
import itertools
import random
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from typing import Any

import pytest

from stagemesh.common.wire.chunk_sizes import StepPolicy
from stagemesh.conformance import Host
from stagemesh.connectors.data_plane import DataPlane
from stagemesh.connectors.packets import ConsumerAddress, EdgeKey, Packet
from stagemesh.v1 import stage_pb2
from tests.connectors import CONNECTORS
from tests.connectors.contents import is_packet_of, packet_of
from tests.connectors.hosts import started_host
from tests.connectors.relay_faults import CutError, Direction, Fault, Faults, pump, split
from tests.connectors.relays import Relay, relayed

CHUNKS = 50
LIMITS: dict[str, Any] = {"arena_bytes": 256 << 10, "window_bytes": 64 << 10, "inline_limit_bytes": 256}
"""The arena is so small that memory which is freed too early is overwritten soon."""
CHUNK_BYTES = 10_000
HELD = 4
"""Number of packets that a reader keeps before it checks them."""
REQUESTS = {"shm": CHUNKS + 5, "nixl": CHUNKS + 5, "grpc": 5 * CHUNKS + 4}
"""Messages of a flow: two Hello, Offer, OpenEdge, the chunks, End. By grpc: no Offer, and four fragments per chunk."""
AT_ONCE = 20


async def _deliver(consumer: Host, relay: Relay, *, name: str, connector: str) -> None:
    """Sends one flow from a producer of its own and checks every packet, and that no memory stays in use."""
    producer = DataPlane(replica=name, pipeline="p", generation="g", **LIMITS)
    key = EdgeKey(name, "a->b", 1)
    inlet = consumer.plane.open_inlet(key, producer=name)
    outlet = producer.open_outlet(key, ConsumerAddress("b-0", relay.endpoint), connector=connector, policy=StepPolicy())

    async def send() -> None:
        for seq in range(CHUNKS):
            await outlet.send(packet_of(name, seq, CHUNK_BYTES))
        await outlet.finish()

    async def receive() -> None:
        held: deque[Packet] = deque()
        seqs = iter(range(CHUNKS))
        async for got in inlet:
            held.append(got)
            del got
            if len(held) > HELD:
                _check(held.popleft(), name, next(seqs), CHUNK_BYTES)
        while held:
            _check(held.popleft(), name, next(seqs), CHUNK_BYTES)
        assert list(seqs) == []
        await inlet.aclose()

    async with AsyncExitStack() as stack:
        stack.push_async_callback(producer.close)
        async with asyncio.timeout(30):
            await asyncio.gather(send(), receive())
            if _lost_a_lease(relay.faults[name]):
                for session in [each for each in consumer.plane._sessions if each._name == f"replica {name}"]:
                    await session.close()
            while producer.arena.used_bytes:
                gc.collect(0)
                await asyncio.sleep(0.01)


def _check(packet: Packet, name: str, seq: int, size_bytes: int) -> None:
    assert is_packet_of(packet, request=name, seq=seq, size_bytes=size_bytes), f"{seq} is {packet.metadata}"


def _lost_a_lease(faults: Faults) -> bool:
    """Returns whether a message with a lease was lost. If nothing replaces it, the lease ends with the connection.

    Nothing replaces a message that returns leases, or that repeats a chunk which arrives meanwhile.
    """
    if faults.fault is not Fault.DROP:
        return False
    if faults.direction is Direction.REQUESTS:
        return any(item.chunk.data.lease_id for item in stage_pb2.PutChunkRequest.FromString(faults.harmed).items)
    return any(reply.HasField("release") for reply in stage_pb2.PutChunkResponse.FromString(faults.harmed).replies)


def _all(count: int) -> list[int]:
    return list(range(count))


def _some(count: int) -> list[int]:
    """Returns the first and last message indices of a flow, and a few between."""
    return [*range(5), *sorted(random.Random(count).sample(range(5, count - 2), 4)), count - 2, count - 1]


async def _harm_each(fault: Fault, direction: Direction, *, connector: str, chosen: Callable[[int], list[int]]) -> None:
    gate = asyncio.Semaphore(AT_ONCE)

    async def one(index: int) -> None:
        async with gate:
            name = f"{fault.name}-{direction.name}-{index}"
            relay.faults[name] = Faults(fault, direction, index)
            try:
                await _deliver(consumer, relay, name=name, connector=connector)
            except Exception as exc:
                raise AssertionError(f"{name} over {connector}: {exc!r}") from exc

    limits = {**LIMITS, "arena_bytes": 16 << 20}
    async with started_host("b-0", **limits) as consumer, relayed(consumer.endpoint) as relay:
        await _deliver(consumer, relay, name="unharmed", connector=connector)
        # The number of replies to a flow without faults varies with the number of acks per message.
        replies = relay.faults.pop("unharmed").counts[Direction.REPLIES]
        indices = chosen(REQUESTS[connector] if direction is Direction.REQUESTS else replies)
        results = await asyncio.gather(*(one(index) for index in indices), return_exceptions=True)
        assert [result for result in results if result is not None] == []
        if direction is Direction.REQUESTS:
            assert all(faults.struck for faults in relay.faults.values())


@pytest.fixture(autouse=True)
def _quick_to_notice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stagemesh.connectors.peer_timeouts.REOPEN_S", 0.3)
    monkeypatch.setattr("stagemesh.connectors.stream.connection._CHECK_S", 0.1)
    monkeypatch.setattr("stagemesh.connectors.stream.connector_agreement._OFFER_AGAIN_S", 0.3)
    monkeypatch.setattr("stagemesh.connectors.stream.connection._HANDSHAKE_S", 0.5)
    monkeypatch.setattr("stagemesh.connectors.fragments.FRAGMENT_BYTES", 4096)
    monkeypatch.setattr("stagemesh.connectors.fragments.WHOLE_CHUNK_BYTES", 4096)


CASES = list(itertools.product(CONNECTORS, Fault, Direction))
PAIRWISE = [
    (connector, fault, (*Direction,)[(row + column) % 2])
    for row, connector in enumerate(CONNECTORS)
    for column, fault in enumerate(Fault)
]
"""Each fault over each connector, and each of them in each direction."""


@pytest.mark.parametrize(("connector", "fault", "direction"), PAIRWISE)
async def test_fault_of_a_message_is_recovered(connector: str, fault: Fault, direction: Direction) -> None:
    await _harm_each(fault, direction, connector=connector, chosen=_some)


@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("connector", "fault", "direction"), CASES)
async def test_fault_of_any_message_is_recovered(connector: str, fault: Fault, direction: Direction) -> None:
    await _harm_each(fault, direction, connector=connector, chosen=_all)


def _message(n: int) -> bytes:
    return stage_pb2.PutChunkRequest(hello=stage_pb2.Hello(replica=str(n))).SerializeToString()


async def _pumped(faults: Faults, count: int = 4) -> list[int]:
    passed: list[int] = []

    async def source() -> AsyncIterator[bytes]:
        for n in range(count):
            yield _message(n)

    async def sink(message: bytes) -> None:
        passed.append(int(stage_pb2.PutChunkRequest.FromString(message).hello.replica))

    try:
        await pump(source(), sink, faults=faults, direction=Direction.REQUESTS)
    except CutError:
        passed.append(-1)
    return passed


@pytest.mark.parametrize(
    ("fault", "index", "passed"),
    [
        (None, 0, [0, 1, 2, 3]),
        (Fault.DROP, 1, [0, 2, 3]),
        (Fault.DUPLICATE, 1, [0, 1, 1, 2, 3]),
        (Fault.SWAP, 1, [0, 2, 1, 3]),
        (Fault.SWAP, 3, [0, 1, 2, 3]),
        (Fault.CUT, 2, [0, 1, -1]),
    ],
)
async def test_fault_affects_the_named_message(fault: Fault | None, index: int, passed: list[int]) -> None:
    assert await _pumped(Faults(fault, Direction.REQUESTS, index)) == passed


def test_batched_items_are_affected_one_by_one() -> None:
    items = [stage_pb2.PutItem(demand=stage_pb2.CreditDemand(size_bytes=n)) for n in range(3)]
    batch = stage_pb2.PutChunkRequest(hello=stage_pb2.Hello(replica="a"), items=items)
    parts = list(map(stage_pb2.PutChunkRequest.FromString, split(batch.SerializeToString(), Direction.REQUESTS)))
    assert [len(part.items) for part in parts] == [0, 1, 1, 1]
    assert parts[0].hello.replica == "a"
