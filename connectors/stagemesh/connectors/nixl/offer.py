"""The offer message, which contains the names and numbers that a consumer needs to read a producer's arena."""

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
    """Describes an arena's agent and memory. Raises ValueError if the numbers cannot describe an arena."""

    agent: str
    """The serving agent's name, which consists of replica, incarnation and a random part."""
    metadata: bytes
    """The agent's metadata, which only the library interprets."""
    address: int
    """The address of the arena file's first byte in the producer's process."""
    file_bytes: int
    token: bytes
    """The bytes at the start of the arena file, which the reader verifies."""
    settings: str
    """The producer's library settings, which must equal the reader's settings."""

    def __post_init__(self) -> None:
        data_offset_in(self.file_bytes)
        if not 0 <= self.address < _ADDRESS_SPACE_BYTES - self.file_bytes:
            raise ValueError(f"an arena of {self.file_bytes} bytes at {self.address:#x} exceeds the address space")
        if len(self.token) != TOKEN_BYTES:
            raise ValueError(f"its token has {len(self.token)} bytes, not {TOKEN_BYTES}")

    def pack(self) -> bytes:
        """Returns the serialized offer, including a format version and a digest."""
        body = msgspec.msgpack.encode(self)
        return _FORMAT + _digest(body) + body

    @classmethod
    def parse(cls, data: bytes) -> "NixlOffer":
        """Returns the offer in `data`. Raises ValueError if `data` is not a valid offer of this version."""
        body = data[_BODY_AT:]
        if not data.startswith(_FORMAT):
            raise ValueError("the offer has another format or version")
        if data[len(_FORMAT) : _BODY_AT] != _digest(body):
            # The library does not check the metadata, and crashes if the metadata is damaged.
            raise ValueError("the offer was damaged in transit")
        try:
            return msgspec.msgpack.decode(body, type=cls)
        except msgspec.MsgspecError as exc:
            raise ValueError(str(exc)) from exc


def _digest(body: bytes) -> bytes:
    return hashlib.blake2b(body, digest_size=_DIGEST_BYTES).digest()
