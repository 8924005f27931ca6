"""Producers and consumers of a later version of the contract: added fields, kinds and enum values."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, TypeAlias

import grpc
import numpy as np
import pytest

from stagemesh.common.errors import NotReadyError, StagemeshError
from stagemesh.common.plugins.connectors import SHM
from stagemesh.connectors.packets import EdgeKey, Packet
from stagemesh.connectors.wire import FlowDigest, PacketShape, key_to_wire
from stagemesh.v1 import chunk_pb2, stage_pb2, tensor_pb2
from stagemesh.v1.protocol_pb2 import Protocol
from tests.connectors.handmade_producers import KEY, WIRE_KEY, Peer, chunk, hello, opening, peer
from tests.connectors.test_hostile_consumers import scene
from tests.later_contract import LATER, later, later_class, today

ITEM = stage_pb2.PutItem
REPLY: TypeAlias = stage_pb2.PutReply
OTHER = KEY._replace(request_id="other")
DATA = Packet({"bytes": np.arange(40, dtype=np.uint8)})


@asynccontextmanager
async def _producer(**fields: Any) -> AsyncIterator[Peer]:
    """Yields a producer of the later version. `fields` replaces fields of its Hello."""
    async with peer(today(later(hello(**fields)), stage_pb2.PutChunkRequest)) as one:
        yield one


def _read_today(item: Any) -> ITEM:
    """Returns an item of the later version as today's class, which retains what it does not know."""
    read: ITEM = today(item, ITEM)
    return read


def _open(key: EdgeKey, connector: int = chunk_pb2.CONNECTOR_GRPC) -> ITEM:
    return _read_today(later(opening(key, connector)))


def _data() -> chunk_pb2.ChunkData:
    ((name, tensor),) = DATA.tensors.items()
    sent = tensor_pb2.Tensor(name=name, dtype=tensor_pb2.DATA_TYPE_UINT8, shape=tensor.shape, inline=tensor.tobytes())
    return chunk_pb2.ChunkData(tensors=[sent], size_bytes=tensor.nbytes)


def _rest(key: EdgeKey) -> list[ITEM]:
    """Returns one chunk and the end of an opened flow."""
    digest = FlowDigest()
    digest.add(PacketShape(DATA))
    return [_read_today(later(each)) for each in (chunk(key, data=_data()), chunk(key, seq=1, end=digest.end()))]


def _later_item(key: EdgeKey | None, *, ignorable: bool = False) -> ITEM:
    wire_key = None if key is None else later(key_to_wire(key))
    return _read_today(later_class("PutItem")(later="?", key=wire_key, ignorable=ignorable))


def _later_chunk() -> ITEM:
    return _read_today(later_class("PutItem")(chunk=later_class("Chunk")(key=later(WIRE_KEY), later="?")))


def _later_tensor(*, lease_id: int = 0, **fields: Any) -> ITEM:
    item = later(chunk(data=_data()))
    item.chunk.data.tensors[0].MergeFrom(later_class("Tensor")(**fields))
    item.chunk.data.lease_id = lease_id
    return _read_today(item)


@pytest.mark.parametrize(
    ("item", "reason", "message"),
    [
        (_later_item(KEY), "UNKNOWN_KIND", "sent a PutItem of an unknown kind (field 1000"),
        (_later_chunk(), "UNKNOWN_KIND", "sent a Chunk of an unknown kind (field 1000"),
        (_later_tensor(later="?"), "UNKNOWN_KIND", "sent a Tensor of an unknown kind (field 1000"),
        (_later_tensor(later="?", lease_id=5), "UNKNOWN_KIND", "sent a Tensor of an unknown kind (field 1000"),
        (_later_tensor(dtype=LATER), "INVALID_CHUNK", "dtype 900, which is unknown"),
    ],
    ids=["item", "content", "location", "location with a lease", "dtype"],
)
async def test_a_consumer_refuses_an_unknown_kind_of_one_flow_only(item: ITEM, reason: str, message: str) -> None:
    async with _producer() as producer:
        failing, other = (producer.host.plane.open_inlet(key, producer="a-0") for key in (KEY, OTHER))
        await producer.put(_open(KEY))
        await producer.put(_open(OTHER))
        await producer.put(item)
        error = (await producer.answer("rejected")).rejected.error
        assert (error.reason, message in error.message) == (reason, True), error.message
        with pytest.raises(StagemeshError, match="unknown"):
            await anext(failing)
        await producer.put(*_rest(OTHER))
        assert len([each async for each in other]) == 1
        await failing.aclose()
        await other.aclose()


@pytest.mark.parametrize(
    ("protocol", "older"),
    [
        (Protocol(lowest_version=2, highest_version=3, software="stagemesh 9"), "consumer b-0"),
        (Protocol(), "producer a-0"),
        (Protocol(highest_version=1), "producer a-0"),
    ],
    ids=["newer", "none", "no lowest"],
)
async def test_a_consumer_refuses_a_producer_without_a_common_version(protocol: Protocol, older: str) -> None:
    async with _producer(protocol=protocol) as producer:
        with pytest.raises(grpc.aio.AioRpcError, match=f"producer a-0 speaks .*consumer b-0 speaks .*upgrade {older}"):
            await producer.call.read()


def _replies(message: Any) -> list[REPLY]:
    """Returns a later reply as today's class, which retains what it does not know."""
    return [today(message, REPLY)]


def _later_reply(item: Any, *, ignorable: bool = False) -> list[REPLY]:
    return _replies(later_class("PutReply")(later="?", key=later(item.key), ignorable=ignorable))


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


async def test_a_producer_offers_nothing_to_a_consumer_without_that_feature() -> None:
    async with scene() as it:
        del it.consumer.welcome.welcome.protocol.features[:]
        it.consumer.accepts_offers = [False] * 9
        assert (await it.send("auto", connector="auto")).attempt.connector == "grpc"
        with pytest.raises(NotReadyError, match="does not support offers"):
            await it.send("fixed", connector=SHM)
        assert len(it.consumer.accepts_offers) == 9
