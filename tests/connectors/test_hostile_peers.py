"""Messages of a broken or hostile producer: they are rejected with a reason, and no other flow is harmed (D7)."""

import grpc
import numpy as np
import pytest

from stagemesh.common.errors import StagemeshError
from stagemesh.common.wire.versions import own_protocol
from stagemesh.connectors.packets import EdgeKey, Packet
from stagemesh.connectors.wire import FlowDigest, PacketShape, fill_inline, fill_metadata, key_to_wire
from stagemesh.rpc.channels import open_channel
from stagemesh.rpc.error_mapping import from_rpc_error
from stagemesh.v1 import chunk_pb2, stage_pb2, stage_pb2_grpc, tensor_pb2
from tests.connectors.handmade_producers import KEY, OPEN, WIRE_KEY, dialled, open_peer, peer
from tests.connectors.hosts import packet

HUGE = (1 << 64) - 1


def _tensor(**fields: object) -> chunk_pb2.ChunkData:
    tensor = tensor_pb2.Tensor(**{"name": "x", "dtype": tensor_pb2.DATA_TYPE_UINT8, "shape": [4], **fields})  # type: ignore[arg-type]
    return chunk_pb2.ChunkData(tensors=[tensor], size_bytes=4)


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(_tensor(inline=b"12345"), id="length against shape"),
        pytest.param(_tensor(inline=b"1234", shape=[5]), id="shape against length"),
        pytest.param(_tensor(inline=b"1234", shape=[-4]), id="negative dimension"),
        pytest.param(_tensor(inline=b"1234", shape=[2**40, 2**40]), id="huge dimensions"),
        pytest.param(_tensor(inline=b"1234", shape=[1] * 40), id="too many dimensions"),
        pytest.param(_tensor(inline=b"1234", dtype=99), id="unknown dtype"),
        pytest.param(_tensor(inline=b"1234", dtype=0), id="no dtype"),
        pytest.param(_tensor(), id="no location"),
        pytest.param(_tensor(shm=tensor_pb2.ShmRegion(offset=0, size_bytes=4)), id="shm that was not agreed on"),
        pytest.param(
            _tensor(streamed=tensor_pb2.StreamedRegion(transfer_id=7, size_bytes=4)), id="pieces that never came"
        ),
        pytest.param(chunk_pb2.ChunkData(size_bytes=9), id="size against tensors"),
        pytest.param(
            chunk_pb2.ChunkData(tensors=[_tensor(inline=b"1234").tensors[0]] * 2, size_bytes=8), id="same name twice"
        ),
        pytest.param(chunk_pb2.ChunkData(tensors=[tensor_pb2.Tensor()] * 10**6), id="a million tensors"),
        pytest.param(chunk_pb2.ChunkData(metadata={"x": tensor_pb2.TypedValue()}), id="unset metadata"),
        pytest.param(chunk_pb2.ChunkData(metadata={"x": tensor_pb2.TypedValue(text="x" * 2000)}), id="long metadata"),
    ],
)
async def test_malformed_chunk_is_rejected(data: chunk_pb2.ChunkData) -> None:
    async with open_peer() as one:
        await one.put_data(data)
        assert await one.reason() in {"INVALID_CHUNK", "FRAGMENT_GAP"}


async def test_sequence_gap_is_rejected() -> None:
    async with open_peer() as one:
        await one.put_data(_tensor(inline=b"1234"), seq=1)
        assert await one.reason() == "SEQUENCE_GAP"


async def test_duplicate_is_dropped_silently() -> None:
    async with open_peer() as one:
        for seq in (0, 0, 1):
            await one.put_data(_tensor(inline=b"1234"), seq=seq)
        while (await one.answer("ack")).ack.next_seq < 2:
            pass
        assert one.inlet.attempt.next_seq == 2


@pytest.mark.parametrize("size_bytes", [2 << 20, HUGE])
async def test_fragment_beyond_the_credit_is_rejected(size_bytes: int) -> None:
    async with open_peer() as one:
        piece = chunk_pb2.ChunkFragment(transfer_id=1, total_bytes=size_bytes, payload=b"x", key=WIRE_KEY)
        await one.put(stage_pb2.PutItem(fragment=piece))
        assert await one.reason() == "CREDIT_EXCEEDED"


