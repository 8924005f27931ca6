"""The stage in TypeScript and peers that break the protocol, or that speak a later version of it."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import grpc
import numpy as np
import pytest

from stagemesh.common.errors import StagemeshError
from stagemesh.conformance import assert_same, receive_all, send_all
from stagemesh.connectors.flow.inlet import Inlet
from stagemesh.connectors.packets import EdgeKey, Packet
from stagemesh.connectors.wire import FlowDigest, PacketShape, key_to_wire
from stagemesh.rpc.error_mapping import from_rpc_error
from stagemesh.rpc.message_streams import PUT_CHUNK
from stagemesh.v1 import chunk_pb2, stage_pb2, tensor_pb2
from stagemesh.v1.protocol_pb2 import Protocol
from tests.connectors.hosts import started_host
from tests.later_contract import LATER, later, later_class
from tests.typescript.nodes import QUICK
from tests.typescript.stage_harness import IN, Step, Upper, inlet_from, outlet_to, texts, upper, upper_stage

ITEM = stage_pb2.PutItem
KEY = key_to_wire(EdgeKey("r", IN, 1))
OPEN = stage_pb2.OpenEdge(key=KEY, connector=chunk_pb2.CONNECTOR_GRPC, opening=1)
PROTOCOL = Protocol(lowest_version=1, highest_version=1)
HELLO = stage_pb2.Hello(replica="a-0", incarnation="i", pipeline="p", generation="g", protocol=PROTOCOL)
DATA = Packet({"text": np.full(40, ord("x"), np.uint8)})


class LaterProducer:
    """A producer of a later version, whose messages a test writes by hand."""

    def __init__(self, call: Any) -> None:
        self._call = call

    async def put(self, *items: Any) -> None:
        await self._call.write(later_class("PutChunkRequest")(items=items))

    async def reply(self, kind: str) -> Any:
        """Returns the next reply of a kind."""
        while (response := await self._call.read()) is not grpc.aio.EOF:
            for reply in response.replies:
                if reply.WhichOneof("reply") == kind:
                    return getattr(reply, kind)
        raise AssertionError(await self._call.details())

    async def end(self) -> None:
        """Ends the stream, and waits until the stage has ended it, too."""
        await self._call.done_writing()
        while await self._call.read() is not grpc.aio.EOF:
            pass

    async def error(self) -> StagemeshError:
        """Returns the error that ends the stream."""
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            while await self._call.read() is not grpc.aio.EOF:
                pass
        return from_rpc_error(caught.value, peer="m-0")


@asynccontextmanager
async def later_producer(stage: Upper, hello: stage_pb2.Hello = HELLO) -> AsyncIterator[LaterProducer]:
    """Opens a stream to the stage."""
    call: Any = stage.channel.stream_stream(
        PUT_CHUNK, later_class("PutChunkRequest").SerializeToString, later_class("PutChunkResponse").FromString
    )()
    await call.write(later(stage_pb2.PutChunkRequest(hello=hello)))
    yield LaterProducer(call)
    call.cancel()


@dataclass(frozen=True)
class Scene:
    """A step of the stage from a producer of a later version to the host "c-0"."""

    stage: Upper
    step: Step
    inlet: Inlet
    producer: LaterProducer


@asynccontextmanager
async def scene(**limits: int) -> AsyncIterator[Scene]:
    async with upper_stage(*QUICK) as stage, started_host("c-0", **limits) as c:
        inlet = inlet_from(c.plane, "r")
        step = await stage.start("r", consumer=c.endpoint)
        async with later_producer(stage) as producer:
            yield Scene(stage, step, inlet, producer)
            await inlet.aclose()


def data() -> chunk_pb2.ChunkData:
    tensor = tensor_pb2.Tensor(name="text", dtype=tensor_pb2.DATA_TYPE_UINT8, shape=[40], inline=b"x" * 40)
    return chunk_pb2.ChunkData(tensors=[tensor], size_bytes=40)


def chunk(seq: int = 0, **content: Any) -> stage_pb2.PutItem:
    return ITEM(chunk=chunk_pb2.Chunk(key=KEY, seq=seq, **(content or {"data": data()})))


def end() -> chunk_pb2.ChunkEnd:
    digest = FlowDigest()
    digest.add(PacketShape(DATA))
    return digest.end()


def later_item(*, with_key: bool = True, ignorable: bool = False) -> Any:
    return later_class("PutItem")(later="?", key=later(KEY) if with_key else None, ignorable=ignorable)


def later_content() -> Any:
    return later_class("PutItem")(chunk=later_class("Chunk")(key=later(KEY), later="?"))


def later_location() -> Any:
    item = later(chunk())
    item.chunk.data.tensors[0].later = "elsewhere"
    return item


def later_dtype() -> Any:
    item = later(chunk())
    item.chunk.data.tensors[0].dtype = LATER
    return item


def changed(**fields: Any) -> Any:
    item = chunk()
    tensor = item.chunk.data.tensors[0]
    for name, value in fields.items():
        (tensor.shape.__setitem__(0, value) if name == "length" else setattr(item.chunk.data, name, value))
    return later(item)


def empty_chunk() -> Any:
    return later_class("PutItem").FromString(ITEM(chunk=chunk_pb2.Chunk(key=KEY)).SerializeToString())


def twice() -> Any:
    item = chunk()
    item.chunk.data.tensors.append(item.chunk.data.tensors[0])
    item.chunk.data.size_bytes = 80
    return later(item)


def later_fragment(total_bytes: int) -> Any:
    return later(ITEM(fragment=chunk_pb2.ChunkFragment(key=KEY, transfer_id=1, total_bytes=total_bytes)))


REJECTED: dict[str, tuple[str, Callable[[], Any]]] = {
    "a later item": ("UNKNOWN_KIND", later_item),
    "a later content": ("UNKNOWN_KIND", later_content),
    "a later location": ("UNKNOWN_KIND", later_location),
    "a later type": ("INVALID_CHUNK", later_dtype),
    "a wrong shape": ("INVALID_CHUNK", lambda: changed(length=41)),
    "a wrong size": ("INVALID_CHUNK", lambda: changed(size_bytes=41)),
    "two tensors of a name": ("INVALID_CHUNK", twice),
    "a chunk without content": ("INVALID_CHUNK", empty_chunk),
    "a wrong digest": ("DIGEST_MISMATCH", lambda: later(chunk(end=chunk_pb2.ChunkEnd(count=1, digest=b"x" * 32)))),
    "more than its credit": ("CREDIT_EXCEEDED", lambda: later_fragment(1 << 20)),
    "a chunk that can never fit": (
        "CHUNK_TOO_LARGE",
        lambda: later(ITEM(demand=stage_pb2.CreditDemand(key=KEY, size_bytes=1 << 40))),
    ),
}


async def test_invalid_items_reject_their_flow_alone() -> None:
    sent = texts(3, 1000)
    async with upper_stage(*QUICK) as stage, started_host("c-0") as c:
        for number, (what, (reason, make)) in enumerate(REJECTED.items(), start=1):
            inlet = inlet_from(c.plane, "r", attempt=number)
            step = await stage.start("r", consumer=c.endpoint, attempt=number)
            KEY.attempt = OPEN.key.attempt = number
            async with later_producer(stage) as producer:
                await producer.put(later(ITEM(open=OPEN)))
                await producer.reply("opened")
                await producer.put(make())
                rejected = await producer.reply("rejected")
                assert (rejected.error.reason, rejected.error.metadata["edge"]) == (reason, IN), what
            with pytest.raises(StagemeshError) as caught:
                await anext(inlet)
            assert (caught.value.reason, caught.value.metadata["edge"]) == (reason, IN), what
            with pytest.raises(grpc.aio.AioRpcError):
                await step.finished()
            await inlet.aclose()
        other = inlet_from(c.plane, "r2")
        async with started_host("b-0") as b:
            step = await stage.start("r2", consumer=c.endpoint, producer="b-0")
            sending = send_all(outlet_to(stage.endpoint, b.plane, "r2"), sent)
            _, received = await asyncio.gather(sending, receive_all(other))
        assert_same(received, upper(sent))


@pytest.fixture(autouse=True)
def _first_attempt() -> None:
    KEY.attempt = OPEN.key.attempt = 1


async def test_added_fields_and_ignorable_kinds_are_ignored() -> None:
    empty = chunk_pb2.ChunkData(tensors=[tensor_pb2.Tensor(name="text", dtype=tensor_pb2.DATA_TYPE_UINT8, shape=[0])])
    digest = FlowDigest()
    for packet in (DATA, Packet({"text": np.empty(0, np.uint8)})):
        digest.add(PacketShape(packet))
    async with scene() as it:
        await it.producer.put(later(ITEM(open=OPEN)))
        await it.producer.put(later_item(ignorable=True), later_item(with_key=False, ignorable=True))
        await it.producer.put(later(chunk()), later(chunk(1, data=empty)), later(chunk(2, end=digest.end())))
        received = await receive_all(it.inlet)
        await it.producer.reply("commit")
        assert [packet.tensors["text"].tobytes() for packet in received] == [b"X" * 40, b""]
        await it.step.finished()


async def test_lost_messages_are_asked_for_three_times() -> None:
    async with scene() as it:
        await it.producer.put(later(chunk()))
        assert (await it.producer.reply("resync")).error.reason == "NOT_OPENED"
        for kind in ("resync", "resync", "rejected"):
            await it.producer.put(later(ITEM(open=OPEN)), later(chunk(1)))
            assert (await it.producer.reply(kind)).error.reason == "SEQUENCE_GAP"
        with pytest.raises(StagemeshError):
            await anext(it.inlet)


async def test_bytes_read_without_a_connection_are_granted_with_the_next_one() -> None:
    size_bytes = 16 << 10
    content = data()
    content.tensors[0].shape[0] = content.size_bytes = size_bytes
    content.tensors[0].inline = b"x" * size_bytes
    async with scene(window_bytes=size_bytes) as it:
        await it.producer.put(later(ITEM(open=OPEN)))
        for seq in range(4):
            await it.producer.put(later(chunk(seq, data=content)))
            await it.producer.reply("ack")
        await it.producer.end()
        for _ in range(4):
            await anext(it.inlet)
        async with later_producer(it.stage) as producer:
            await producer.put(later(ITEM(open=OPEN)))
            assert (await producer.reply("opened")).credit_limit_bytes == (64 << 10) + 4 * size_bytes


async def test_committed_and_unknown_flows_are_answered() -> None:
    unknown = stage_pb2.OpenEdge(key=key_to_wire(EdgeKey("other", IN, 1)))
    async with scene() as it:
        producer = it.producer
        await producer.put(later(ITEM(open=OPEN)), later(chunk()), later(chunk(1, end=end())))
        await producer.reply("commit")
        await producer.put(later(ITEM(open=OPEN)))
        await producer.reply("commit")
        await producer.put(later(ITEM(open=unknown)))
        assert (await producer.reply("rejected")).error.reason == "UNKNOWN_FLOW"
        await producer.put(later(ITEM(offer=stage_pb2.Offer(connector=chunk_pb2.CONNECTOR_SHM))))
        assert (await producer.reply("offer_answer")).error.reason == "CONNECTOR_UNAVAILABLE"
        await producer.put(later_item(with_key=False))
        assert (await producer.error()).reason == "UNKNOWN_KIND"
        await receive_all(it.inlet)


HELLOS: dict[str, dict[str, Any]] = {
    "WRONG_PIPELINE": {"pipeline": "other"},
    "WRONG_GENERATION": {"generation": "other"},
    "NO_COMMON_VERSION": {"protocol": Protocol(lowest_version=2, highest_version=3)},
    "NO_HELLO": {"incarnation": ""},
}


@pytest.mark.parametrize("reason", HELLOS)
async def test_peers_of_another_kind_are_refused(reason: str) -> None:
    async with upper_stage() as stage:
        hello = stage_pb2.Hello(replica="a-0", incarnation="i", pipeline="p", generation="g", protocol=PROTOCOL)
        for name, value in HELLOS[reason].items():
            hello.ClearField(name)  # type: ignore[arg-type]
            hello.MergeFrom(stage_pb2.Hello(**{name: value}))
        async with later_producer(stage, hello) as producer:
            assert (await producer.error()).reason == reason
