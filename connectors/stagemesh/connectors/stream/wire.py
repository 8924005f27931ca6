"""Packets and flows to and from the contract's messages."""

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple, TypeAlias

import numpy as np

from stagemesh.common.errors import InvalidChunkError, StagemeshError, make_error
from stagemesh.common.tensors import Tensors, dtype_name, dtype_to_wire
from stagemesh.connectors.arena.memory_file import layout_of
from stagemesh.connectors.base import ArenaRange
from stagemesh.connectors.edge import EdgeKey, MetadataValue, Packet
from stagemesh.v1 import chunk_pb2

PIECE_BYTES = 256 << 10
"""The most of a chunk in one message: larger ones take fresh memory of the allocator at each step on their way."""
MAX_TENSORS = 1024
MAX_METADATA = 64


def key_to_wire(key: EdgeKey) -> chunk_pb2.EdgeKey:
    """The message of a key."""
    return chunk_pb2.EdgeKey(request_id=key.request_id, edge=key.edge, attempt=key.attempt)


def key_from_wire(message: chunk_pb2.EdgeKey) -> EdgeKey:
    """The key of a message."""
    return EdgeKey(message.request_id, message.edge, message.attempt)


def error_to_wire(error: StagemeshError) -> chunk_pb2.Error:
    """The message of an error."""
    return chunk_pb2.Error(
        code=int(error.code),
        reason=error.reason,
        message=error.message,
        metadata=error.metadata,
        retry_after_s=error.retry_after_s,
    )


def error_from_wire(message: chunk_pb2.Error) -> StagemeshError:
    """The error of a message."""
    return make_error(
        message.code,
        message.message,
        reason=message.reason,
        metadata=dict(message.metadata),
        retry_after_s=message.retry_after_s if message.HasField("retry_after_s") else None,
    )


def metadata_from_wire(message: Mapping[str, chunk_pb2.MetadataValue]) -> dict[str, MetadataValue]:
    """Plain values; raises InvalidChunkError for unset or oversized ones."""
    if len(message) > MAX_METADATA:
        raise InvalidChunkError(f"{len(message)} metadata values in a chunk; at most {MAX_METADATA} are taken")
    values: dict[str, MetadataValue] = {}
    for name, value in message.items():
        kind = value.WhichOneof("kind")
        if kind is None or (kind == "text" and len(value.text) > 1024):
            raise InvalidChunkError(f"metadata {name!r} is unset or longer than 1024 characters")
        values[name] = getattr(value, kind)
    return values


def check_metadata(metadata: Mapping[str, object]) -> None:
    """Raises InvalidChunkError for what the wire has no form for."""
    for name, value in metadata.items():
        if not isinstance(value, bool | int | float | str):
            raise InvalidChunkError(f"metadata {name!r} is a {type(value).__name__}; use bool, int, float or str")


class PacketShape:
    """What a packet is but for its bytes. Flows keep that of the last packet: the next one mostly has the same."""

    __slots__ = ("_shapes", "digested", "fields", "layout", "size_bytes")

    def __init__(self, packet: Packet) -> None:
        """Raises InvalidChunkError for a packet that cannot be sent."""
        if len(packet.tensors) > MAX_TENSORS:
            raise InvalidChunkError(f"{len(packet.tensors)} tensors in a chunk; at most {MAX_TENSORS} are sent")
        self._shapes = [(name, tensor.dtype, tensor.shape) for name, tensor in packet.tensors.items()]
        self.fields = tuple(
            (name, dtype_to_wire(dtype_name(tensor)), tensor.shape, tensor.nbytes)
            for name, tensor in packet.tensors.items()
        )
        self.layout = layout_of(packet.tensors)
        self.size_bytes = packet.size_bytes
        self.digested = ";".join(f"{name}:{dtype.str}{shape}" for name, dtype, shape in self._shapes).encode()

    def fits(self, packet: Packet) -> bool:
        """Whether `packet` is of this shape."""
        if len(self._shapes) != len(packet.tensors):
            return False
        # Once a chunk at each end of every flow: a loop is a third of a generator's cost.
        for (name, dtype, shape), (other, tensor) in zip(self._shapes, packet.tensors.items(), strict=True):
            if name != other or tensor.shape != shape or tensor.dtype != dtype:
                return False
        return True


