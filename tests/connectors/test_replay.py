"""GetChunk: the chunks that a producer still keeps."""

import asyncio
import weakref

import grpc
import pytest

from stagemesh.common.errors import CancelledRequestError
from stagemesh.common.plugins.connectors import GRPC
from stagemesh.connectors.flow.inlet import Inlet
from stagemesh.connectors.flow.outlet import Outlet
from stagemesh.connectors.packets import EdgeKey
from stagemesh.connectors.wire import key_to_wire
from stagemesh.rpc.channels import open_channel
from stagemesh.v1 import stage_pb2, stage_pb2_grpc
from tests.connectors.hosts import Host, open_flow, packet, two_hosts

_BOUND_S = 20


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


async def _read_all(inlet: Inlet) -> None:
    async for _ in inlet:
        pass


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


@pytest.mark.parametrize("aborted", [False, True])
async def test_an_ended_flow_is_freed_at_once(aborted: bool, no_collector: None) -> None:
    async with two_hosts() as (a, b):
        outlet, inlet = open_flow(a, b, connector=GRPC)
        if aborted:
            await outlet.send(packet(0, 10))
            outlet.abort(CancelledRequestError("by the test"))
            with pytest.raises(CancelledRequestError):
                await _read_all(inlet)
        else:
            await _carry(outlet, inlet, 2)
        sender, receiver = weakref.ref(outlet), weakref.ref(inlet)
        del outlet, inlet
        async with asyncio.timeout(_BOUND_S):
            while sender() or receiver():
                await asyncio.sleep(0)
        with pytest.raises(grpc.aio.AioRpcError, match="no edge a->b of request r"):
            await _get(a, EdgeKey("r", "a->b", 1), 0)