@pytest.mark.parametrize("size_bytes", [2 << 20, HUGE])
async def test_chunk_beyond_the_credit_is_rejected(size_bytes: int) -> None:
    async with open_peer() as one:
        data = _tensor(inline=b"1234")
        data.size_bytes = size_bytes
        await one.put_data(data)
        assert await one.reason() == "CREDIT_EXCEEDED"


@pytest.mark.parametrize("size_bytes", [1 << 60, HUGE])
async def test_demand_beyond_the_limit_is_rejected(size_bytes: int) -> None:
    async with open_peer() as one:
        await one.put(stage_pb2.PutItem(demand=stage_pb2.CreditDemand(key=WIRE_KEY, size_bytes=size_bytes)))
        assert await one.reason() == "CHUNK_TOO_LARGE"


@pytest.mark.parametrize(
    ("total_bytes", "offset"), [(100, 50), (100, HUGE), (0, 0)], ids=["gap", "huge offset", "more than its transfer"]
)
async def test_fragment_out_of_order_is_rejected(total_bytes: int, offset: int) -> None:
    async with open_peer() as one:
        for number in range(HUGE - 4, HUGE):
            piece = chunk_pb2.ChunkFragment(
                transfer_id=number, total_bytes=total_bytes, offset=offset, payload=b"x", key=WIRE_KEY
            )
            await one.put(OPEN, stage_pb2.PutItem(fragment=piece))
        assert (await one.answer("rejected")).rejected.error.reason == "FRAGMENT_GAP"


async def test_end_that_describes_other_chunks_is_rejected() -> None:
    async with open_peer() as one:
        await one.put(stage_pb2.PutItem(chunk=chunk_pb2.Chunk(key=WIRE_KEY, end=chunk_pb2.ChunkEnd(count=3))))
        assert await one.reason() == "DIGEST_MISMATCH"


async def test_chunk_of_an_unknown_request_is_rejected() -> None:
    async with open_peer() as one:
        chunk = chunk_pb2.Chunk(
            key=chunk_pb2.EdgeKey(request_id="?", edge="a->b", attempt=1), data=_tensor(inline=b"1234")
        )
        await one.put(stage_pb2.PutItem(chunk=chunk))
        assert await one.reason() == "UNKNOWN_FLOW"


async def test_chunk_of_a_committed_flow_is_answered_with_the_commit() -> None:
    async with open_peer() as one:
        await one.put_data(_tensor(inline=b"1234"))
        digest, inlet = FlowDigest(), one.inlet
        digest.add(PacketShape(Packet({"x": np.zeros(4, np.uint8)})))
        end = stage_pb2.PutItem(chunk=chunk_pb2.Chunk(key=WIRE_KEY, seq=1, end=digest.end()))
        late = stage_pb2.PutItem(chunk=chunk_pb2.Chunk(key=WIRE_KEY, seq=2, data=_tensor(inline=b"5678")))
        await one.put(end, late)
        assert [got.tensors["x"].tobytes() async for got in inlet] == [b"1234"]
        await inlet.aclose()
        assert (await one.answer("commit")).commit.key == WIRE_KEY
        await one.put(late)
        assert (await one.answer("commit")).commit.key == WIRE_KEY


async def test_chunk_of_a_closed_flow_is_rejected() -> None:
    async with open_peer() as one:
        inlet = one.inlet
        await inlet.aclose()
        assert (await one.answer("rejected")).rejected.error.reason == "NOT_READ"
        await one.put_data(_tensor(inline=b"1234"))
        assert (await one.answer("rejected")).rejected.error.reason == "UNKNOWN_FLOW"


