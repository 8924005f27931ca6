"""Chunks that come in pieces: the buffers that they are put together in."""

from collections.abc import Callable

import numpy as np

from stagemesh.common.errors import InvalidChunkError
from stagemesh.connectors.arena.arena import Arena, MemoryAccount
from stagemesh.connectors.base import Bytes
from stagemesh.connectors.edge import EdgeKey
from stagemesh.v1 import chunk_pb2, tensor_pb2


class _Transfer:
    def __init__(self, key: EdgeKey, buffer: Bytes) -> None:
        self.key = key
        self.buffer = buffer
        self.received_bytes = 0


class FragmentAssembler:
    """Those of one stream, at most one a flow. `landing` is memory that is warm already, where there is some."""

    def __init__(self, landing: Callable[[], Arena | None]) -> None:
        self._landing = landing
        self._by_id: dict[int, _Transfer] = {}
        self._last_id = 0

    def is_new(self, transfer_id: int) -> bool:
        """Whether nothing of it has come, and it is no repeat of one that is over."""
        return transfer_id > self._last_id

    def begin(self, key: EdgeKey, piece: chunk_pb2.ChunkPiece) -> None:
        """Makes room for a new transfer; it means that the one before was given up."""
        self.drop(key)
        self._last_id = piece.transfer_id
        self._by_id[piece.transfer_id] = _Transfer(key, self._buffer(piece.total_bytes))

    def add(self, key: EdgeKey, piece: chunk_pb2.ChunkPiece, payload: memoryview) -> bool:
        """Takes a piece, or sees that it is a repeat; False for one that leaves a gap or fits nowhere."""
        transfer = self._by_id.get(piece.transfer_id)
        if transfer is None:
            return True
        end = piece.offset + len(payload)
        if transfer.key != key or piece.offset > transfer.received_bytes or end > len(transfer.buffer):
            return False
        if piece.offset == transfer.received_bytes:
            transfer.buffer[piece.offset : end] = np.frombuffer(payload, np.uint8)
            transfer.received_bytes = end
        return True

    def tensors(self, data: chunk_pb2.ChunkData) -> dict[str, Bytes] | None:
        """The bytes of a chunk's streamed tensors, taken out of here; None where pieces are missing.

        Raises InvalidChunkError for a tensor outside its transfer.
        """
        streamed = [message for message in data.tensors if message.HasField("streamed")]
        transfers = {number: self._by_id.get(number) for number in {m.streamed.transfer_id for m in streamed}}
        if any(transfer is None or transfer.received_bytes < len(transfer.buffer) for transfer in transfers.values()):
            return None
        found = {message.name: self._bytes(message) for message in streamed}
        for transfer_id in transfers:
            del self._by_id[transfer_id]
        return found

    def drop(self, key: EdgeKey) -> None:
        """Gives up what has come of a flow."""
        for transfer_id in [number for number, transfer in self._by_id.items() if transfer.key == key]:
            del self._by_id[transfer_id]

    def clear(self) -> None:
        """Gives up everything."""
        self._by_id.clear()

    def _buffer(self, size_bytes: int) -> Bytes:
        """Room for a transfer. Fresh memory costs more than the copy into it, but it is there when warm is not."""
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
