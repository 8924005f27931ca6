"""ChunkPiece messages by hand: the same bytes on the wire as protobuf makes, with the payload copied once at each end.

Protobuf would copy a payload three times more: into the message, out of it, and into the parsed one.
A message is `PutChunkRequest{items: [PutItem{piece}, …]}` with the piece first; what follows is left to protobuf.
"""

from collections.abc import Iterator
from typing import NamedTuple

from google.protobuf.message import DecodeError

from stagemesh.common.errors import InvalidChunkError
from stagemesh.v1 import chunk_pb2

_ITEMS = b"\x12"  # PutChunkRequest.items, length-delimited
_PIECE = b"\x1a"  # PutItem.piece, length-delimited
_PAYLOAD = 0x22  # ChunkPiece.payload, length-delimited


class FragmentMessage(NamedTuple):
    """A message that begins with a piece."""

    piece: chunk_pb2.ChunkPiece
    """Without its payload."""
    payload: memoryview
    rest: memoryview
    """The message's other items."""


def encode(piece: chunk_pb2.ChunkPiece, payload: memoryview, *, rest: bytes = b"") -> bytes:
    """A message with `piece`, whose payload is given apart, and then the items of the message `rest`."""
    fields = piece.SerializeToString() + bytes((_PAYLOAD,)) + _varint(len(payload))
    item = _PIECE + _varint(len(fields) + len(payload))
    return b"".join((_ITEMS, _varint(len(item) + len(fields) + len(payload)), item, fields, payload, rest))


def decode(data: bytes) -> FragmentMessage | None:
    """The parts of a message that begins with a piece, or None; raises InvalidChunkError for a broken one."""
    if data[:1] != _ITEMS:
        return None
    view = memoryview(data)
    start, outer_end = _span(view, 1)
    if data[start : start + 1] != _PIECE:
        return None
    start, end = _span(view, start + 1)
    if end != outer_end:
        return None
    payload, fields = memoryview(b""), bytearray()
    for field_start, value_start, field_end in _fields(view, start, end):
        if view[field_start] == _PAYLOAD:
            payload = view[value_start:field_end]
        else:
            fields += view[field_start:field_end]
    try:
        piece = chunk_pb2.ChunkPiece.FromString(bytes(fields))
    except DecodeError as exc:
        raise InvalidChunkError("a piece cannot be read") from exc
    return FragmentMessage(piece, payload, view[end:])


def _fields(view: memoryview, start: int, end: int) -> Iterator[tuple[int, int, int]]:
    """Where each field, its value and its end lie; ChunkPiece has numbers and length-delimited fields alone."""
    while start < end:
        tag, value_start = _read_varint(view, start)
        match tag & 7:
            case 0:
                _, field_end = _read_varint(view, value_start)
            case 2:
                value_start, field_end = _span(view, value_start)
            case _:
                raise InvalidChunkError("a piece holds a field of a kind that it has none of")
        if field_end > end:
            raise InvalidChunkError("a piece's field ends outside of it")
        yield start, value_start, field_end
        start = field_end


def _span(view: memoryview, at: int) -> tuple[int, int]:
    """Where a length-delimited value starts and ends."""
    size, start = _read_varint(view, at)
    if start + size > len(view):
        raise InvalidChunkError("a message is shorter than it says")
    return start, start + size


def _varint(number: int) -> bytes:
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)


def _read_varint(view: memoryview, at: int) -> tuple[int, int]:
    number = shift = 0
    for byte in view[at : at + 10]:
        number |= (byte & 0x7F) << shift
        at += 1
        if byte < 0x80:
            return number, at
        shift += 7
    raise InvalidChunkError("a number in a message does not end")
