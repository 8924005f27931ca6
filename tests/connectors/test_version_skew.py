"""Producers and consumers of a later version of the contract: added fields, kinds and enum values."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, TypeAlias

import grpc
import numpy as np
import pytest

from stagemesh.common.errors import NotReadyError, StagemeshError
from stagemesh.common.plugins.connectors import SHM
from stagemesh.common.wire.versions import own_protocol
from stagemesh.connectors.packets import EdgeKey, Packet
from stagemesh.connectors.wire import FlowDigest, PacketShape, key_to_wire
from stagemesh.rpc.channels import open_channel
from stagemesh.rpc.message_streams import PUT_CHUNK
from stagemesh.v1 import chunk_pb2, stage_pb2, tensor_pb2
from stagemesh.v1.protocol_pb2 import Protocol
from tests.connectors.hosts import Host
from tests.connectors.test_hostile_consumers import opened, scene
from tests.later_contract import LATER, later, later_class, today

ITEM = stage_pb2.PutItem
REPLY: TypeAlias = stage_pb2.PutReply
DATA = Packet({"bytes": np.arange(40, dtype=np.uint8)})


class LaterProducer:
    """A producer of the later version, connected to a real consumer by gRPC."""

    def __init__(self, host: Host, call: Any) -> None:
        self.host, self.call = host, call

    async def put(self, *items: Any) -> None:
        await self.call.write(later_class("PutChunkRequest")(items=items))

    async def open(self, key: EdgeKey, **fields: Any) -> None:
        opening = later(ITEM(open=stage_pb2.OpenEdge(key=key_to_wire(key), connector=chunk_pb2.CONNECTOR_GRPC)))
        opening.open.MergeFrom(later_class("OpenEdge")(**fields))
        await self.put(opening)

    async def finish(self, key: EdgeKey) -> None:
        """Sends one chunk and the end of an opened flow."""
        shape, digest = PacketShape(DATA), FlowDigest()
        digest.add(shape)
        first = chunk_pb2.Chunk(key=key_to_wire(key), data=_data())
        last = chunk_pb2.Chunk(key=key_to_wire(key), seq=1, end=digest.end())
        await self.put(later(ITEM(chunk=first)), later(ITEM(chunk=last)))

    async def rejection(self) -> chunk_pb2.Error:
        """Returns the error of the next rejected flow."""
        while (response := await self.call.read()) is not grpc.aio.EOF:
            for reply in response.replies:
                if reply.HasField("rejected"):
                    error: chunk_pb2.Error = today(reply.rejected.error, chunk_pb2.Error)
                    return error
        raise AssertionError(await self.call.details())


def _data() -> chunk_pb2.ChunkData:
    ((name, tensor),) = DATA.tensors.items()
    message = tensor_pb2.Tensor(
        name=name, dtype=tensor_pb2.DATA_TYPE_UINT8, shape=tensor.shape, inline=tensor.tobytes()
    )
    return chunk_pb2.ChunkData(tensors=[message], size_bytes=tensor.nbytes)


@asynccontextmanager
async def _producer(protocol: Protocol | None = None) -> AsyncIterator[LaterProducer]:
    host = await Host.started("b-0")
    try:
        async with open_channel(host.endpoint) as channel:
            call: Any = channel.stream_stream(
                PUT_CHUNK,
                later_class("PutChunkRequest").SerializeToString,
                later_class("PutChunkResponse").FromString,
            )()
            hello = stage_pb2.Hello(
                replica="a-0", incarnation="i", pipeline="p", generation="g", protocol=protocol or own_protocol()
            )
            await call.write(later(stage_pb2.PutChunkRequest(hello=hello)))
            yield LaterProducer(host, call)
            call.cancel()
    finally:
        await host.close()


def _key(request: str) -> EdgeKey:
    return EdgeKey(request, "a->b", 1)


def _later_item(key: EdgeKey | None, *, ignorable: bool = False) -> Any:
    return later_class("PutItem")(later="?", key=None if key is None else later(key_to_wire(key)), ignorable=ignorable)


async def test_a_consumer_ignores_added_fields_and_ignorable_kinds() -> None:
    async with _producer() as producer:
        inlet = producer.host.plane.open_inlet(_key("r"), producer="a-0")
        await producer.open(_key("r"))
        await producer.put(_later_item(_key("r"), ignorable=True), _later_item(None, ignorable=True))
        await producer.finish(_key("r"))
        assert [each.size_bytes async for each in inlet] == [DATA.size_bytes]
        await inlet.aclose()


def _later_chunk() -> Any:
    return later_class("PutItem")(chunk=later_class("Chunk")(key=later(key_to_wire(_key("r"))), later="?"))


def _later_location(*, lease_id: int = 0) -> Any:
    item = later(ITEM(chunk=chunk_pb2.Chunk(key=key_to_wire(_key("r")), data=_data())))
    item.chunk.data.tensors[0].later = "elsewhere"
    item.chunk.data.lease_id = lease_id
    return item


def _later_dtype() -> Any:
    item = later(ITEM(chunk=chunk_pb2.Chunk(key=key_to_wire(_key("r")), data=_data())))
    item.chunk.data.tensors[0].dtype = LATER
    return item


@pytest.mark.parametrize(
    ("make", "reason", "message"),
    [
        (lambda: _later_item(_key("r")), "UNKNOWN_KIND", "sent a PutItem of an unknown kind (field 1000"),
        (_later_chunk, "UNKNOWN_KIND", "sent a Chunk of an unknown kind (field 1000"),
        (_later_location, "UNKNOWN_KIND", "sent a Tensor of an unknown kind (field 1000"),
        (lambda: _later_location(lease_id=5), "UNKNOWN_KIND", "sent a Tensor of an unknown kind (field 1000"),
        (_later_dtype, "INVALID_CHUNK", "unknown dtype 900"),
    ],
    ids=["item", "content", "location", "location with a lease", "dtype"],
)
async def test_a_consumer_refuses_an_unknown_kind_of_one_flow_only(
    make: Callable[[], Any], reason: str, message: str
) -> None:
    async with _producer() as producer:
        failing = producer.host.plane.open_inlet(_key("r"), producer="a-0")
        other = producer.host.plane.open_inlet(_key("other"), producer="a-0")
        await producer.open(_key("r"))
        await producer.open(_key("other"))
        await producer.put(make())
        error = await producer.rejection()
        assert (error.reason, message in error.message) == (reason, True), error.message
        with pytest.raises(StagemeshError, match="unknown"):
            await anext(failing)
        await producer.finish(_key("other"))
        assert len([each async for each in other]) == 1
        await failing.aclose()
        await other.aclose()


async def test_a_consumer_refuses_an_unknown_connector() -> None:
    async with _producer() as producer:
        inlet = producer.host.plane.open_inlet(_key("r"), producer="a-0")
        await producer.open(_key("r"), connector=LATER)
        assert "900 is unknown" in (await producer.rejection()).message
        await inlet.aclose()


async def test_a_consumer_ends_the_stream_at_an_unknown_kind_without_a_flow() -> None:
    async with _producer() as producer:
        await producer.put(_later_item(None))
        with pytest.raises(grpc.aio.AioRpcError, match="a-0 sent a PutItem of an unknown kind") as caught:
            while await producer.call.read() is not grpc.aio.EOF:
                pass
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


@pytest.mark.parametrize(
    ("protocol", "older"),
    [
        (Protocol(lowest_version=2, highest_version=3, software="stagemesh 9"), "consumer b-0"),
        (Protocol(), "producer a-0"),
    ],
    ids=["newer", "none"],
)
async def test_a_consumer_refuses_a_producer_without_a_common_version(protocol: Protocol, older: str) -> None:
    async with _producer(protocol) as producer:
        with pytest.raises(grpc.aio.AioRpcError, match=f"producer a-0 speaks .*consumer b-0 speaks .*upgrade {older}"):
            await producer.call.read()


def _replies(message: Any) -> list[REPLY]:
    """Returns a later reply as today's class, which retains what it does not know."""
    return [today(message, REPLY)]


