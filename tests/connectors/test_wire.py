"""Chunks on the wire: the digests of flows, fragments, and counters beyond what a test could count to."""

import asyncio
import hashlib
import itertools
import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from google.protobuf.descriptor import FieldDescriptor

from stagemesh.common.plugins.connectors import GRPC
from stagemesh.common.wire.tensors import DTYPES, Tensors
from stagemesh.conformance import Host, assert_same, exchange
from stagemesh.connectors import fragments as fragments_module
from stagemesh.connectors import wire
from stagemesh.connectors.base import Bytes
from stagemesh.connectors.flow import sent_chunks
from stagemesh.connectors.flow.flow_control import WINDOW_CHUNKS
from stagemesh.connectors.fragments import FragmentAssembler
from stagemesh.connectors.packets import EdgeKey, Packet, ReceivedTicket
from stagemesh.connectors.wire import FlowDigest, PacketShape
from stagemesh.v1 import chunk_pb2, stage_pb2, tensor_pb2
from tests.connectors import EACH_CONNECTOR
from tests.connectors.contents import packet_of
from tests.connectors.hosts import flow_of_hosts

VECTORS: list[dict[str, Any]] = json.loads((Path(__file__).parents[2] / "protos/vectors/digest.json").read_text())


def _packet(chunk: dict[str, Any]) -> Packet:
    types = {each["name"]: (each["data_type"].lower(), each["shape"]) for each in chunk["tensors"]}
    tensors = {name: np.empty(shape, DTYPES[dtype]) for name, (dtype, shape) in types.items() if dtype in DTYPES}
    return Packet(tensors, tickets={name: _ticket() for name in types if name not in tensors})


def _ticket() -> ReceivedTicket:
    offer = tensor_pb2.Handover(kind="test.state", size_bytes=1, time_limit_s=1)
    return ReceivedTicket(offer, accept=lambda: asyncio.sleep(0), on_release=lambda: None)


def _described(chunk: dict[str, Any]) -> bytes:
    """Returns a chunk's bytes in the digest, as ChunkEnd.digest defines them."""
    described = struct.pack("<I", len(chunk["tensors"]))
    for each in chunk["tensors"]:
        name, shape = each["name"].encode(), each["shape"]
        number = tensor_pb2.DataType.Value(f"DATA_TYPE_{each['data_type']}")
        described += struct.pack("<I", len(name)) + name + struct.pack("<II", number, len(shape))
        described += b"".join(struct.pack("<Q", length) for length in shape)
    return described


@pytest.mark.parametrize("vector", VECTORS, ids=[each["name"] for each in VECTORS])
def test_a_vector_has_its_digest(vector: dict[str, Any]) -> None:
    digest = FlowDigest()
    for chunk in vector["chunks"]:
        digest.add(PacketShape(_packet(chunk)))
    end = digest.end()
    assert (end.count, end.digest.hex()) == (vector["count"], vector["sha256"])


@pytest.mark.parametrize("vector", VECTORS, ids=[each["name"] for each in VECTORS])
def test_a_vector_follows_the_definition(vector: dict[str, Any]) -> None:
    runs = itertools.groupby(map(_described, vector["chunks"]))
    content = b"".join(struct.pack("<Q", len(list(run))) + described for described, run in runs)
    assert content.hex() == vector["digested_hex"]
    assert hashlib.sha256(content).hexdigest() == vector["sha256"]


def test_every_vector_has_a_digest_of_its_own() -> None:
    assert len({each["sha256"] for each in VECTORS}) == len(VECTORS)


KEY = EdgeKey("request", "a->b", 1)


def _messages(tensors: Tensors, key: EdgeKey = KEY) -> list[bytes]:
    total_bytes = sum(tensor.nbytes for tensor in tensors.values())
    fragments = fragments_module.split_into_fragments(wire.key_to_wire(key), tensors, total_bytes=total_bytes, seq=7)
    return [fragments_module.encode_fragment(fragment) for fragment in fragments]


def _assemble(messages: list[bytes], tensors: Tensors) -> list[Bytes]:
    """Returns the bytes of each tensor, as a consumer without landing memory assembles them."""
    assembler = FragmentAssembler(lambda: None)
    for data in messages:
        decoded = fragments_module.decode_fragment(data)
        assert decoded is not None
        if not assembler.has_begun(KEY, 7):
            assembler.begin(KEY, decoded.fragment.message)
        assembler.add(KEY, decoded.fragment)
    description = chunk_pb2.ChunkData()
    wire.fill_streamed(description, wire.shape_of(Packet(tensors), last=None), first_rows=[0] * len(tensors))
    return assembler.take(KEY, 7, description)


@pytest.mark.parametrize("size_bytes", [500, 16_000, 16_384, 70_000, fragments_module.WHOLE_CHUNK_BYTES])
@pytest.mark.parametrize("request_id", ["r", "r" * 9, "r" * 128])
def test_a_whole_chunk_is_used_in_place(size_bytes: int, request_id: str) -> None:
    tensors = {"x": np.random.default_rng(size_bytes).integers(0, 256, size_bytes, np.uint8)}
    messages = _messages(tensors, EdgeKey(request_id, "a->b", 1))
    assert len(messages) == 1
    (found,) = _assemble(messages, tensors)
    np.testing.assert_array_equal(found, tensors["x"])
    assert np.shares_memory(found, np.frombuffer(messages[0], np.uint8))
    assert found.ctypes.data % fragments_module.PAYLOAD_ALIGNMENT == 0


