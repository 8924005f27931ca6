"""Assembles chunks whose bytes arrive as fragments."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from stagemesh.common.errors import InvalidChunkError
from stagemesh.connectors.arena.arena import Arena
from stagemesh.connectors.base import Bytes, MemoryAccount
from stagemesh.connectors.edge import EdgeKey
from stagemesh.connectors.stream.wire import PAYLOAD_ALIGNMENT, Fragment
from stagemesh.v1 import chunk_pb2, tensor_pb2


@dataclass(eq=False, slots=True)
class _Transfer:
    id: int
    total_bytes: int
    buffer: Bytes | None = None
    received_bytes: int = 0


class FragmentAssembler:
    """Assembles the fragments that arrive over one stream. Each flow has at most one transfer in progress.

    A transfer consists of the fragments of one chunk. `landing` returns the arena into which fragments are copied, or
    None if the arena is not available.
    """

    def __init__(self, landing: Callable[[], Arena | None]) -> None:
        self._landing = landing
        self._transfers: dict[EdgeKey, _Transfer] = {}
        self._last_id = 0

    def is_new(self, transfer_id: int) -> bool:
        """Returns True if the transfer has not begun yet, or False if the transfer is in progress or has ended."""
        return transfer_id > self._last_id

    def begin(self, key: EdgeKey, message: chunk_pb2.ChunkFragment) -> None:
        """Begins a new transfer. Drops the flow's previous transfer, if any. `message` is a fragment of the new one."""
        self.drop(key)
        self._last_id = message.transfer_id
        self._transfers[key] = _Transfer(message.transfer_id, message.total_bytes)

    def add(self, key: EdgeKey, fragment: Fragment) -> None:
        """Adds a fragment to its transfer. Ignores repeated fragments and fragments of old transfers.

        Copies the fragment into the transfer's buffer. If the fragment contains the whole chunk, is aligned, and makes
        up at least half of the received message, uses the message's memory as the buffer instead.

        Raises InvalidChunkError (FRAGMENT_GAP) if an earlier fragment is missing, or if the fragment does not fit into
        the buffer.
        """
        message, payload = fragment
        transfer = self._transfers.get(key)
        if transfer is None or transfer.id != message.transfer_id:
            return
        end = message.offset + len(payload)
        if message.offset > transfer.received_bytes or end > transfer.total_bytes:
            raise InvalidChunkError(
                f"a fragment of edge {key.edge} at {message.offset} does not follow the previous fragment",
                reason="FRAGMENT_GAP",
            )
        if message.offset < transfer.received_bytes:
            return
        part = np.frombuffer(payload, np.uint8)
        is_aligned = part.ctypes.data % PAYLOAD_ALIGNMENT == 0
        # Credit covers only the payload, so a message with much other content must not be retained.
        if len(part) == transfer.total_bytes and is_aligned and 2 * len(part) >= memoryview(payload.obj).nbytes:
            transfer.buffer = part
        else:
            if transfer.buffer is None:
                transfer.buffer = self._buffer(transfer.total_bytes)
            transfer.buffer[message.offset : end] = part
        transfer.received_bytes = end

    def take(self, key: EdgeKey, data: chunk_pb2.ChunkData) -> list[Bytes]:
        """Ends a flow's transfer. Returns the bytes of each tensor that was sent as fragments, in the tensors' order.

        Returns an empty list if no tensor was sent as fragments. Raises InvalidChunkError with the reason
        FRAGMENT_GAP if fragments are missing. Raises InvalidChunkError if a tensor is outside the transfer's buffer.
        """
        streamed = [message for message in data.tensors if message.HasField("streamed")]
        if not streamed:
            return []
        transfer = self._transfers.get(key)
        ids = {message.streamed.transfer_id for message in streamed}
        complete = transfer is not None and transfer.received_bytes == transfer.total_bytes and ids == {transfer.id}
        if transfer is None or transfer.buffer is None or not complete:
            raise InvalidChunkError(f"fragments of a chunk of edge {key.edge} are missing", reason="FRAGMENT_GAP")
        self.drop(key)
        return [_part(transfer.buffer, message) for message in streamed]

    def drop(self, key: EdgeKey) -> None:
        """Drops the transfer of a flow. Does nothing if the flow has no transfer."""
        self._transfers.pop(key, None)

    def clear(self) -> None:
        """Drops all transfers."""
        self._transfers.clear()

    def _buffer(self, size_bytes: int) -> Bytes:
        """Returns a buffer of `size_bytes` bytes for a transfer. Uses the landing memory if it has enough free space.

        Otherwise, requests new memory from the operating system, which takes longer than copying the fragments.
        """
        landing = self._landing()
        if landing is None or size_bytes > landing.max_region_bytes:
            return np.empty(size_bytes, np.uint8)
        region = landing.try_allocate(size_bytes, MemoryAccount())
        return np.empty(size_bytes, np.uint8) if region is None else region.as_array()[:size_bytes]


def _part(buffer: Bytes, message: tensor_pb2.Tensor) -> Bytes:
    place = message.streamed
    if place.offset + place.size_bytes > len(buffer):
        raise InvalidChunkError(f"tensor {message.name!r} is outside its transfer")
    return buffer[place.offset : place.offset + place.size_bytes]
