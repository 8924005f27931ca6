"""The message by which a producer lets a consumer read its arena: plain numbers and names, checked when parsed."""

import hashlib
from dataclasses import dataclass

import msgspec

from stagemesh.connectors.arena.memory_file import TOKEN_BYTES, data_offset_in

_FORMAT = b"nixl2\0"
_DIGEST_BYTES = 16
_BODY_AT = len(_FORMAT) + _DIGEST_BYTES
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
        if not 0 <= self.address < _ADDRESS_SPACE_BYTES - self.file_bytes:
            raise ValueError(f"an arena of {self.file_bytes} bytes at {self.address:#x} exceeds the address space")
        if len(self.token) != TOKEN_BYTES:
            raise ValueError(f"its token has {len(self.token)} bytes, not {TOKEN_BYTES}")

    def pack(self) -> bytes:
        """Returns the offer as bytes."""
        body = msgspec.msgpack.encode(self)
        return _FORMAT + _digest(body) + body

    @classmethod
    def parse(cls, data: bytes) -> "NixlOffer":
        """Returns the offer that `data` contains. Raises ValueError for anything else."""
        body = data[_BODY_AT:]
        if not data.startswith(_FORMAT):
            raise ValueError("the offer has another format or version")
        if data[len(_FORMAT) : _BODY_AT] != _digest(body):
            # The library does not check its metadata, and crashes if it is damaged.
            raise ValueError("the offer was damaged in transit")
        try:
            return msgspec.msgpack.decode(body, type=cls)
        except msgspec.MsgspecError as exc:
            raise ValueError(str(exc)) from exc


def _digest(body: bytes) -> bytes:
    return hashlib.blake2b(body, digest_size=_DIGEST_BYTES).digest()
