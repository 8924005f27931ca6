"""The message by which a producer lets a consumer read its arena: plain numbers and names, checked when parsed."""

import hashlib
import struct
from dataclasses import dataclass

from stagemesh.connectors.arena.memory_file import TOKEN_BYTES, data_offset_in

_MAGIC = b"nixl1\0"
_DIGEST_BYTES = 16
_HEAD = struct.Struct(f"<{len(_MAGIC)}s{TOKEN_BYTES}sQQHHI")
_ADDRESS_SPACE_BYTES = 1 << 64


@dataclass(frozen=True)
class NixlOffer:
    """Names an arena's agent and address. Raises ValueError for numbers that do not describe an arena."""

    agent: str
    """The serving agent's name: replica, incarnation and a random part."""
    metadata: bytes
    """The agent's metadata, which only the library interprets."""
    address: int
    """The address of the arena file's first byte in the producer's process."""
    file_bytes: int
    token: bytes
    """The bytes at that address."""
    settings: str
    """The producer's library settings. The reader needs the same ones."""

    def __post_init__(self) -> None:
        data_offset_in(self.file_bytes)
        if self.address + self.file_bytes >= _ADDRESS_SPACE_BYTES:
            raise ValueError(f"an arena of {self.file_bytes} bytes at {self.address:#x} exceeds the address space")

    def pack(self) -> bytes:
        """Returns the offer as bytes."""
        texts = (self.agent.encode(), self.settings.encode(), self.metadata)
        head = _HEAD.pack(_MAGIC, self.token, self.address, self.file_bytes, *map(len, texts))
        message = head + b"".join(texts)
        return message + _digest(message)

    @classmethod
    def parse(cls, data: bytes) -> "NixlOffer":
        """Returns the offer that `data` contains. Raises ValueError for anything else."""
        if len(data) < _HEAD.size + _DIGEST_BYTES:
            raise ValueError(f"an offer of {len(data)} bytes is too short")
        data, digest = data[:-_DIGEST_BYTES], data[-_DIGEST_BYTES:]
        if _digest(data) != digest:
            # The library does not check its metadata, and crashes if it is damaged.
            raise ValueError("the offer was damaged in transit")
        magic, token, address, file_bytes, name_bytes, settings_bytes, metadata_bytes = _HEAD.unpack_from(data)
        settings_at = _HEAD.size + name_bytes
        metadata_at = settings_at + settings_bytes
        if magic != _MAGIC or len(data) != metadata_at + metadata_bytes:
            raise ValueError("the offer has another format or version")
        return cls(
            agent=data[_HEAD.size : settings_at].decode(),
            metadata=data[metadata_at:],
            address=address,
            file_bytes=file_bytes,
            token=token,
            settings=data[settings_at:metadata_at].decode(),
        )


def _digest(message: bytes) -> bytes:
    return hashlib.blake2b(message, digest_size=_DIGEST_BYTES).digest()
