"""Packets and flows to and from the contract's messages."""

import hashlib
from collections.abc import Iterator, Mapping

import numpy as np

from stagemesh.connectors.arena import Region
from stagemesh.connectors.base import ConnectorName, EdgeKey, MetadataValue, Packet
from stagemesh.connectors.errors import InvalidChunkError, StagemeshError, make_error
from stagemesh.connectors.tensors import describe_tensor, inline_tensor
from stagemesh.v1 import chunk_pb2, tensor_pb2

PIECE_BYTES = 512 << 10
MAX_TENSORS = 1024
MAX_METADATA = 64

_CONNECTORS: Mapping[ConnectorName, chunk_pb2.Connector.ValueType] = {
    ConnectorName.AUTO: chunk_pb2.CONNECTOR_AUTO,
    ConnectorName.SHM: chunk_pb2.CONNECTOR_SHM,
    ConnectorName.NIXL: chunk_pb2.CONNECTOR_NIXL,
    ConnectorName.GRPC: chunk_pb2.CONNECTOR_GRPC,
}


def connector_to_wire(name: ConnectorName) -> chunk_pb2.Connector.ValueType:
    """The enum value of a connector."""
    return _CONNECTORS[name]


def connector_from_wire(number: int) -> ConnectorName:
    """The connector of an enum value; unset is AUTO, an unknown one InvalidChunkError."""
    if number == chunk_pb2.CONNECTOR_UNSPECIFIED:
        return ConnectorName.AUTO
    for name, value in _CONNECTORS.items():
        if value == number:
            return name
    raise InvalidChunkError(f"unknown connector {number}", reason="UNKNOWN_CONNECTOR")


def key_to_wire(key: EdgeKey) -> chunk_pb2.EdgeKey:
    """The message of a key."""
    return chunk_pb2.EdgeKey(request_id=key.request_id, edge=key.edge, attempt=key.attempt)


def key_from_wire(message: chunk_pb2.EdgeKey) -> EdgeKey:
    """The key of a message."""
    return EdgeKey(message.request_id, message.edge, message.attempt)


def error_to_wire(error: StagemeshError) -> chunk_pb2.Error:
    """The message of an error."""
    return chunk_pb2.Error(code=int(error.code), reason=error.reason, message=error.message, metadata=error.metadata)


def error_from_wire(message: chunk_pb2.Error) -> StagemeshError:
    """The error of a message."""
    return make_error(message.code, message.message, reason=message.reason, metadata=dict(message.metadata))


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


def inline_chunk(key: EdgeKey, seq: int, packet: Packet) -> chunk_pb2.Chunk:
    """A chunk whose tensors are inline."""
    return _chunk(key, seq, packet, [inline_tensor(name, tensor) for name, tensor in packet.tensors.items()])


def shm_chunk(key: EdgeKey, seq: int, packet: Packet, *, region: Region, lease_id: int) -> chunk_pb2.Chunk:
    """A chunk whose tensors are in the producer's arena."""
    tensors: list[tensor_pb2.Tensor] = []
    for name, tensor in packet.tensors.items():
        message = describe_tensor(name, tensor)
        if tensor.nbytes:
            message.shm.offset = region.tensor_offsets[name]
            message.shm.size_bytes = tensor.nbytes
            message.shm.generation = region.generation
        tensors.append(message)
    chunk = _chunk(key, seq, packet, tensors)
    chunk.data.lease_id = lease_id
    return chunk


def streamed_chunk(key: EdgeKey, seq: int, packet: Packet, *, transfer_id: int) -> chunk_pb2.Chunk:
    """A chunk whose bytes went ahead as pieces, its tensors one after the other."""
    tensors: list[tensor_pb2.Tensor] = []
    offset = 0
    for name, tensor in packet.tensors.items():
        message = describe_tensor(name, tensor)
        if tensor.nbytes:
            message.streamed.transfer_id = transfer_id
            message.streamed.offset = offset
            message.streamed.size_bytes = tensor.nbytes
        tensors.append(message)
        offset += tensor.nbytes
    return _chunk(key, seq, packet, tensors)


def pieces(key: EdgeKey, packet: Packet, *, transfer_id: int) -> Iterator[chunk_pb2.ChunkPiece]:
    """The pieces of a packet, made one at a time."""
    total, base, wire_key = packet.size_bytes, 0, key_to_wire(key)
    for tensor in packet.tensors.values():
        payload = memoryview(tensor.reshape(-1).view(np.uint8).data) if tensor.nbytes else memoryview(b"")
        for start in range(0, len(payload), PIECE_BYTES):
            part = payload[start : start + PIECE_BYTES].tobytes()
            yield chunk_pb2.ChunkPiece(
                transfer_id=transfer_id, total_bytes=total, offset=base + start, payload=part, key=wire_key
            )
        base += len(payload)


class FlowDigest:
    """The running digest that End carries: over what each chunk is, not over its bytes."""

    def __init__(self) -> None:
        self.count = 0
        self._hash = hashlib.blake2b(digest_size=16)

    def add(self, packet: Packet) -> None:
        """Takes in the flow's next data chunk."""
        shapes = ";".join(f"{name}:{t.dtype.str}{t.shape}" for name, t in packet.tensors.items())
        self._hash.update(f"{self.count}|{packet.size_bytes}|{shapes}\n".encode())
        self.count += 1

    def end(self) -> chunk_pb2.ChunkEnd:
        """The End message at this point."""
        return chunk_pb2.ChunkEnd(count=self.count, digest=self._hash.digest())


def _chunk(key: EdgeKey, seq: int, packet: Packet, tensors: list[tensor_pb2.Tensor]) -> chunk_pb2.Chunk:
    data = chunk_pb2.ChunkData(tensors=tensors, size_bytes=packet.size_bytes)
    for name, value in packet.metadata.items():
        _set_metadata(data.metadata[name], value)
    return chunk_pb2.Chunk(key=key_to_wire(key), seq=seq, data=data)


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


def tail_chunk(key: EdgeKey, seq: int, tail: chunk_pb2.ChunkEnd | chunk_pb2.ChunkAbort | None) -> chunk_pb2.Chunk:
    """The chunk that closes a flow."""
    chunk = chunk_pb2.Chunk(key=key_to_wire(key), seq=seq)
    if isinstance(tail, chunk_pb2.ChunkEnd):
        chunk.end.CopyFrom(tail)
    elif tail is not None:
        chunk.abort.CopyFrom(tail)
    return chunk
