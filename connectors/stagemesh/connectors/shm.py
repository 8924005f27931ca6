"""The shm connector, with which a consumer maps the arena of a producer on the same host and reads regions in place.

The producer sends the file descriptor of its memory file. File descriptors can be sent only within one host, so a
received descriptor proves that both replicas run on the same host. The random token at the start of the file proves
that the file is the arena from the offer.
"""

import fcntl
import mmap
import os
import secrets
from typing import ClassVar

import numpy as np
from google.protobuf.message import DecodeError

from stagemesh.common.errors import InvalidChunkError
from stagemesh.common.plugins.connectors import SHM, ConnectorName
from stagemesh.connectors.arena.arena import Arena
from stagemesh.connectors.arena.memory import LAYOUT_NAME, PAGE_BYTES, SEALS, TOKEN_BYTES, data_offset_in
from stagemesh.connectors.base import ArenaRange, Bytes, Connector, InPlaceReader, Producer, unavailable
from stagemesh.v1 import stage_pb2


class ShmConnector(Connector):
    """The connector that maps a producer's arena into the consumer's memory and reads tensors in place."""

    name: ClassVar[ConnectorName] = SHM

    def __init__(self, arena: Arena, **_: object) -> None:
        self._arena = arena

    async def offer(self) -> bytes:
        if self._arena.fd is None:
            raise unavailable("this replica's arena is private; remove data_plane.shared_arena from the stage")
        return stage_pb2.ArenaAdvertisement(
            process_id=os.getpid(), size_bytes=self._arena.file_bytes, token=self._arena.token
        ).SerializeToString()

    async def connect(self, offer: bytes, producer: Producer) -> "ShmReader":
        if producer.arena_fd is None:
            raise unavailable(f"not on one host: {producer.replica} did not pass its arena's memory file")
        try:
            advertisement = stage_pb2.ArenaAdvertisement.FromString(offer)
            return ShmReader(_map(producer.arena_fd, advertisement))
        except (DecodeError, OSError, ValueError) as exc:
            raise unavailable(f"the arena of {producer.replica} cannot be mapped: {exc}") from exc

    async def close(self) -> None:
        """Does nothing, because the connector owns no resources."""


class ShmReader(InPlaceReader):
    """A reader that maps a producer's arena read-only. The mapping is removed when its last view has been deleted."""

    def __init__(self, mapping: mmap.mmap) -> None:
        self._mapping: mmap.mmap | None = mapping
        self._size_bytes = len(mapping)
        self._data_offset = data_offset_in(self._size_bytes)
        self._generations = memoryview(mapping)[PAGE_BYTES : self._data_offset].cast("Q")

    def view(self, place: ArenaRange) -> Bytes:
        offset, size_bytes, generation = place
        end = offset + size_bytes
        if size_bytes < 0 or offset < self._data_offset or end > self._size_bytes or self._mapping is None:
            raise InvalidChunkError(f"{size_bytes} bytes at {offset} are outside the producer's arena")
        generations = self._generations
        first, last = offset // PAGE_BYTES, (end - 1 if size_bytes else offset) // PAGE_BYTES
        if not generation or not generations[first] == generations[last] == generation:
            raise InvalidChunkError(
                f"{size_bytes} bytes at {offset} belong to a region that was freed", reason="STALE_REGION"
            )
        return np.ndarray(size_bytes, np.uint8, self._mapping, offset)

    async def close(self) -> None:
        self._mapping = None
        self._generations = memoryview(b"").cast("Q")


def _map(fd: int, advertisement: stage_pb2.ArenaAdvertisement) -> mmap.mmap:
    """Maps the producer's memory file `fd` for reading.

    Raises ValueError or OSError if the file is not the arena in `advertisement` or is not safe to read.
    """
    if fcntl.fcntl(fd, fcntl.F_GET_SEALS) & SEALS != SEALS:
        raise ValueError("its size is not sealed")
    if os.fstatvfs(fd).f_bsize != mmap.PAGESIZE:
        # Huge pages can run out when they are first read, which would kill the reading process.
        raise ValueError("it does not consist of normal pages")
    size_bytes = os.fstat(fd).st_size
    if size_bytes != advertisement.size_bytes:
        raise ValueError(f"it has {size_bytes} bytes, not {advertisement.size_bytes}")
    data_offset_in(size_bytes)
    mapping = mmap.mmap(fd, size_bytes, access=mmap.ACCESS_READ)
    if not secrets.compare_digest(mapping[:TOKEN_BYTES], advertisement.token):
        raise ValueError("its token differs from the offer's")
    if mapping[TOKEN_BYTES : TOKEN_BYTES + len(LAYOUT_NAME)] != LAYOUT_NAME:
        raise ValueError("another version of Stagemesh created it")
    return mapping
