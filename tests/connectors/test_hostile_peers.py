"""Messages of a broken or hostile producer: they are rejected with a reason, and no other flow is harmed (D7)."""

import asyncio
import gc
import itertools
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, ClassVar

import grpc
import pytest

from stagemesh.common.errors import Code, OverloadedError, StagemeshError, UnavailableError
from stagemesh.common.plugins.connectors import NIXL, ConnectorName
from stagemesh.common.wire.encoding import varint
from stagemesh.conformance import until
from stagemesh.connectors import wire
from stagemesh.connectors.base import ArenaRange, Bytes, Connector, FetchingReader, MemoryAccount, Producer
from stagemesh.connectors.flow import flow_control
from stagemesh.connectors.flow.inlet import Inlet
from stagemesh.connectors.fragments import decode_fragment, first_key
from stagemesh.connectors.packets import EdgeKey
from stagemesh.connectors.wire import key_to_wire
from stagemesh.stage_conformance.content import UNKNOWN_FIELD
from stagemesh.v1 import chunk_pb2, stage_pb2, tensor_pb2
from stagemesh.v1.chunk_pb2 import ChunkData
from tests.connectors.handmade_producers import KEY, Peer, chunk, dialled, hello, open_peer, opening, peer
from tests.connectors.hosts import started_host
from tests.connectors.local_sockets import connect
from tests.rpc.call_errors import error_of

HUGE = (1 << 64) - 1
BUSY_S = 1.0
OTHER, NOBODYS = (KEY._replace(request_id=name) for name in ("other", "?"))


def _tensor(**fields: object) -> ChunkData:
    tensor = tensor_pb2.Tensor(**{"name": "x", "dtype": tensor_pb2.DATA_TYPE_UINT8, "shape": [4], **fields})  # type: ignore[arg-type]
    return ChunkData(tensors=[tensor], size_bytes=4)


def _texts(number: int, length: int) -> ChunkData:
    return ChunkData(metadata={f"{each}": tensor_pb2.TypedValue(text="x" * length) for each in range(number)})


def _put(*items: stage_pb2.PutItem) -> stage_pb2.PutChunkRequest:
    return stage_pb2.PutChunkRequest(items=items)


GOOD, BAD = chunk(data=_tensor(inline=b"1234")), chunk(data=_tensor(inline=b"12345"))


@pytest.mark.parametrize("size_bytes", [2 << 20, HUGE])
async def test_chunk_beyond_all_credit_is_rejected(size_bytes: int) -> None:
    data = _tensor(inline=b"1234")
    data.size_bytes = size_bytes
    async with open_peer() as one:
        await one.put(chunk(data=data))
        assert await one.reason() == "CREDIT_EXCEEDED"


async def test_an_unknown_location_with_a_lease_is_rejected() -> None:
    data = _tensor()
    data.lease_id = 5
    data.tensors[0].MergeFromString(UNKNOWN_FIELD)
    async with open_peer() as one:
        await one.put(chunk(data=data))
        assert await one.reason() == "UNKNOWN_KIND"


async def test_chunks_have_a_credit_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flow_control, "WINDOW_CHUNKS", 4)
    async with open_peer() as one:
        numbers = itertools.count()
        for _ in range(4):
            await one.put(chunk(data=ChunkData(), seq=next(numbers)))
        assert len([await anext(one.inlet) for _ in range(4)]) == 4
        await until(lambda: one.inlet.attempt._credit._reported_chunks == 8, timeout_s=5)
        await one.put(*[chunk(data=ChunkData(), seq=next(numbers)) for _ in range(5)])
        assert await one.reason() == "CREDIT_EXCEEDED"
        (rejection,) = [error async for error in _errors_of(one.inlet)]
    assert "the chunks before 8 were granted" in rejection.message


async def _errors_of(inlet: Inlet) -> AsyncIterator[StagemeshError]:
    try:
        async for _ in inlet:
            pass
    except StagemeshError as exc:
        yield exc


