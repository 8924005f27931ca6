"""Packets out of the contract's messages: what a peer claims is checked before use."""

from collections.abc import Mapping

import numpy as np

from stagemesh.common.errors import InvalidChunkError
from stagemesh.common.tensors import Array, checked_layout, read_inline
from stagemesh.connectors.base import ArenaRange, Bytes, InPlaceReader
from stagemesh.connectors.edge import Packet
from stagemesh.connectors.stream import wire
from stagemesh.v1 import chunk_pb2, tensor_pb2


def in_arena(data: chunk_pb2.ChunkData) -> tuple[list[str], list[ArenaRange]]:
    """The names and places of the tensors that lie in their producer's arena.

    Raises InvalidChunkError where they are larger than the chunk claims to be.
    """
    names: list[str] = []
    places: list[ArenaRange] = []
    size_bytes = 0
    for message in data.tensors:
        if message.HasField("shm"):
            region = message.shm
            place = ArenaRange(region.offset, region.size_bytes, region.generation)
            size_bytes += place.size_bytes
            names.append(message.name)
            places.append(place)
    if size_bytes > data.size_bytes:
        raise InvalidChunkError("a chunk's tensors do not make the size that it claims")
    return names, places


def in_place(data: chunk_pb2.ChunkData, reader: InPlaceReader) -> tuple[Packet, list[Bytes]]:
    """The packet of a chunk in an arena that is read in place, and the views of the arena that it is made of."""
    views: list[Bytes] = []
    tensors: dict[str, Array] = {}
    for message in data.tensors:
        view = None
        if message.HasField("shm"):
            region = message.shm
            view = reader.view(ArenaRange(region.offset, region.size_bytes, region.generation))
            views.append(view)
        tensors[message.name] = _tensor(message, view)
    if not views:
        raise InvalidChunkError("a chunk has a lease and nothing that it is for")
    return _checked(data, tensors), views


def packet(data: chunk_pb2.ChunkData, found: Mapping[str, Bytes]) -> Packet:
    """The packet of a chunk, given the bytes of those of its tensors that are not inline, by name."""
    tensors = {message.name: _tensor(message, found.get(message.name)) for message in data.tensors}
    return _checked(data, tensors)


def _checked(data: chunk_pb2.ChunkData, tensors: dict[str, Array]) -> Packet:
    packet = Packet(tensors, wire.metadata_from_wire(data.metadata) if data.metadata else {})
    if len(tensors) != len(data.tensors) or packet.size_bytes != data.size_bytes:
        raise InvalidChunkError("a chunk's tensors share a name or do not make the size that it claims")
    return packet


def _tensor(message: tensor_pb2.Tensor, found: Bytes | None) -> Array:
    if found is not None:
        dtype, shape = checked_layout(message, size_bytes=found.nbytes)
        return found.view(dtype).reshape(shape)
    if message.HasField("inline"):
        return read_inline(message)
    if message.WhichOneof("location") is not None:
        raise InvalidChunkError(f"tensor {message.name!r} comes by a connector that was not agreed on")
    dtype, shape = checked_layout(message, size_bytes=0)
    return np.empty(shape, dtype)
