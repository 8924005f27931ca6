"""Fragments, in which the bytes of large chunks are sent over a stream: their messages and their assembly."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from google.protobuf.message import DecodeError

from stagemesh.common.errors import InvalidChunkError
from stagemesh.common.wire.encoding import parse_message, read_field, tag_of, varint
from stagemesh.common.wire.tensors import Tensors
from stagemesh.connectors.arena.arena import Arena
from stagemesh.connectors.base import Bytes, MemoryAccount
from stagemesh.connectors.packets import EdgeKey
from stagemesh.v1 import chunk_pb2, stage_pb2

FRAGMENT_BYTES = 256 << 10
"""The number of payload bytes of each fragment of a chunk that is larger than WHOLE_CHUNK_BYTES.

Larger fragments would delay the messages of other flows longer.
"""
WHOLE_CHUNK_BYTES = MAX_FRAGMENT_BYTES = 1 << 20
"""The maximum size, in bytes, of a chunk of which each tensor is sent as one fragment, and of a received fragment.

If such a chunk has only one tensor, the consumer uses the tensor in place, without a copy.
"""
PAYLOAD_ALIGNMENT = 16
"""The alignment, in bytes, of a fragment's payload within its message. The largest alignment that a dtype requires."""
_MAX_FIELDS_BYTES = 16 << 10
"""The size of a fragment's fields before its payload, and of those after it. Larger ones are parsed by protobuf."""
_ITEMS = tag_of(stage_pb2.PutChunkRequest.DESCRIPTOR, "items")
_CHUNK, _KEY = tag_of(stage_pb2.PutItem.DESCRIPTOR, "chunk"), tag_of(chunk_pb2.Chunk.DESCRIPTOR, "key")
_MAX_KEY_FIELDS = 100
_FRAGMENT = tag_of(stage_pb2.PutItem.DESCRIPTOR, "fragment")
_PAYLOAD = tag_of(chunk_pb2.ChunkFragment.DESCRIPTOR, "payload")


class Fragment(NamedTuple):
    """A part of a packet's bytes. A message contains at most one fragment."""

    message: chunk_pb2.ChunkFragment
    """The protobuf message of the fragment, without the payload."""
    payload: memoryview


def split_into_fragments(key: chunk_pb2.EdgeKey, tensors: Tensors, *, total_bytes: int, seq: int) -> Iterator[Fragment]:
    """Yields the fragments of the tensors of chunk `seq` in order. A fragment contains bytes of only one tensor.

    Every fragment contains `key`, `seq`, and `total_bytes`, which is the total size of the tensors.
    """
    base = 0
    max_bytes = WHOLE_CHUNK_BYTES if total_bytes <= WHOLE_CHUNK_BYTES else FRAGMENT_BYTES
    for tensor in tensors.values():
        payload = np.ascontiguousarray(tensor).reshape(-1).view(np.uint8).data if tensor.nbytes else memoryview(b"")
        for start in range(0, len(payload), max_bytes):
            message = chunk_pb2.ChunkFragment(key=key, seq=seq, total_bytes=total_bytes, offset=base + start)
            yield Fragment(message, payload[start : start + max_bytes])
        base += len(payload)


# -- messages with fragments


class FragmentMessage(NamedTuple):
    """A PutChunkRequest whose first item is a fragment."""

    fragment: Fragment
    rest: memoryview
    """A serialized PutChunkRequest with the items that follow the fragment. Empty if no item follows."""


def encode_fragment(fragment: Fragment, *, rest: bytes = b"") -> bytes:
    """Returns a serialized PutChunkRequest that contains `fragment`, followed by the items in `rest`.

    `rest` is a serialized PutChunkRequest, or empty bytes if no item follows the fragment.

    This function encodes the message by hand, so that the producer and the consumer each copy the payload only once.
    Protobuf would copy the payload three more times: into the message object, from this object into the serialized
    bytes, and into the consumer's message object. Every protobuf parser accepts the result.

    The fragment's padding aligns the payload, so that the consumer can use the payload in place.
    """
    message, payload = fragment
    message.padding = bytes(PAYLOAD_ALIGNMENT)
    head = _fragment_head(message, len(payload))
    message.padding = bytes(PAYLOAD_ALIGNMENT - len(head) % PAYLOAD_ALIGNMENT)
    return b"".join((_fragment_head(message, len(payload)), payload, rest))


def _fragment_head(message: chunk_pb2.ChunkFragment, payload_bytes: int) -> bytes:
    """Returns the bytes of a PutChunkRequest up to the payload of its first item, which is a fragment."""
    fields = message.SerializeToString() + _PAYLOAD + varint(payload_bytes)
    item = _FRAGMENT + varint(len(fields) + payload_bytes)
    return _ITEMS + varint(len(item) + len(fields) + payload_bytes) + item + fields


def decode_fragment(data: bytes) -> FragmentMessage | None:
    """Parses a serialized PutChunkRequest whose first item is a fragment.

    Returns None if the first item is not a fragment with a payload, or if the message is malformed. Such a message must
    be parsed by protobuf.
    """
    view = memoryview(data)
    try:
        item, start, item_end = read_field(view, 0)
        kind, start, end = read_field(view, start)
        if item != _ITEMS[0] or kind != _FRAGMENT[0] or end != item_end:
            return None
        at = start
        tag, payload_start, payload_end = read_field(view, at)
        while tag != _PAYLOAD[0]:
            at = payload_end
            if at - start > _MAX_FIELDS_BYTES:
                return None
            tag, payload_start, payload_end = read_field(view, at)
        if payload_end > end or end > len(view) or end - payload_end > _MAX_FIELDS_BYTES:
            return None
        fields = view[start:at].tobytes() + view[payload_end:end].tobytes()
        message = chunk_pb2.ChunkFragment.FromString(fields)
    except (IndexError, KeyError, DecodeError):
        return None
    return FragmentMessage(Fragment(message, view[payload_start:payload_end]), view[end:])