@pytest.mark.parametrize(
    "data",
    [ChunkData(), _texts(64, 1000), ChunkData(tensors=[{"name": "x" * 200, "dtype": 2, "shape": [0]}])],  # type: ignore[list-item]
    ids=["empty", "texts", "long name"],
)
async def test_unread_chunks_without_payload_are_limited(data: ChunkData, monkeypatch: pytest.MonkeyPatch) -> None:
    most, numbers = 200_000 // wire.checked_head(data)[1], itertools.count()
    monkeypatch.setattr(wire, "MAX_OVERHEAD_BYTES", 200_000)
    async with open_peer() as one:
        for _ in range(3):
            await one.put(*[chunk(data=data, seq=next(numbers)) for _ in range(most)])
            for _ in range(most):
                await anext(one.inlet)
        await one.put(*[chunk(data=data, seq=next(numbers)) for _ in range(most + 1)])
        assert await one.reason() == "CREDIT_EXCEEDED"
        assert one.inlet.report().waiting_chunks == most


@pytest.mark.parametrize("many", ["tensors", "metadata", "unknown"])
async def test_a_chunk_of_a_million_elements_is_not_parsed_and_harms_no_other_flow(many: str) -> None:
    content = {"tensors": b"\x0a\0", "metadata": b"\x12\0", "unknown": b"\xfa\x01\0"}[many] * 10**6
    async with open_peer() as one:
        inlet = one.host.plane.open_inlet(OTHER, producer="a-0")
        await one.put(opening(OTHER))
        began_s = time.thread_time()
        await one.put(chunk(data=ChunkData.FromString(content)))
        assert await one.reason() == "INVALID_CHUNK"
        await one.put(chunk(OTHER, data=_tensor(inline=b"1234")))
        assert (await anext(aiter(inlet))).tensors["x"].tobytes() == b"1234"
        assert time.thread_time() - began_s < BUSY_S
        await inlet.aclose()


@pytest.mark.parametrize("place", ["before", "after"])
def test_the_fields_around_a_payload_are_not_walked(place: str) -> None:
    many, payload = b"\x10\1" * 10**6, b"\x2a\x01x"
    fields = many + payload if place == "before" else payload + many
    item = b"\x1a" + varint(len(fields)) + fields
    began_s = time.thread_time()
    assert decode_fragment(b"\x12" + varint(len(item)) + item) is None
    assert time.thread_time() - began_s < BUSY_S


@pytest.mark.parametrize("size_bytes", [0, 9 << 20], ids=["not UTF-8", "too large"])
async def test_a_message_that_cannot_be_received_ends_the_stream_with_the_cause(size_bytes: int) -> None:
    damaged = hello(pipeline="BAD").SerializeToString().replace(b"BAD", b"\xff\xfe\xfd") + bytes(size_bytes)
    options = [("grpc.max_send_message_length", -1)]
    async with started_host("b-0") as host, grpc.aio.insecure_channel(host.endpoint, options=options) as channel:
        make_call: Any = channel.stream_stream
        error = await error_of(make_call("/stagemesh.v1.StageService/PutChunk")(iter([damaged]), timeout=20))
    assert error.code is Code.INVALID_ARGUMENT
    assert error.reason == ("MESSAGE_TOO_LARGE" if size_bytes else "MALFORMED_MESSAGE")
    assert ("9437" if size_bytes else "PutChunkRequest: it is damaged, or a string in it is not UTF-8") in error.message


@pytest.mark.parametrize("data", [b"", b"\x12", b"\x12\0", b"\x12\1\x0f", b"\x12" + b"\xff" * 11])
def test_a_truncated_message_has_no_first_key(data: bytes) -> None:
    assert first_key(data) is None


class _Unread:
    """A message stream whose producer does not read."""

    is_writable = False

    def write(self, data: bytes) -> None:
        """Drops Welcome."""

    def close(self, error: StagemeshError | None = None) -> None:
        """Does nothing, because the test calls `closed`."""


@pytest.mark.parametrize("wait", ["replies", "leases"])
async def test_producer_that_does_not_read_is_disconnected(wait: str) -> None:
    async with started_host("b-0") as host:
        inlet, session = host.plane.open_inlet(KEY, producer="a-0"), host.plane._open_session()
        session.begin(_Unread())
        for message in (hello(), _put(opening(), GOOD)):
            session.received(message.SerializeToString())
        with pytest.raises(OverloadedError, match="replica a-0 does not read its replies"):
            for number in range(1, 40_000, 1000):
                leases = range(number, number + 1000)
                flood = [_chunk(KEY, lease) for lease in leases] if wait == "leases" else [chunk(NOBODYS)] * 1000
                session.received(_put(*flood).SerializeToString())
        assert number < 20_000
        session.closed(None)
        await inlet.aclose()