async def test_rejected_flow_harms_no_other() -> None:
    async with open_peer() as one:
        other = EdgeKey("other", "a->b", 1)
        inlet = one.host.plane.open_inlet(other, producer="a-0")
        await one.put(stage_pb2.PutItem(open=stage_pb2.OpenEdge(key=key_to_wire(other))))
        await one.put_data(_tensor(inline=b"12345"))
        assert await one.reason() == "INVALID_CHUNK"
        digest, shape = FlowDigest(), PacketShape(packet(0))
        digest.add(shape)
        chunk = chunk_pb2.Chunk(key=key_to_wire(other), seq=0)
        fill_inline(chunk.data, packet(0).tensors, shape)
        fill_metadata(chunk.data, packet(0).metadata)
        await one.put(
            stage_pb2.PutItem(chunk=chunk),
            stage_pb2.PutItem(chunk=chunk_pb2.Chunk(key=key_to_wire(other), seq=1, end=digest.end())),
        )
        assert [got.metadata["seq"] async for got in inlet] == [0]


async def test_reader_of_a_rejected_flow_receives_the_cause() -> None:
    async with open_peer() as one:
        inlet = one.inlet
        await one.put_data(_tensor(inline=b"12345"))
        with pytest.raises(StagemeshError, match="needs 4 bytes but has 5") as caught:
            await anext(inlet)
        assert caught.value.metadata["edge"] == "a->b"


@pytest.mark.parametrize(("field", "reason"), [("generation", "other generation"), ("pipeline", "other pipeline")])
async def test_producer_of_another_deployment_is_rejected(field: str, reason: str) -> None:
    async with peer(**{field: reason}) as one:
        with pytest.raises(grpc.aio.AioRpcError, match=reason) as caught:
            await one.call.read()
        assert from_rpc_error(caught.value, peer="b-0").reason == f"WRONG_{field.upper()}"


async def test_false_claim_of_the_same_host_is_rejected() -> None:
    async with peer() as one:
        lie = stage_pb2.ArenaAdvertisement(process_id=1, size_bytes=1 << 20, token=b"x" * 16).SerializeToString()
        await one.put(stage_pb2.PutItem(offer=stage_pb2.Offer(connector=chunk_pb2.CONNECTOR_SHM, offer=lie)))
        assert (await one.answer("offer_answer")).offer_answer.error.reason == "CONNECTOR_UNAVAILABLE"
        one.host.plane.open_inlet(KEY, producer="a-0")
        await one.put(stage_pb2.PutItem(open=stage_pb2.OpenEdge(key=WIRE_KEY, connector=chunk_pb2.CONNECTOR_SHM)))
        assert await one.reason() == "CONNECTOR_UNAVAILABLE"


@pytest.mark.parametrize(
    "item",
    [OPEN, stage_pb2.PutItem(chunk=chunk_pb2.Chunk(key=WIRE_KEY, data=_tensor(inline=b"old!")))],
    ids=["an OpenEdge", "a chunk"],
)
async def test_earlier_incarnation_cannot_write_into_its_successors_flow(item: stage_pb2.PutItem) -> None:
    async with peer() as former:
        await former.welcomed()
        async with dialled(former.host, incarnation="j") as successor:
            inlet = former.host.plane.open_inlet(KEY, producer="a-0")
            await successor.put(OPEN)
            await successor.answer("opened")
            await former.put(item)
            assert (await former.answer("rejected")).rejected.error.reason == "STALE_INCARNATION"
            await successor.put_data(_tensor(inline=b"new!"))
            assert (await anext(aiter(inlet))).tensors["x"].tobytes() == b"new!"
            await inlet.aclose()


async def test_failed_flow_is_not_accepted_again() -> None:
    async with open_peer() as one:
        await one.put_data(_tensor(inline=b"12345"))
        assert await one.reason() == "INVALID_CHUNK"
        await one.put(OPEN)
        assert await one.reason() == "INVALID_CHUNK"


@pytest.mark.parametrize("hello", [{"replica": "a-0"}, {"incarnation": "i"}], ids=str)
async def test_producer_without_identity_is_rejected(hello: dict[str, str]) -> None:
    async with peer() as one, open_channel(one.host.endpoint) as channel:
        call = stage_pb2_grpc.StageServiceStub(channel).PutChunk()
        message = stage_pb2.Hello(pipeline="p", generation="g", protocol=own_protocol(), **hello)
        await call.write(stage_pb2.PutChunkRequest(hello=message))
        with pytest.raises(grpc.aio.AioRpcError, match="name the producer and its incarnation"):
            await call.read()
