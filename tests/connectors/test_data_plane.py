"""One edge between two data planes: behavior that all connectors share. The conformance kit tests the rest."""

import asyncio
import weakref
from dataclasses import replace

import grpc
import numpy as np
import pytest

from stagemesh.common import errors
from stagemesh.common.plugins.connectors import AUTO, GRPC, NIXL, SHM, ConnectorName
from stagemesh.common.wire.chunk_sizes import FramesPolicy, PlayoutPace
from stagemesh.conformance import (
    Host,
    assert_same,
    exchange,
    open_flow,
    packet,
    receive_all,
    send_all,
    two_hosts,
    until,
)
from stagemesh.connectors.flow.inlet import Inlet
from stagemesh.connectors.flow.outlet import Outlet
from stagemesh.connectors.packets import ConsumerAddress, EdgeKey, Packet
from stagemesh.connectors.wire import key_to_wire
from stagemesh.rpc.channels import open_channel
from stagemesh.v1 import stage_pb2, stage_pb2_grpc
from tests.connectors.hosts import flow_of_hosts
from tests.connectors.relays import relayed
from tests.rpc.call_errors import raises

SMALL = {"arena_bytes": 1 << 20, "window_bytes": 1 << 20}
"""Limits of data planes."""


@pytest.mark.parametrize("size", [0, 1, 100, 250])
async def test_small_tensors_arrive_inline(size: int) -> None:
    sent = [packet(seq, size) for seq in range(20)]
    async with flow_of_hosts() as (a, _, outlet, inlet):
        assert_same(await exchange(outlet, inlet, sent), sent)
        assert a.plane.arena.used_bytes == 0


@pytest.mark.parametrize("size", [1, 64], ids=["inline", "in the arena"])
async def test_messages_of_many_chunks_are_within_the_limit_of_fields(size: int) -> None:
    tensors, metadata = {f"x{n}": np.ones((1, size), np.uint8) for n in range(100)}, {f"m{n}": n for n in range(50)}
    sent = [Packet(tensors, metadata)] * 400
    async with flow_of_hosts() as (_, _, outlet, inlet):
        assert_same(await exchange(outlet, inlet, sent), sent)


async def test_request_id_can_be_used_again() -> None:
    async with two_hosts() as (a, b):
        for _ in range(2):
            assert len(await exchange(*open_flow(a, b), [packet(seq) for seq in range(3)])) == 3
            await a.settled()


async def test_chunk_within_the_window_may_exceed_half_the_arena() -> None:
    sent = [packet(seq, 150_000) for seq in range(5)]
    async with two_hosts() as (a, _), two_hosts(**SMALL) as (_, b):
        for connector in (SHM, GRPC):
            assert_same(await exchange(*open_flow(a, b, connector=connector), sent), sent)


@pytest.mark.parametrize("connector", [NIXL, GRPC, AUTO])
async def test_private_arena_transfers_by_every_connector_but_shm(connector: ConnectorName) -> None:
    pytest.importorskip("nixl_cu12")
    sent = [packet(seq, 100_000) for seq in range(20)]
    async with flow_of_hosts({"shared_arena": False}, connector=connector) as (a, b, outlet, inlet):
        assert_same(await exchange(outlet, inlet, sent), sent)
        assert outlet.attempt.connector == (NIXL if connector == AUTO else connector)
        await a.settled()
        await b.settled()


async def test_private_arena_is_refused_with_a_remedy() -> None:
    remedy = r"remove data_plane\.shared_arena"
    async with two_hosts(shared_arena=False) as (a, b):
        with raises(errors.NotReadyError, reason="CONNECTOR_UNAVAILABLE", match=f"arena is private; {remedy}"):
            await a.plane.probe(ConsumerAddress(b.replica, b.endpoint), SHM)
        with raises(errors.NotReadyError, reason="ARENA_NOT_SHARED", match=remedy):
            a.plane.arena.open_partition(1 << 20)


PACE = PlayoutPace(frame_interval_s=0.001, frame_audio_s=0.01, call_costs_s={16: 0.001})
PAUSING = FramesPolicy(16, (2,), pace=PACE)


def _frames(first: int, count: int) -> Packet:
    return Packet({"frames": np.arange(first, first + count, dtype=np.float32)})


@pytest.mark.parametrize("connector", [SHM, GRPC])
async def test_rows_that_wait_are_sent_when_the_producer_pauses(connector: ConnectorName) -> None:
    async with flow_of_hosts(connector=connector, policy=PAUSING) as (_, _, outlet, inlet), asyncio.timeout(10):
        received = aiter(inlet)
        # Two rows form the first chunk. The others would wait for 13 more.
        await outlet.send(_frames(0, 5))
        before = [await anext(received), await anext(received)]
        await outlet.send(_frames(5, 1))
        finishing = asyncio.create_task(outlet.finish())
        after = [each async for each in received]
        await finishing
    assert [len(each.tensors["frames"]) for each in before] == [2, 3]
    assert_same(after, [_frames(5, 1)])