async def test_state_of_a_producer_is_removed_unless_it_has_a_stream_a_lease_or_a_flow() -> None:
    async with started_host("b-0") as host:
        inlet, leased = host.plane.open_inlet(KEY, producer="a-0"), host.plane._open_session()
        for number in range(5):
            session = leased if number == 1 else host.plane._open_session()
            session.begin(_Unread())
            for message in (hello(replica=f"a-{number}"), _put(*[opening()] * (number == 0))):
                session.received(message.SerializeToString())
            if number == 1:
                session._producer.held_lease_ids.add(1)
            session.closed(None)
        assert {replica for replica, _ in host.plane.consumer._producers} == {"a-0", "a-1", "a-4"}
        await inlet.aclose()
        assert not host.plane.consumer._newest


@pytest.mark.parametrize("field", ["replica", "incarnation", "request_id", "edge"])
async def test_producer_with_an_endless_name_is_rejected(field: str) -> None:
    name = {field: "a" * 257}
    in_key = field in KEY._fields
    async with peer(None if in_key else hello(**name)) as one, asyncio.timeout(5):
        if in_key:
            await one.put(opening(KEY._replace(**name)))  # type: ignore[arg-type]
        with pytest.raises(grpc.aio.AioRpcError, match="256 characters"):
            await one.answer("rejected")


async def test_flow_that_moved_to_another_stream_is_forgotten_when_it_ends() -> None:
    async with peer() as one, dialled(one.host, hello()) as other:
        inlet = one.host.plane.open_inlet(KEY, producer="a-0")
        for each in (one, other):
            await each.put(opening())
            await each.answer("opened")
        moved = [session._moved for session in one.host.plane._sessions]
        await until(lambda: any(moved), timeout_s=5)
        await inlet.aclose()
        await other.answer("rejected")
        del inlet
        gc.collect()
        assert not any(moved)


async def test_reader_of_a_rejected_flow_receives_the_cause() -> None:
    async with open_peer() as one:
        await one.put(BAD)
        with pytest.raises(StagemeshError, match="needs 4 bytes but has 5") as caught:
            await anext(one.inlet)
        assert caught.value.metadata["edge"] == "a->b"


async def test_false_claim_of_the_same_host_is_rejected() -> None:
    async with peer() as one:
        lie = stage_pb2.ArenaAdvertisement(process_id=1, size_bytes=1 << 20, token=b"x" * 16).SerializeToString()
        await one.put(
            stage_pb2.PutItem(offer=stage_pb2.Offer(connector=chunk_pb2.CONNECTOR_SHM, offer=lie, name="shm"))
        )
        assert (await one.answer("offer_answer")).offer_answer.error.reason == "CONNECTOR_UNAVAILABLE"
        one.host.plane.open_inlet(KEY, producer="a-0")
        await one.put(opening(connector=chunk_pb2.CONNECTOR_SHM))
        assert await one.reason() == "CONNECTOR_UNAVAILABLE"


@pytest.mark.parametrize("item", [opening(), chunk(data=_tensor(inline=b"old!"))], ids=["an OpenEdge", "a chunk"])
async def test_earlier_incarnation_cannot_write_into_its_successors_flow(item: stage_pb2.PutItem) -> None:
    async with peer() as former:
        await former.welcome()
        async with dialled(former.host, hello(incarnation="j")) as successor:
            inlet = former.host.plane.open_inlet(KEY, producer="a-0")
            await successor.put(opening())
            await successor.answer("opened")
            await former.put(item)
            assert (await former.answer("rejected")).rejected.error.reason == "STALE_INCARNATION"
            await successor.put(chunk(data=_tensor(inline=b"new!")))
            assert (await anext(aiter(inlet))).tensors["x"].tobytes() == b"new!"
            await inlet.aclose()


class _FailingReader(FetchingReader):
    def __init__(self) -> None:
        self.closing, self.may_close = asyncio.Event(), asyncio.Event()

    async def fetch(self, places: Sequence[ArenaRange], account: MemoryAccount) -> list[Bytes]:
        raise UnavailableError("the network is gone")

    async def close(self) -> None:
        self.closing.set()
        await self.may_close.wait()