@pytest.mark.parametrize("request_id", ["r" * length for length in range(1, 17)])
def test_a_whole_chunk_that_protobuf_encoded_is_copied_unless_it_is_aligned(request_id: str) -> None:
    tensors = {"x": np.arange(1000, dtype=np.float64)}
    (encoded,) = _messages(tensors, EdgeKey(request_id, "a->b", 1))
    data = stage_pb2.PutChunkRequest.FromString(encoded).SerializeToString()
    (found,) = _assemble([data], tensors)
    np.testing.assert_array_equal(found.view(np.float64), tensors["x"])
    is_aligned = data.index(tensors["x"].tobytes()) % fragments_module.PAYLOAD_ALIGNMENT == 0
    assert np.shares_memory(found, np.frombuffer(data, np.uint8)) == is_aligned


def test_a_small_chunk_does_not_retain_a_large_message() -> None:
    tensors = {"x": np.arange(1000, dtype=np.float64)}
    (message,) = _messages(tensors)
    rest = stage_pb2.PutChunkRequest(items=[stage_pb2.PutItem(fragment=chunk_pb2.ChunkFragment(padding=bytes(9000)))])
    data = message + rest.SerializeToString()
    (found,) = _assemble([data], tensors)
    np.testing.assert_array_equal(found.view(np.float64), tensors["x"])
    assert not np.shares_memory(found, np.frombuffer(data, np.uint8))


def test_larger_chunks_and_several_tensors_arrive_unchanged() -> None:
    random = np.random.default_rng(0)
    for sizes in ([3 * fragments_module.WHOLE_CHUNK_BYTES + 5], [10, 0, 3000], [fragments_module.WHOLE_CHUNK_BYTES, 8]):
        tensors = {f"x{number}": random.integers(0, 256, size, np.uint8) for number, size in enumerate(sizes)}
        found = _assemble(_messages(tensors), tensors)
        for part, tensor in zip(found, (tensor for tensor in tensors.values() if tensor.nbytes), strict=True):
            np.testing.assert_array_equal(part, tensor)


CHUNKS = 20
SIZE_BYTES = 20_000
WINDOW_BYTES = 1 << 20
LONG_AGO = pytest.mark.parametrize("start", [10**8, 2**32 - CHUNKS // 2, 2**53 - CHUNKS // 2])
"""Counter values after 50 hours, around the limit of 32 bits, and around the exact integers of a double."""


async def _carry(a: Host, outlet: Any, inlet: Any) -> None:
    sent = [packet_of("r", seq, SIZE_BYTES) for seq in range(CHUNKS)]
    assert_same(await exchange(outlet, inlet, sent), sent)
    await a.settled()


@EACH_CONNECTOR
@LONG_AGO
async def test_ids_stay_unique_after_many_leases(connector: str, start: int, monkeypatch: pytest.MonkeyPatch) -> None:
    async with flow_of_hosts(connector=connector) as (a, _, outlet, inlet):
        (link,) = a.plane._links.values()
        lease_ids = itertools.count(start + 1)
        monkeypatch.setattr(sent_chunks, "_lease_ids", lease_ids)
        await _carry(a, outlet, inlet)
        assert next(lease_ids) - 1 == start + (0 if connector == GRPC else CHUNKS)
        assert not link.leases


@EACH_CONNECTOR
@LONG_AGO
async def test_flow_continues_after_many_chunks_and_bytes(connector: str, start: int) -> None:
    async with flow_of_hosts({"window_bytes": WINDOW_BYTES}, connector=connector) as (a, _, outlet, inlet):
        _advance(outlet, inlet, start)
        await _carry(a, outlet, inlet)
        # The End, too, has a number.
        assert (outlet.chunks.next_seq, inlet.attempt.next_seq) == (start + CHUNKS + 1,) * 2


def _advance(outlet: Any, inlet: Any, start: int) -> None:
    outlet.chunks.next_seq = outlet.chunks.acked = outlet.chunks.sent_bytes = start
    attempt, credit = inlet.attempt, inlet.attempt._credit
    attempt.next_seq = attempt._reported_seq = credit.received_bytes = credit._consumed_bytes = start
    credit.limit_bytes = credit._reported_bytes = start + WINDOW_BYTES
    credit._consumed_chunks, credit.limit_chunks = start, start + WINDOW_CHUNKS


@pytest.mark.parametrize(
    ("message", "names"),
    [
        (chunk_pb2.Chunk, ["seq"]),
        (chunk_pb2.ChunkData, ["lease_id", "size_bytes"]),
        (chunk_pb2.ChunkFragment, ["seq", "total_bytes", "offset"]),
        (chunk_pb2.ChunkEnd, ["count"]),
        (tensor_pb2.ShmRegion, ["offset", "size_bytes", "generation"]),
        (stage_pb2.EdgeOpened, ["next_seq", "credit_limit_bytes", "credit_limit_chunks"]),
        (stage_pb2.ChunkAck, ["next_seq"]),
        (stage_pb2.CreditGrant, ["credit_limit_bytes"]),
        (stage_pb2.LeaseRelease, ["lease_ids"]),
        (stage_pb2.Welcome, ["held_lease_ids"]),
    ],
)
def test_counters_on_the_wire_have_64_bits(message: Any, names: list[str]) -> None:
    fields = message.DESCRIPTOR.fields_by_name
    assert {name: fields[name].type for name in names} == dict.fromkeys(names, FieldDescriptor.TYPE_UINT64)