def first_key(data: bytes) -> chunk_pb2.EdgeKey | None:
    """Returns the key of the chunk with which a serialized PutChunkRequest begins. Parses nothing else.

    Returns None if it begins otherwise. Raises InvalidRequestError (MALFORMED_MESSAGE) if the key is malformed.
    """
    start, end = 0, len(data)
    try:
        for expected in (_ITEMS, _CHUNK, _KEY):
            tag, start, end = read_field(memoryview(data), start)
            if tag != expected[0]:
                return None
    except (IndexError, KeyError, DecodeError):
        return None
    return parse_message(chunk_pb2.EdgeKey, data[start:end], max_fields=_MAX_KEY_FIELDS)


@dataclass(eq=False, slots=True)
class _Transfer:
    seq: int
    total_bytes: int
    buffer: Bytes | None = None
    received_bytes: int = 0


class FragmentAssembler:
    """Assembles the fragments that arrive over one stream, of one chunk of each flow at a time.

    `landing` returns the arena into which fragments are copied, or None if the arena is not available.
    """

    def __init__(self, landing: Callable[[], Arena | None]) -> None:
        self._landing = landing
        self._transfers: dict[EdgeKey, _Transfer] = {}

    def has_begun(self, key: EdgeKey, seq: int) -> bool:
        """Returns whether a fragment of chunk `seq` of a flow has arrived."""
        transfer = self._transfers.get(key)
        return transfer is not None and transfer.seq == seq

    def begin(self, key: EdgeKey, message: chunk_pb2.ChunkFragment) -> None:
        """Begins the chunk of the fragment `message`. Drops the fragments of another chunk of the flow."""
        self._transfers[key] = _Transfer(message.seq, message.total_bytes)

    def add(self, key: EdgeKey, fragment: Fragment) -> None:
        """Adds a fragment to its chunk, which has begun. Ignores repeated fragments.

        Copies the fragment into the chunk's buffer. If the fragment contains the whole chunk, is aligned, and makes up
        at least half of the received message, uses the message's memory as the buffer instead.

        Raises InvalidChunkError (FRAGMENT_GAP) if an earlier fragment is missing, or if the fragment does not fit into
        the buffer. Raises InvalidChunkError if the fragment is too large, or states another size of the chunk.
        """
        message, payload = fragment
        transfer = self._transfers[key]
        if len(payload) > MAX_FRAGMENT_BYTES or message.total_bytes != transfer.total_bytes:
            raise InvalidChunkError(f"a fragment of edge {key.edge} is too large, or states another total_bytes")
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

    def take(self, key: EdgeKey, seq: int, data: chunk_pb2.ChunkData) -> list[Bytes]:
        """Ends chunk `seq` of a flow. Returns the bytes of each tensor that was sent as fragments, in their order.

        Returns an empty list if no tensor was sent as fragments. Raises InvalidChunkError with the reason
        FRAGMENT_GAP if fragments are missing. Raises InvalidChunkError if the tensors do not follow each other, or if
        no tensor refers to the fragments.
        """
        streamed = [message for message in data.tensors if message.HasField("streamed")]
        transfer = self._transfers.get(key)
        if not streamed:
            if transfer is not None and transfer.seq == seq:
                raise InvalidChunkError(f"chunk {seq} of edge {key.edge} does not contain its fragments")
            return []
        complete = transfer is not None and transfer.received_bytes == transfer.total_bytes and transfer.seq == seq
        if transfer is None or transfer.buffer is None or not complete:
            raise InvalidChunkError(f"fragments of a chunk of edge {key.edge} are missing", reason="FRAGMENT_GAP")
        self.drop(key)
        parts, offset = list[Bytes](), 0
        for message in streamed:
            place = message.streamed
            if place.offset != offset or offset + place.size_bytes > transfer.total_bytes:
                raise InvalidChunkError(
                    f"tensor {message.name!r} of edge {key.edge} does not follow the tensor before it in the chunk"
                )
            offset += place.size_bytes
            parts.append(transfer.buffer[place.offset : offset])
        if offset != transfer.total_bytes:
            raise InvalidChunkError(
                f"a chunk of edge {key.edge} has {offset} bytes, but its fragments have {transfer.total_bytes}"
            )
        return parts

    def drop(self, key: EdgeKey) -> None:
        """Drops the fragments of a flow. Does nothing if the flow has none."""
        self._transfers.pop(key, None)

    def clear(self) -> None:
        """Drops all fragments."""
        self._transfers.clear()

    def _buffer(self, size_bytes: int) -> Bytes:
        """Returns a buffer of `size_bytes` bytes for a chunk. Uses the landing memory if it has enough free space.

        Otherwise, requests new memory from the operating system, which takes longer than copying the fragments.
        """
        landing = self._landing()
        if landing is None or size_bytes > landing.max_region_bytes:
            return np.empty(size_bytes, np.uint8)
        region = landing.try_allocate(size_bytes, MemoryAccount())
        return np.empty(size_bytes, np.uint8) if region is None else region.as_array()[:size_bytes]
