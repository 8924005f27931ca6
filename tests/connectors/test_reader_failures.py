"""A reader that fails while several flows use it: each is opened again by another connector, none is rejected."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import ClassVar

import pytest

from stagemesh.common.errors import UnavailableError
from stagemesh.common.plugins.connectors import NIXL, ConnectorName
from stagemesh.connectors.base import ArenaRange, Bytes, Connector, FetchingReader, MemoryAccount, Producer
from stagemesh.connectors.packets import EdgeKey
from stagemesh.connectors.wire import key_to_wire
from stagemesh.v1 import chunk_pb2, stage_pb2, tensor_pb2
from tests.connectors.handmade_producers import KEY, Peer, peer

OTHER = KEY._replace(request_id="other")


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
        self.reader = _FailingReader()

    async def offer(self) -> bytes:
        return b""

    async def connect(self, offer: bytes, producer: Producer) -> FetchingReader:
        return self.reader

    async def close(self) -> None:
        pass


def _open(key: EdgeKey, connector: "chunk_pb2.Connector.ValueType" = chunk_pb2.CONNECTOR_NIXL) -> stage_pb2.PutItem:
    return stage_pb2.PutItem(open=stage_pb2.OpenEdge(key=key_to_wire(key), connector=connector))


def _chunk(key: EdgeKey, lease_id: int) -> stage_pb2.PutItem:
    tensor = tensor_pb2.Tensor(name="x", dtype=tensor_pb2.DATA_TYPE_UINT8, shape=[4])
    tensor.shm.CopyFrom(tensor_pb2.ShmRegion(offset=1 << 16, size_bytes=4, generation=1))
    data = chunk_pb2.ChunkData(tensors=[tensor], size_bytes=4, lease_id=lease_id)
    return stage_pb2.PutItem(chunk=chunk_pb2.Chunk(key=key_to_wire(key), data=data))


@asynccontextmanager
async def _agreed() -> AsyncIterator[tuple[Peer, _FailingReader]]:
    """Yields two flows by a negotiated connector."""
    async with peer() as one:
        connector = _Failing()
        one.host.plane._connectors._connectors[NIXL] = connector
        inlets = [one.host.plane.open_inlet(key, producer="a-0") for key in (KEY, OTHER)]
        await one.put(stage_pb2.PutItem(offer=stage_pb2.Offer(connector=chunk_pb2.CONNECTOR_NIXL)))
        assert not (await one.answer("offer_answer")).offer_answer.HasField("error")
        for key in (KEY, OTHER):
            await one.put(_open(key))
            await one.answer("opened")
        try:
            yield one, connector.reader
        finally:
            connector.reader.may_close.set()
            for inlet in inlets:
                await inlet.aclose()


async def _verdict(one: Peer, key: EdgeKey) -> stage_pb2.PutReply:
    """Returns the next reply to a flow that asks to open it again or ends it."""
    while True:
        response = await one.call.read()
        assert isinstance(response, stage_pb2.PutChunkResponse), await one.call.details()
        for reply in response.replies:
            if key_to_wire(key) in (reply.resync.key, reply.rejected.key):
                return reply


@pytest.mark.parametrize("item", [_chunk(OTHER, 2), _open(OTHER)], ids=["a chunk", "an OpenEdge"])
async def test_flow_that_shares_a_failed_reader_is_opened_again(item: stage_pb2.PutItem) -> None:
    async with _agreed() as (one, reader):
        await one.put(_chunk(KEY, 1))
        await reader.closing.wait()
        await one.put(item)
        verdict = await _verdict(one, OTHER)
        assert verdict.resync.failed == chunk_pb2.CONNECTOR_NIXL
        await one.put(_open(OTHER, chunk_pb2.CONNECTOR_GRPC))
        assert (await one.answer("opened")).opened.key == key_to_wire(OTHER)
