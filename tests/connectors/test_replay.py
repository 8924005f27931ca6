"""GetChunk: the chunks that a producer still keeps."""

import asyncio
import weakref

import grpc
import pytest

from stagemesh.common.connector_descriptors import GRPC
from stagemesh.connectors.edge import EdgeKey
from stagemesh.connectors.flow.inlet import Inlet
from stagemesh.connectors.flow.outlet import Outlet
from stagemesh.connectors.stream.wire import key_to_wire
from stagemesh.rpc.channels import open_channel
from stagemesh.v1 import stage_pb2, stage_pb2_grpc
from tests.connectors.hosts import Host, open_flow, packet, two_hosts


async def _get(host: Host, key: EdgeKey, first_seq: int) -> tuple[list[int], int]:
    """Returns the numbers of the replayed chunks, and the bytes that arrived as fragments."""
    seqs, streamed = [], 0
    async with open_channel(host.endpoint) as channel:
        request = stage_pb2.GetChunkRequest(key=key_to_wire(key), first_seq=first_seq)
        async for response in stage_pb2_grpc.StageServiceStub(channel).GetChunk(request):
            if response.HasField("chunk"):
                seqs.append(response.chunk.seq)
            streamed += len(response.fragment.payload)
    return seqs, streamed


async def _carry(outlet: Outlet, inlet: Inlet, count: int) -> None:
    for seq in range(count):
        await outlet.send(packet(seq, 10))
        await anext(aiter(inlet))
    await outlet.finish()
    await inlet.aclose()


async def test_retained_chunks_are_replayed_to_the_end() -> None:
    async with two_hosts() as (a, b):
        outlet, inlet = open_flow(a, b, connector=GRPC)
        for seq in range(3):
            await outlet.send(packet(seq, 300_000))
        follower = asyncio.create_task(_get(a, EdgeKey("r", "a->b", 1), 1))
        await outlet.finish()
        assert await follower == ([1, 2, 3], 2 * 1_200_008)
        assert len([got async for got in inlet]) == 3
        await inlet.aclose()


async def test_evicted_chunk_is_not_found() -> None:
    async with two_hosts(arena_bytes=1 << 20, window_bytes=1 << 20) as (a, b):
        outlet, inlet = open_flow(a, b, connector=GRPC)
        for seq in range(5):
            await outlet.send(packet(seq, 50_000))
            assert (await anext(aiter(inlet))).metadata["seq"] == seq
        await outlet.finish()
        with pytest.raises(grpc.aio.AioRpcError, match="no longer kept"):
            await _get(a, EdgeKey("r", "a->b", 1), 0)


async def test_finished_flow_is_not_found() -> None:
    async with two_hosts() as (a, b):
        first, inlet = open_flow(a, b, connector=GRPC, request="first")
        await _carry(first, inlet, 1)
        known = weakref.ref(first)
        del first, inlet
        for number in range(2):
            await _carry(*open_flow(a, b, connector=GRPC, request=f"r{number}"), 600)
        assert known() is None