class _Failing(Connector):
    name: ClassVar[ConnectorName] = NIXL

    def __init__(self) -> None:
        self.readers: list[_FailingReader] = []
        self.together = asyncio.Barrier(1)

    async def offer(self) -> bytes:
        return b""

    async def connect(self, offer: bytes, producer: Producer) -> FetchingReader:
        self.readers.append(reader := _FailingReader())
        await self.together.wait()
        return reader

    async def close(self) -> None:
        pass


def _chunk(key: EdgeKey, lease_id: int) -> stage_pb2.PutItem:
    tensor = tensor_pb2.Tensor(name="x", dtype=tensor_pb2.DATA_TYPE_UINT8, shape=[4])
    tensor.shm.CopyFrom(tensor_pb2.ShmRegion(offset=1 << 16, size_bytes=4, generation=1))
    return chunk(key, data=ChunkData(tensors=[tensor], size_bytes=4, lease_id=lease_id))


@asynccontextmanager
async def _agreed() -> AsyncIterator[tuple[Peer, _FailingReader]]:
    """Yields two flows by a negotiated connector."""
    async with peer() as one:
        connector = _Failing()
        one.host.plane._connectors._connectors[NIXL] = connector
        inlets = [one.host.plane.open_inlet(key, producer="a-0") for key in (KEY, OTHER)]
        await one.put(OFFER)
        assert not (await one.answer("offer_answer")).offer_answer.HasField("error")
        for key in (KEY, OTHER):
            await one.put(opening(key, chunk_pb2.CONNECTOR_NIXL))
            await one.answer("opened")
        try:
            yield one, connector.readers[0]
        finally:
            connector.readers[0].may_close.set()
            for inlet in inlets:
                await inlet.aclose()


@pytest.mark.parametrize(
    "item", [_chunk(OTHER, 2), opening(OTHER, chunk_pb2.CONNECTOR_NIXL)], ids=["a chunk", "an OpenEdge"]
)
async def test_flow_that_shares_a_failed_reader_is_opened_again(item: stage_pb2.PutItem) -> None:
    async with _agreed() as (one, reader):
        await one.put(_chunk(KEY, 1))
        await reader.closing.wait()
        await one.put(item)
        key = key_to_wire(OTHER)
        verdict = await one.reply(lambda reply: key in (reply.resync.key, reply.rejected.key))
        assert verdict.resync.failed == chunk_pb2.CONNECTOR_NIXL
        await one.put(opening(OTHER))
        assert (await one.answer("opened")).opened.key == key


OFFER = stage_pb2.PutItem(offer=stage_pb2.Offer(connector=chunk_pb2.CONNECTOR_NIXL, name="nixl"))


async def test_repeated_offers_on_two_streams_leave_one_reader_open() -> None:
    async with peer() as one, dialled(one.host, hello()) as other, asyncio.timeout(10):
        one.host.plane._connectors._connectors[NIXL] = connector = _Failing()
        connector.together = asyncio.Barrier(3)
        for each in (one, other):
            await each.put(*[OFFER] * 100)
        await until(lambda: connector.together.n_waiting == 2, timeout_s=5)
        for reader in connector.readers:
            reader.may_close.set()
        await connector.together.wait()
        for each in (one, other):
            await each.answer("offer_answer")
        assert sorted(reader.closing.is_set() for reader in connector.readers) == [False, True]


async def test_reader_that_connects_after_its_producer_was_lost_is_closed() -> None:
    async with peer() as one, asyncio.timeout(10):
        one.host.plane._connectors._connectors[NIXL] = connector = _Failing()
        connector.together = asyncio.Barrier(2)
        await one.put(OFFER)
        await until(lambda: bool(connector.readers), timeout_s=5)
        (producer,) = one.host.plane.consumer._producers.values()
        one.host.plane.consumer.lose(producer)
        await connector.together.wait()
        await connector.readers[0].closing.wait()
        connector.readers[0].may_close.set()
        assert len(connector.readers) == 1


@pytest.mark.parametrize("begun", [b"\0", b"\0\x10"], ids=["a byte", "a part of a message"])
async def test_local_stream_without_hello_ends(begun: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stagemesh.connectors.stream.consumer_session._HELLO_S", 0.1)
    async with started_host("b-0") as host, asyncio.timeout(5):
        with connect(host.plane._listener.name) as silent:
            assert silent.raw.send(begun) == len(begun)
            assert [frame async for frame in silent.frames()] == []
