"""Ids and totals far beyond what a test could count to: none wraps, and none is mistaken for another."""

import asyncio
import itertools
from typing import Any

import pytest
from google.protobuf.descriptor import FieldDescriptor

from stagemesh.connectors.flow import outlet_attempt, sent_chunks
from stagemesh.v1 import chunk_pb2, stage_pb2, tensor_pb2
from tests.connectors.connector_names import CONNECTORS, named
from tests.connectors.contents import is_packet_of, packet_of
from tests.connectors.hosts import Host, open_flow, two_hosts

CHUNKS = 20
SIZE_BYTES = 20_000
WINDOW_BYTES = 1 << 20
LONG_AGO = pytest.mark.parametrize("start", [10**8, 2**32 - CHUNKS // 2, 2**53 - CHUNKS // 2])
"""Counter values after 50 hours, around the limit of 32 bits, and around the exact integers of a double."""
ALL = pytest.mark.parametrize("connector", CONNECTORS)


async def _carry(a: Host, outlet: Any, inlet: Any) -> None:
    async def send() -> None:
        for seq in range(CHUNKS):
            await outlet.send(packet_of("r", seq, SIZE_BYTES))
        await outlet.finish()

    async def receive() -> None:
        for seq in range(CHUNKS):
            assert is_packet_of(await anext(inlet), request="r", seq=seq, size_bytes=SIZE_BYTES)
        assert await anext(inlet, None) is None
        await inlet.aclose()

    await asyncio.gather(send(), receive())
    async with asyncio.timeout(5):
        while a.plane.arena.used_bytes:
            await asyncio.sleep(0.01)


@ALL
@LONG_AGO
async def test_ids_stay_unique_after_many_leases_and_transfers(
    connector: str, start: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with two_hosts() as (a, b):
        outlet, inlet = open_flow(a, b, connector=named(connector))
        (link,) = a.plane._links.values()
        lease_ids, transfer_ids = itertools.count(start + 1), itertools.count(start + 1)
        monkeypatch.setattr(sent_chunks, "_lease_ids", lease_ids)
        monkeypatch.setattr(outlet_attempt, "_transfer_ids", transfer_ids)
        await _carry(a, outlet, inlet)
        assert next(lease_ids) + next(transfer_ids) - 2 == 2 * start + CHUNKS
        assert not link._leases


@ALL
@LONG_AGO
async def test_flow_continues_after_many_chunks_and_bytes(connector: str, start: int) -> None:
    async with two_hosts(window_bytes=WINDOW_BYTES) as (a, b):
        outlet, inlet = open_flow(a, b, connector=named(connector))
        _advance_outlet(outlet, start)
        _advance_inlet(inlet, start)
        await _carry(a, outlet, inlet)
        # The End, too, has a number.
        assert (outlet.chunks.next_seq, inlet.attempt.next_seq) == (start + CHUNKS + 1,) * 2


def _advance_outlet(outlet: Any, start: int) -> None:
    outlet.chunks.next_seq = outlet.chunks.acked = outlet.chunks.sent_bytes = start


def _advance_inlet(inlet: Any, start: int) -> None:
    attempt, credit = inlet.attempt, inlet.attempt._credit
    attempt.next_seq = attempt._reported_seq = credit.received_bytes = credit._consumed_bytes = start
    credit.limit_bytes = credit._reported_bytes = start + WINDOW_BYTES


@pytest.mark.parametrize(
    ("message", "names"),
    [
        (chunk_pb2.Chunk, ["seq"]),
        (chunk_pb2.ChunkData, ["lease_id", "size_bytes"]),
        (chunk_pb2.ChunkFragment, ["transfer_id", "total_bytes", "offset"]),
        (chunk_pb2.ChunkEnd, ["count"]),
        (tensor_pb2.ShmRegion, ["offset", "size_bytes", "generation"]),
        (stage_pb2.EdgeOpened, ["next_seq", "credit_limit_bytes"]),
        (stage_pb2.ChunkAck, ["next_seq"]),
        (stage_pb2.CreditGrant, ["credit_limit_bytes"]),
        (stage_pb2.LeaseRelease, ["lease_ids"]),
        (stage_pb2.Welcome, ["held_lease_ids"]),
    ],
)
def test_counters_on_the_wire_have_64_bits(message: Any, names: list[str]) -> None:
    fields = message.DESCRIPTOR.fields_by_name
    assert {name: fields[name].type for name in names} == dict.fromkeys(names, FieldDescriptor.TYPE_UINT64)