def _later_reply(item: Any, *, ignorable: bool = False) -> list[REPLY]:
    return _replies(later_class("PutReply")(later="?", key=later(item.key), ignorable=ignorable))


async def test_a_producer_ignores_added_fields_and_ignorable_kinds() -> None:
    async with scene() as it:
        it.consumer.welcome = today(later(it.consumer.welcome), stage_pb2.PutChunkResponse)
        it.consumer.answers["open"] = lambda item: [
            *_later_reply(item, ignorable=True),
            *_replies(later(opened(item)[0])),
        ]
        assert (await it.send()).usage.chunks == 3


async def test_a_producer_fails_one_flow_at_an_unknown_kind() -> None:
    async with scene() as it:
        it.consumer.answers["chunk"] = _later_reply
        with pytest.raises(StagemeshError, match=r"b-0 at .* sent a PutReply of an unknown kind \(field 1000\)"):
            await it.send()
        assert (await it.send("other")).usage.chunks == 3
        assert it.consumer.connections == 1


async def test_a_producer_ends_the_stream_at_an_unknown_kind_without_a_flow() -> None:
    async with scene() as it:
        it.consumer.answers["chunk"] = lambda _: _replies(later_class("PutReply")(later="?"))
        with pytest.raises(StagemeshError, match="sent a PutReply of an unknown kind"):
            await it.send()
        it.consumer.answers.clear()
        assert (await it.send()).usage.chunks == 3
        assert it.consumer.connections == 2


async def test_a_producer_refuses_a_consumer_without_a_common_version() -> None:
    async with scene() as it:
        it.consumer.welcome.welcome.protocol.CopyFrom(Protocol(lowest_version=2, highest_version=2))
        with pytest.raises(NotReadyError, match="speaks wire versions 2 to 2, but producer a-0 speaks") as caught:
            await it.send()
    assert caught.value.reason == "NO_COMMON_VERSION"
    assert "upgrade producer a-0" in caught.value.message


async def test_a_producer_offers_nothing_to_a_consumer_without_that_feature() -> None:
    async with scene() as it:
        del it.consumer.welcome.welcome.protocol.features[:]
        it.consumer.accepts_offers = [False] * 9
        assert (await it.send("auto", connector="auto")).attempt.connector == "grpc"
        with pytest.raises(NotReadyError, match="does not support offers"):
            await it.send("fixed", connector=SHM)
        assert len(it.consumer.accepts_offers) == 9
