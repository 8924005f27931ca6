"""Puts chunks together whose bytes arrive as fragments."""

from collections.abc import Callable

import numpy as np

from stagemesh.common.errors import InvalidChunkError
from stagemesh.connectors.arena.arena import Arena, MemoryAccount
from stagemesh.connectors.base import Bytes
from stagemesh.connectors.edge import EdgeKey
from stagemesh.connectors.stream.wire import Fragment
from stagemesh.v1 import chunk_pb2, tensor_pb2


class _Transfer:
    def __init__(self, key: EdgeKey, buffer: Bytes) -> None:
        self.key = key
        self.buffer = buffer
        self.received_bytes = 0


class FragmentAssembler:
    """The transfers of one stream, at most one per flow.

    `landing` returns memory that is already mapped, or None if there is none yet.
    """

    def __init__(self, landing: Callable[[], Arena | None]) -> None:
        self._landing = landing
        self._by_id: dict[int, _Transfer] = {}
        self._last_id = 0

    def is_new(self, transfer_id: int) -> bool:
        """Returns whether no fragment of the transfer has arrived. False for a repeat of a finished transfer."""
        return transfer_id > self._last_id

    def begin(self, key: EdgeKey, message: chunk_pb2.ChunkPiece) -> None:
        """Allocates the buffer of a new transfer. The flow's former transfer, if any, was abandoned."""
        self.drop(key)
        self._last_id = message.transfer_id
        self._by_id[message.transfer_id] = _Transfer(key, self._buffer(message.total_bytes))

    def add(self, key: EdgeKey, fragment: Fragment) -> bool:
        """Copies a fragment in, or ignores a repeat; returns False if it leaves a gap or does not fit."""
        message, payload = fragment
        transfer = self._by_id.get(message.transfer_id)
        if transfer is None:
            return True
        end = message.offset + len(payload)
        if transfer.key != key or message.offset > transfer.received_bytes or end > len(transfer.buffer):
            return False
        if message.offset == transfer.received_bytes:
            transfer.buffer[message.offset : end] = np.frombuffer(payload, np.uint8)
            transfer.received_bytes = end
        return True

    def take(self, data: chunk_pb2.ChunkData) -> dict[str, Bytes] | None:
        """Removes and returns the bytes of a chunk's streamed tensors by name; None if fragments are missing.

        Raises InvalidChunkError for a tensor outside its transfer.
        """
        streamed = [message for message in data.tensors if message.HasField("streamed")]
        transfers = {number: self._by_id.get(number) for number in {m.streamed.transfer_id for m in streamed}}
        if any(transfer is None or transfer.received_bytes < len(transfer.buffer) for transfer in transfers.values()):
            return None
        contents = {message.name: self._bytes(message) for message in streamed}
        for transfer_id in transfers:
            del self._by_id[transfer_id]
        return contents

    def drop(self, key: EdgeKey) -> None:
        """Drops what has arrived of a flow."""
        for transfer_id in [number for number, transfer in self._by_id.items() if transfer.key == key]:
            del self._by_id[transfer_id]

    def clear(self) -> None:
        """Drops everything."""
        self._by_id.clear()

    def _buffer(self, size_bytes: int) -> Bytes:
        """Allocates a transfer's buffer, in mapped memory if possible: fresh memory costs more than the copy."""
        landing = self._landing()
        if landing is None or size_bytes > landing.max_region_bytes:
            return np.empty(size_bytes, np.uint8)
        region = landing.try_allocate(size_bytes, MemoryAccount())
        return np.empty(size_bytes, np.uint8) if region is None else region.as_array()[:size_bytes]

    def _bytes(self, message: tensor_pb2.Tensor) -> Bytes:
        place, buffer = message.streamed, self._by_id[message.streamed.transfer_id].buffer
        if place.offset + place.size_bytes > len(buffer):
            raise InvalidChunkError(f"tensor {message.name!r} lies outside its transfer")
        return buffer[place.offset : place.offset + place.size_bytes]