def shape_of(packet: Packet, *, last: PacketShape | None) -> PacketShape:
    """The packet's shape, `last` where that is it."""
    return last if last is not None and last.fits(packet) else PacketShape(packet)


def fill_metadata(data: chunk_pb2.ChunkData, metadata: Mapping[str, MetadataValue]) -> None:
    """Puts a packet's metadata in."""
    for name, value in metadata.items():
        _set_metadata(data.metadata[name], value)


def fill_inline(data: chunk_pb2.ChunkData, tensors: Tensors, shape: PacketShape) -> None:
    """Puts a packet's tensors inline."""
    data.size_bytes = shape.size_bytes
    for name, dtype, dims, size_bytes in shape.fields:
        message = data.tensors.add(name=name, dtype=dtype, shape=dims)
        if size_bytes:
            message.inline = tensors[name].tobytes()


def fill_in_arena(
    data: chunk_pb2.ChunkData, shape: PacketShape, *, places: Iterable[ArenaRange], lease_id: int
) -> None:
    """Says where in its producer's arena a packet's tensors lie."""
    data.size_bytes, data.lease_id = shape.size_bytes, lease_id
    for (name, dtype, dims, size_bytes), place in zip(shape.fields, places, strict=True):
        message = data.tensors.add(name=name, dtype=dtype, shape=dims)
        if size_bytes:
            region = message.shm
            region.offset, region.size_bytes, region.generation = place


def fill_streamed(data: chunk_pb2.ChunkData, shape: PacketShape, *, transfer_id: int) -> None:
    """Says that a packet's bytes went ahead as pieces, its tensors one after the other."""
    data.size_bytes = shape.size_bytes
    offset = 0
    for name, dtype, dims, size_bytes in shape.fields:
        message = data.tensors.add(name=name, dtype=dtype, shape=dims)
        if size_bytes:
            region = message.streamed
            region.transfer_id, region.offset, region.size_bytes = transfer_id, offset, size_bytes
        offset += size_bytes


class Piece(NamedTuple):
    """A part of a packet's bytes."""

    message: chunk_pb2.ChunkPiece
    """Without its payload."""
    payload: memoryview


def pieces(key: chunk_pb2.EdgeKey, tensors: Tensors, *, total_bytes: int, transfer_id: int) -> Iterator[Piece]:
    """The pieces of a packet's tensors, made one at a time."""
    base = 0
    for tensor in tensors.values():
        payload = np.ascontiguousarray(tensor).reshape(-1).view(np.uint8).data if tensor.nbytes else memoryview(b"")
        for start in range(0, len(payload), PIECE_BYTES):
            message = chunk_pb2.ChunkPiece(
                transfer_id=transfer_id, total_bytes=total_bytes, offset=base + start, key=key
            )
            yield Piece(message, payload[start : start + PIECE_BYTES])
        base += len(payload)


class FlowDigest:
    """The running digest that End carries: over what each chunk is, not over its bytes."""

    def __init__(self) -> None:
        self.count = 0
        self._hash = hashlib.blake2b(digest_size=16)
        self._run, self._digested = 0, b""

    def add(self, shape: PacketShape) -> None:
        """Takes in the flow's next data chunk."""
        self.count += 1
        if shape.digested != self._digested:
            self._end_run()
            self._digested = shape.digested
        self._run += 1

    def end(self) -> chunk_pb2.ChunkEnd:
        """The End message, once, after the last chunk."""
        self._end_run()
        return chunk_pb2.ChunkEnd(count=self.count, digest=self._hash.digest())

    def _end_run(self) -> None:
        if self._run:
            self._hash.update(b"%d|%b\n" % (self._run, self._digested))
            self._run = 0


def _set_metadata(message: chunk_pb2.MetadataValue, value: MetadataValue) -> None:
    match value:
        case bool():
            message.flag = value
        case int():
            message.integer = value
        case float():
            message.number = value
        case str():
            message.text = value


Tail: TypeAlias = chunk_pb2.ChunkEnd | chunk_pb2.ChunkAbort


def fill_tail(chunk: chunk_pb2.Chunk, tail: Tail) -> None:
    """Closes a flow."""
    if isinstance(tail, chunk_pb2.ChunkEnd):
        chunk.end.CopyFrom(tail)
    else:
        chunk.abort.CopyFrom(tail)
