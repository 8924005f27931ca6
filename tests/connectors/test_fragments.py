"""Chunks whose bytes are sent as fragments."""

import numpy as np
import pytest

from stagemesh.common.errors import InvalidChunkError
from stagemesh.common.wire.tensors import Tensors
from stagemesh.connectors import fragments as fragments_module
from stagemesh.connectors import wire
from stagemesh.connectors.base import Bytes
from stagemesh.connectors.fragments import FragmentAssembler
from stagemesh.connectors.packets import EdgeKey, Packet
from stagemesh.v1 import chunk_pb2, stage_pb2

KEY = EdgeKey("request", "a->b", 1)


def _messages(tensors: Tensors, key: EdgeKey = KEY) -> list[bytes]:
    total_bytes = sum(tensor.nbytes for tensor in tensors.values())
    fragments = fragments_module.split_into_fragments(
        wire.key_to_wire(key), tensors, total_bytes=total_bytes, transfer_id=7
    )
    return [fragments_module.encode_fragment(fragment) for fragment in fragments]


def _assemble(messages: list[bytes], tensors: Tensors) -> list[Bytes]:
    """Returns the bytes of each tensor, as a consumer without landing memory assembles them."""
    assembler = FragmentAssembler(lambda: None)
    for data in messages:
        decoded = fragments_module.decode_fragment(data)
        assert decoded is not None
        if assembler.is_new(decoded.fragment.message.transfer_id):
            assembler.begin(KEY, decoded.fragment.message)
        assembler.add(KEY, decoded.fragment)
    description = chunk_pb2.ChunkData()
    wire.fill_streamed(description, wire.shape_of(Packet(tensors), last=None), transfer_id=7)
    return assembler.take(KEY, description)


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


def test_a_chunk_with_a_missing_fragment_is_an_error() -> None:
    tensors = {"x": np.zeros(2 * fragments_module.WHOLE_CHUNK_BYTES, np.uint8)}
    with pytest.raises(InvalidChunkError) as missing:
        _assemble(_messages(tensors)[:-1], tensors)
    assert missing.value.reason == "FRAGMENT_GAP"
