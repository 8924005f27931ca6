"""Tests that tensors of all kinds arrive complete and in order, and that a slow consumer stops its producer."""

import asyncio
from collections.abc import Sequence

import numpy as np
import pytest

from stagemesh.common.wire.chunk_sizes import WholePolicy
from stagemesh.common.wire.tensors import DTYPES, Array
from stagemesh.conformance.replicas import (
    assert_same,
    exchange,
    open_flow,
    packet,
    receive_all,
    send_all,
    two_hosts,
    until,
)
from stagemesh.conformance.suite import BOUND_S, Suite
from stagemesh.connectors.flow.inlet import Inlet
from stagemesh.connectors.packets import Packet

KIB, MIB = 1 << 10, 1 << 20


def _of_dtype(dtype: str) -> Packet:
    return Packet({"x": np.random.default_rng(1).integers(0, 2, (7, 1001)).astype(DTYPES[dtype])})


_BASE = np.arange(60_000, dtype=np.int32).reshape(200, 300)
_VIEWS: dict[str, Array] = {
    "transposed": _BASE.T,
    "every third": _BASE[::3, 1::2],
    "reversed": _BASE[::-1, ::-1],
    "repeated": np.broadcast_to(_BASE[0], (5, 300)),
    "part": _BASE[10:20],
}
_SMALL_TENSORS: dict[str, Array] = {f"t{n}": np.full(n % 50, n, np.int64) for n in range(1000)}
PACKETS: dict[str, Sequence[Packet]] = {
    **{dtype: [_of_dtype(dtype)] for dtype in DTYPES},
    "scalars and empty tensors": [
        Packet({"scalar": np.array(1.5), "none": np.empty((0, 7), np.int8), "x": np.arange(9)}),
        Packet({"none": np.empty((3, 0, 2), np.float32)}),
        Packet({}, {"only": "metadata"}),
        Packet({"scalar": np.array(7, np.uint8)}),
    ],
    "tensors that are not contiguous": [Packet(_VIEWS), Packet({"part": _BASE[:, 3:]})],
    "a thousand tensors in a chunk": [Packet(_SMALL_TENSORS, {"n": n}) for n in range(3)],
    "many chunks of various sizes": [packet(seq, 1 + seq * 37 % 5000) for seq in range(500)],
}
"""The packets of each tested flow. Each key describes the property that the flow tests."""


