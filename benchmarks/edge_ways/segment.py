"""vLLM-Omni's way: a shared-memory segment and a lock file for every message, with a msgpack envelope.

It makes the same copies as vLLM-Omni's SharedMemoryConnector: the serializer takes the tensor's bytes out of the
encoder, joins the buffers and prepends a header. The receiver opens the segment by name, copies its bytes and slices
them. vLLM-Omni polls for messages once a millisecond, which is not counted: here a pipe sends the segment's name.
"""

import fcntl
import os
import struct
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

import msgspec
import numpy as np

from benchmarks.edge_ways.base import Bytes, Receiver, Sender

_HEADER = struct.Struct("<BIII")
_KIND = 2


class SegmentSender(Sender):
    """Writes segments."""

    async def open(self) -> None:
        self._sent = 0

    async def close(self) -> None:
        """Does nothing: no resources are retained between messages."""

    async def send(self, tensor: Bytes) -> None:
        self._sent += 1
        name = f"stagemesh-bench-{os.getpid()}-{self._sent}"
        payload = _serialize(tensor)
        with _lock_file(name).open("wb+") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            segment = SharedMemory(name, create=True, size=len(payload))
            assert segment.buf is not None, "it is open"
            segment.buf[: len(payload)] = payload
            segment.close()
        self.peers[0].send((name, len(payload)))


class SegmentReceiver(Receiver):
    """Reads segments and removes them."""

    async def open(self) -> None:
        """Does nothing: there is no connection."""

    async def close(self) -> None:
        """Does nothing: no resources are retained between messages."""

    async def receive(self, size_bytes: int) -> Bytes:  # noqa: ARG002 - the message tells
        name, payload_bytes = self.peers[0].recv()
        with _lock_file(name).open("rb+") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            segment = SharedMemory(name)
            assert segment.buf is not None, "it is open"
            payload = bytes(segment.buf[:payload_bytes])
            segment.close()
            segment.unlink()
        tensor = _deserialize(payload)
        _lock_file(name).unlink()
        return tensor


def _lock_file(name: str) -> Path:
    return Path(f"/dev/shm/{name}.lock")  # noqa: S108 - where the peer has it


def _serialize(tensor: Bytes) -> bytes:
    envelope = msgspec.msgpack.encode((tensor.dtype.str, tensor.shape, 1))
    buffers = [envelope, bytes(tensor.data)]
    header = _HEADER.pack(_KIND, len(buffers), *map(len, buffers))
    return header + b"".join(buffers)


def _deserialize(payload: bytes) -> Bytes:
    _, _, envelope_bytes, data_bytes = _HEADER.unpack_from(payload)
    data_at = _HEADER.size + envelope_bytes
    dtype, shape, _ = msgspec.msgpack.decode(payload[_HEADER.size : data_at], type=tuple[str, tuple[int, ...], int])
    data = payload[data_at : data_at + data_bytes]
    return np.frombuffer(data, np.dtype(dtype)).reshape(shape)