async def test_flow_may_end_while_rows_wait_for_a_pause() -> None:
    policy = FramesPolicy(16, (2,), pace=replace(PACE, frame_audio_s=10.0))
    async with two_hosts() as (a, b):
        finished, aborted = (open_flow(a, b, request=name, policy=policy) for name in ("finished", "aborted"))
        await finished[0].send(_frames(0, 5))
        await aborted[0].send(_frames(0, 5))
        aborted[0].abort(errors.UnavailableError("the engine has failed", reason="ENGINE_FAILED"))
        _, received = await asyncio.gather(finished[0].finish(), receive_all(finished[1]))
        assert [len(each.tensors["frames"]) for each in received] == [2, 3]
        with pytest.raises(errors.StagemeshError, match="the engine has failed"):
            await receive_all(aborted[1])
        await a.settled()


async def test_producer_that_pauses_receives_the_error_that_ended_its_flow() -> None:
    rows = np.zeros((5, 4096), np.float32)
    async with two_hosts() as (a, _), two_hosts(window_bytes=48 << 10) as (_, b), asyncio.timeout(10):
        outlet, inlet = open_flow(a, b, policy=PAUSING)
        # The consumer reads nothing, so that the rows that the pause cuts wait for credit.
        await outlet.send(Packet({"frames": rows}))
        while not outlet.report().wanted_bytes:
            await outlet.chunks.changed.wait()
        sending = asyncio.create_task(outlet.send(Packet({"frames": rows})))
        await inlet.aclose()
        with raises(errors.StagemeshError, reason="NOT_READ"):
            await sending
        await a.settled()


async def test_chunk_larger_than_the_arena_is_rejected_with_a_remedy() -> None:
    async with flow_of_hosts(SMALL) as (_, _, outlet, _):
        with pytest.raises(errors.InvalidRequestError, match="frames"):
            await outlet.send(packet(0, 1_000_000))


async def test_consumer_that_never_answers_fails_the_flow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stagemesh.connectors.peer_timeouts.LOST_CONSUMER_S", 0.2)
    async with flow_of_hosts() as (_, b, outlet, _):
        await b.server.stop(None)
        with pytest.raises(errors.UnavailableError, match="b-0"):
            await send_all(outlet, [packet(0, 10)])


async def test_lost_producer_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stagemesh.connectors.peer_timeouts.LOST_PRODUCER_S", 0.2)
    async with flow_of_hosts() as (a, _, outlet, inlet):
        await outlet.send(packet(0))
        packets = aiter(inlet)
        await anext(packets)
        await a.plane.close()
        with pytest.raises(errors.UnavailableError, match=r"a-0 .* chunk 1 of edge a->b"):
            await anext(packets)


async def test_leases_end_at_a_consumer_that_is_reached_at_two_addresses() -> None:
    async with two_hosts() as (a, b), relayed(b.endpoint) as relay:
        flows = [
            open_flow(a, b, request="direct", connector=SHM),
            open_flow(a, b, request="relayed", connector=SHM, endpoint=relay.endpoint),
        ]
        held = []
        for outlet, inlet in flows:
            await outlet.send(packet(0, 100_000))
            held.append(await anext(inlet))
            finishing = asyncio.create_task(outlet.finish())
            assert await anext(inlet, None) is None
            await finishing
            await inlet.aclose()
        links = list(a.plane._links.values())
        assert [bool(link.leases) for link in links] == [True, True]
        held.clear()
        await until(lambda: not any(link.leases for link in links), timeout_s=5)


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


async def test_retained_chunks_are_replayed_to_the_end() -> None:
    async with flow_of_hosts(connector=GRPC) as (a, _, outlet, inlet):
        for seq in range(3):
            await outlet.send(packet(seq, 300_000))
        follower = asyncio.create_task(_get(a, EdgeKey("r", "a->b", 1), 1))
        await outlet.finish()
        assert await follower == ([1, 2, 3], 2 * 1_200_008)
        assert len([got async for got in inlet]) == 3
        await inlet.aclose()


async def test_evicted_chunk_is_not_found() -> None:
    async with flow_of_hosts(SMALL, connector=GRPC) as (a, _, outlet, inlet):
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
            outlet.abort(errors.CancelledRequestError("by the test"))
            with pytest.raises(errors.CancelledRequestError):
                await receive_all(inlet)
        else:
            await _carry(outlet, inlet, 2)
        sender, receiver = weakref.ref(outlet), weakref.ref(inlet)
        del outlet, inlet
        await until(lambda: not (sender() or receiver()), timeout_s=_BOUND_S)
        with pytest.raises(grpc.aio.AioRpcError, match="no edge a->b of request r"):
            await _get(a, EdgeKey("r", "a->b", 1), 0)