class DataSuite(Suite):
    """Tests of one or several flows that transfer tensors of various types, sizes and numbers."""

    @pytest.mark.parametrize("sent", PACKETS.values(), ids=PACKETS)
    async def test_packets_arrive_as_they_were_sent(self, sent: Sequence[Packet]) -> None:
        async with self.hosts() as (a, b):
            assert_same(await self.carry(a, b, sent), sent)

    @pytest.mark.parametrize("size_bytes", [1, 63, 4 * KIB, 4 * KIB + 1, 64 * KIB, MIB - 1, 4 * MIB, 16 * MIB])
    async def test_every_size_arrives(self, size_bytes: int) -> None:
        rng = np.random.default_rng(size_bytes)
        sent = [Packet({"x": rng.integers(0, 256, size_bytes, np.uint8)}) for _ in range(2)]
        async with self.hosts(arena_bytes=48 * MIB) as (a, b):
            assert_same(await self.carry(a, b, sent), sent)

    async def test_eight_requests_at_once_arrive_apart(self) -> None:
        sent = [[packet(1000 * n + seq, 50_000) for seq in range(10)] for n in range(8)]
        async with self.hosts(arena_bytes=4 * MIB, window_bytes=MIB) as (a, b):
            received = await asyncio.gather(*(self.carry(a, b, sent[n], request=f"r{n}") for n in range(8)))
            for got, one in zip(received, sent, strict=True):
                assert_same(got, one)
            await asyncio.gather(a.settled(), b.settled())

    async def test_both_directions_at_once(self) -> None:
        sent = [[packet(1000 * n + seq, 50_000) for seq in range(20)] for n in range(2)]
        async with self.hosts() as (a, b):
            there, back = await asyncio.gather(self.carry(a, b, sent[0]), self.carry(b, a, sent[1], request="back"))
            assert_same(there, sent[0])
            assert_same(back, sent[1])

    async def test_packet_for_two_consumers_is_written_once_and_arrives_at_both(self) -> None:
        sent = [packet(seq, 50_000) for seq in range(10)]
        async with two_hosts(inline_limit_bytes=0) as (_, c), self.hosts() as (a, b):
            fan_out = a.plane.fan_out()
            inlets: list[Inlet] = []
            for consumer in (b, c):
                outlet, inlet = open_flow(a, consumer, request=f"r-{len(inlets)}", connector=self.connector)
                fan_out.add(outlet)
                inlets.append(inlet)
            sender = asyncio.create_task(send_all(fan_out, sent))
            for got in await asyncio.gather(*map(receive_all, inlets)):
                assert_same(got, sent)
            await sender
            assert a.plane.arena.copied_bytes == sum(one.size_bytes for one in sent)
            await a.settled()

    async def test_nothing_is_held_after_the_flow(self) -> None:
        async with self.hosts() as (a, b):
            for n in range(3):
                await self.carry(a, b, [packet(seq, 50_000) for seq in range(20)], request=f"r{n}")
                await asyncio.gather(a.settled(), b.settled())
                assert b.plane.consumer.credit_bytes == 0

    async def test_view_stays_whole_until_it_is_dropped(self) -> None:
        sent = [packet(seq, 60_000) for seq in range(40)]
        async with self.hosts(arena_bytes=4 * MIB, window_bytes=MIB) as (a, b):
            outlet, inlet = open_flow(a, b, connector=self.connector)
            sender = asyncio.create_task(send_all(outlet, sent))
            part = (await anext(aiter(inlet))).tensors["x"][1000:]
            rest = await receive_all(inlet)
            await sender
            assert_same(rest, sent[1:])
            await self.carry(a, b, sent, request="r2")
            assert part.tobytes() == sent[0].tensors["x"][1000:].tobytes()
            del part
            await asyncio.gather(a.settled(), b.settled())

    async def test_slow_consumer_holds_the_producer_back(self) -> None:
        sent = [packet(seq, 50_000) for seq in range(40)]
        async with self.hosts(window_bytes=MIB) as (a, b):
            outlet, inlet = open_flow(a, b, connector=self.connector)
            sender = asyncio.create_task(send_all(outlet, sent))
            await until(lambda: b.plane.consumer.credit_bytes < sent[0].size_bytes, timeout_s=BOUND_S)
            assert outlet.usage.size_bytes <= MIB
            assert not sender.done()
            assert_same(await receive_all(inlet), sent)
            await sender

    async def test_full_arena_is_backpressure(self) -> None:
        sent = [packet(seq, 60_000) for seq in range(30)]
        async with self.hosts(arena_bytes=MIB, window_bytes=MIB) as (a, b):
            assert_same(await self.carry(a, b, sent), sent)

    async def test_chunk_beyond_the_window_is_granted_alone(self) -> None:
        async with self.hosts(window_bytes=MIB) as (a, b):
            outlet, inlet = open_flow(a, b, connector=self.connector, policy=WholePolicy())
            parts = [Packet({"x": np.full(100_000, n, np.float32)}) for n in range(12)]
            received = await exchange(outlet, inlet, parts)
            assert_same(received, [Packet({"x": np.concatenate([part.tensors["x"] for part in parts])})])

    async def test_chunk_of_almost_the_window_follows_a_small_one(self) -> None:
        # After the small chunk is read, the consumer's raise is too small to be sent unless the producer demands it.
        sent = [packet(seq, size) for seq, size in enumerate([30_000, 250_000, 30_000, 250_000, 140_000])]
        async with self.hosts(arena_bytes=4 * MIB, window_bytes=MIB) as (a, b):
            assert_same(await self.carry(a, b, sent), sent)
