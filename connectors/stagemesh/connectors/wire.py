"""Converts packets and flow data to and from protobuf messages, and checks the messages that a peer has sent."""

import hashlib
import math
import struct
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Literal, TypeAlias

import numpy as np

from stagemesh.common.errors import InvalidChunkError, InvalidRequestError, UnsupportedError
from stagemesh.common.wire.tensors import (
    Array,
    Tensors,
    as_bytes,
    checked_layout,
    dtype_name,
    dtype_to_wire,
    fill_message,
    from_message,
    is_ticket_kind,
    read_inline,
)
from stagemesh.common.wire.versions import refuse_unknown
from stagemesh.connectors.arena.memory import layout_of
from stagemesh.connectors.base import ArenaRange, Bytes, InPlaceReader
from stagemesh.connectors.packets import (
    MAX_DESCRIPTOR_BYTES,
    EdgeKey,
    FirstRows,
    MetadataValue,
    Packet,
    Ticket,
    rows_of,
)
from stagemesh.rpc.channels import MAX_NAME
from stagemesh.v1 import chunk_pb2, tensor_pb2

MAX_TENSORS = 1024
MAX_METADATA = 64
MAX_TEXT = 1024
MAX_TICKETS = 16
ITEM_BYTES, VALUE_BYTES = 200, 256
"""The approximate size of a chunk in bytes, without the payload, and the size of each of its tensors, tickets and
metadata values. They are so large that a message of many chunks never exceeds the consumer's limit of fields.
"""
MAX_OVERHEAD_BYTES = 32 << 20
"""The maximum memory that the unread chunks of a flow take in addition to their payload, in bytes."""
FACTS: Mapping[str, int] = {
    "context_frames": 1 << 32,
    "token_start": 1 << 64,
    "prompt_tokens": 1 << 32,
    "preview": 2,
    "engine_steps": 1 << 64,
}
"""The metadata that ChunkData has as fields, by name, with the number that each value is less than."""
_OPTIONAL_FACTS: Sequence[Literal["context_frames", "token_start", "prompt_tokens", "engine_steps"]] = (
    "context_frames",
    "token_start",
    "prompt_tokens",
    "engine_steps",
)
MAX_BESIDE_TICKETS_BYTES = 64 << 10
"""The maximum total size, in bytes, of the tensors of a chunk with tickets. They are always sent inline."""

Location: TypeAlias = Literal["shm", "streamed"]
"""The name of the protobuf field that contains a tensor's location.

The field `shm` is a range of the producer's arena. The field `streamed` is a range of the bytes that were sent as
fragments before the chunk.
"""

_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")


def key_to_wire(key: EdgeKey) -> chunk_pb2.EdgeKey:
    """Converts a flow key to its protobuf message."""
    return chunk_pb2.EdgeKey(request_id=key.request_id, edge=key.edge, attempt=key.attempt)


def key_from_wire(message: chunk_pb2.EdgeKey) -> EdgeKey:
    """Converts a protobuf message to a flow key.

    Raises InvalidRequestError (MALFORMED_MESSAGE) if a name in it is too long, because errors and replies repeat it.
    """
    # Each access to a text field of a message decodes the text.
    request_id, edge = message.request_id, message.edge
    if len(request_id) > MAX_NAME or len(edge) > MAX_NAME:
        problem = f"the key of a flow has a name of more than {MAX_NAME} characters"
        raise InvalidRequestError(problem, reason="MALFORMED_MESSAGE")
    return EdgeKey(request_id, edge, message.attempt)


def metadata_from_wire(data: chunk_pb2.ChunkData) -> dict[str, MetadataValue]:
    """Returns the metadata of a chunk by name, including FACTS.

    Raises InvalidChunkError if there are more than MAX_METADATA values, if a value is unset, if a text has more than
    MAX_TEXT characters, if a name has more than MAX_NAME characters, or if it is one of FACTS.
    """
    values: dict[str, MetadataValue] = {}
    if data.metadata:
        if len(data.metadata) > MAX_METADATA:
            raise InvalidChunkError(
                f"{len(data.metadata)} metadata values in a chunk; at most {MAX_METADATA} are accepted"
            )
        for name, value in data.metadata.items():
            content = from_message(value)
            if content is None or (isinstance(content, str) and len(content) > MAX_TEXT) or len(name) > MAX_NAME:
                raise InvalidChunkError(f"metadata {name[:64]!r} is unset, or has a text or a name that is too long")
            if name in FACTS:
                raise InvalidChunkError(f"metadata has {name!r}, which is a field of ChunkData")
            values[name] = content
    for name in _OPTIONAL_FACTS:
        if data.HasField(name):
            values[name] = getattr(data, name)
    if data.preview:
        values["preview"] = True
    return values


def check_metadata(metadata: Mapping[str, object]) -> None:
    """Raises InvalidChunkError if metadata cannot be sent: what `metadata_from_wire` rejects, and other types.

    An item that cannot be encoded would otherwise block the stream, which other flows share.
    """
    if len(metadata) > MAX_METADATA:
        raise InvalidChunkError(f"{len(metadata)} metadata values in a packet; at most {MAX_METADATA} are sent")
    for name, value in metadata.items():
        if not isinstance(value, bool | int | float | str):
            raise InvalidChunkError(f"metadata {name!r} is a {type(value).__name__}; use bool, int, float or str")
        if name in FACTS and not (isinstance(value, int) and 0 <= value < FACTS[name]):
            raise InvalidChunkError(f"metadata {name!r} is {value!r}; it must be a whole number from 0")
        if isinstance(value, int) and name not in FACTS and not -(1 << 63) <= value < 1 << 63:
            raise InvalidChunkError(f"metadata {name!r} is {value}, which does not fit into 64 bits")
        for text in (name, value) if isinstance(value, str) else (name,):
            if len(text) > MAX_TEXT or not _is_encodable(text):
                raise InvalidChunkError(f"metadata {name[:64]!r} has a text that is too long, or is not Unicode text")


def _is_encodable(text: str) -> bool:
    try:
        return bool(text.isascii() or text.encode())
    except UnicodeEncodeError:
        return False


class PacketShape:
    """The names, dtypes, shapes and layout of a packet's tensors, without the tensors' bytes.

    A flow reuses the shape of its previous packet if possible, because consecutive packets usually have the same shape.
    """

    __slots__ = ("_shapes", "_tickets", "digested", "fields", "layout", "rows", "size_bytes")

    def __init__(self, packet: Packet) -> None:
        """Describes the tensors and tickets of `packet`.

        Raises InvalidChunkError if the packet has more than MAX_TENSORS tensors, if a tensor's dtype cannot be sent, or
        if the packet's tickets cannot be sent.
        """
        if packet.tickets:
            _check_tickets(packet)
        if len(packet.tensors) > MAX_TENSORS:
            raise InvalidChunkError(f"{len(packet.tensors)} tensors in a chunk; at most {MAX_TENSORS} are sent")
        self._shapes = [(name, tensor.dtype, tensor.shape) for name, tensor in packet.tensors.items()]
        self.fields = tuple(
            (name, dtype_to_wire(dtype_name(tensor)), tensor.shape, tensor.nbytes)
            for name, tensor in packet.tensors.items()
        )
        self.layout = layout_of(packet.tensors)
        self.size_bytes = packet.size_bytes
        self._tickets = tuple(packet.tickets)
        self.rows = rows_of(packet)
        """The name and the number of rows of each tensor, and then of each ticket."""
        digested = [_digested(name.encode(), dtype, dims) for name, dtype, dims, _ in self.fields]
        digested += [_digested(name.encode(), tensor_pb2.DATA_TYPE_UNSPECIFIED, ()) for name in self._tickets]
        self.digested = _U32.pack(len(digested)) + b"".join(digested)
        """The bytes that describe these tensors in a flow's digest. ChunkEnd.digest in the API defines them."""

    def fits(self, packet: Packet) -> bool:
        """Returns whether `packet` has tensors with these names, dtypes and shapes in this order, and these tickets."""
        if len(self._shapes) != len(packet.tensors):
            return False
        if (packet.tickets or self._tickets) and tuple(packet.tickets) != self._tickets:
            return False
        # Runs once for each chunk at each end of a flow. A loop needs a third of the time of a generator.
        for (name, dtype, shape), (other, tensor) in zip(self._shapes, packet.tensors.items(), strict=True):
            if name != other or tensor.shape != shape or (tensor.dtype is not dtype and tensor.dtype != dtype):
                return False
        return True


def _check_tickets(packet: Packet) -> None:
    if len(packet.tickets) > MAX_TICKETS:
        raise InvalidChunkError(f"{len(packet.tickets)} tickets in a chunk; at most {MAX_TICKETS} are sent")
    if packet.tickets.keys() & packet.tensors.keys():
        raise InvalidChunkError(f"a ticket and a tensor of a chunk have the same name: {', '.join(packet.tickets)}")
    if packet.size_bytes > MAX_BESIDE_TICKETS_BYTES:
        raise InvalidChunkError(
            f"the tensors of a packet with tickets have {packet.size_bytes} bytes; at most {MAX_BESIDE_TICKETS_BYTES} "
            "are sent; emit them in a packet of their own"
        )


def _digested(name: bytes, dtype: int, dims: tuple[int, ...]) -> bytes:
    """Returns the bytes that describe one tensor in a flow's digest."""
    return _U32.pack(len(name)) + name + struct.pack(f"<II{len(dims)}Q", dtype, len(dims), *dims)


def shape_of(packet: Packet, *, last: PacketShape | None) -> PacketShape:
    """Returns the shape of a packet.

    `last` is the shape of the previous packet, or None if there is none. If the shapes are equal, returns `last`, so
    that equal packets share one object.
    """
    return last if last is not None and last.fits(packet) else PacketShape(packet)


def fill_metadata(data: chunk_pb2.ChunkData, metadata: Mapping[str, MetadataValue]) -> None:
    """Adds a packet's metadata to `data`, of which FACTS are fields."""
    for name, value in metadata.items():
        if name in FACTS:
            setattr(data, name, value)
        else:
            fill_message(data.metadata[name], value)


def fill_inline(data: chunk_pb2.ChunkData, tensors: Tensors, shape: PacketShape, *, first_rows: FirstRows) -> None:
    """Adds a packet's tensors to `data`, including the bytes of the tensors."""
    data.size_bytes = shape.size_bytes
    for (name, dtype, dims, size_bytes), first_row in zip(shape.fields, first_rows, strict=False):
        message = data.tensors.add(name=name, dtype=dtype, shape=dims, first_row=first_row)
        if size_bytes:
            message.inline = tensors[name].tobytes()


def fill_in_arena(
    data: chunk_pb2.ChunkData, shape: PacketShape, *, first_rows: FirstRows, places: Iterable[ArenaRange], lease_id: int
) -> None:
    """Adds a packet's tensors to `data` as ranges of the producer's arena.

    `places` are the ranges of the tensors, in order. `lease_id` identifies the consumer's lease on these ranges.
    """
    data.size_bytes, data.lease_id = shape.size_bytes, lease_id
    for (name, dtype, dims, size_bytes), place, first_row in zip(shape.fields, places, first_rows, strict=True):
        message = data.tensors.add(name=name, dtype=dtype, shape=dims, first_row=first_row)
        if size_bytes:
            region = message.shm
            region.offset, region.size_bytes, region.generation = place


def fill_streamed(data: chunk_pb2.ChunkData, shape: PacketShape, *, first_rows: FirstRows) -> None:
    """Adds a packet's tensors to `data` as references to fragments that are sent before the chunk."""
    data.size_bytes = shape.size_bytes
    offset = 0
    for (name, dtype, dims, size_bytes), first_row in zip(shape.fields, first_rows, strict=True):
        message = data.tensors.add(name=name, dtype=dtype, shape=dims, first_row=first_row)
        if size_bytes:
            message.streamed.offset, message.streamed.size_bytes = offset, size_bytes
        offset += size_bytes


def add_tickets(
    data: chunk_pb2.ChunkData, tickets: Mapping[str, Ticket], *, first_rows: FirstRows, lease_id: int
) -> None:
    """Adds a packet's tickets to `data`, after its tensors.

    `first_rows` are the first rows of the tickets. `lease_id` identifies the consumer's lease on them, and is 0 if it
    has none.
    """
    if lease_id:
        data.lease_id = lease_id
    for (name, ticket), first_row in zip(tickets.items(), first_rows, strict=True):
        handover = data.tensors.add(name=name, first_row=first_row).handover
        handover.kind, handover.state_descriptor = ticket.kind, ticket.descriptor
        handover.size_bytes, handover.time_limit_s = ticket.size_bytes, ticket.time_limit_s


class FlowDigest:
    """A running digest of the shapes of a flow's data chunks. The digest does not cover the bytes of the tensors.

    ChunkEnd.digest in the API defines the bytes over which it is computed. The producer sends the digest in the End
    message. The consumer compares this digest with the digest of the received chunks.
    """

    def __init__(self) -> None:
        self.count = 0
        self._hash = hashlib.sha256()
        self._run, self._digested = 0, b""

    def add(self, shape: PacketShape) -> None:
        """Adds the shape of the flow's next data chunk to the digest."""
        self.count += 1
        if shape.digested != self._digested:
            self._end_run()
            self._digested = shape.digested
        self._run += 1

    def end(self) -> chunk_pb2.ChunkEnd:
        """Returns the End message with the number of chunks and the digest.

        Call this method once, after the last data chunk.
        """
        self._end_run()
        return chunk_pb2.ChunkEnd(count=self.count, digest=self._hash.digest())

    def _end_run(self) -> None:
        if self._run:
            self._hash.update(_U64.pack(self._run) + self._digested)
            self._run = 0


# -- chunks of a producer


def checked_head(data: chunk_pb2.ChunkData) -> tuple[FirstRows, int]:
    """Returns the first rows of a chunk's tensors and tickets, and the approximate memory that the chunk takes in
    addition to its payload, in bytes.

    Raises InvalidChunkError if the chunk has more than MAX_TENSORS tensors.
    """
    tensors = data.tensors
    if len(tensors) > MAX_TENSORS:
        raise InvalidChunkError(f"{len(tensors)} tensors in a chunk; at most {MAX_TENSORS} are accepted")
    values = len(tensors) + len(data.metadata)
    overhead_bytes = ITEM_BYTES + VALUE_BYTES * values + max(0, data.ByteSize() - data.size_bytes)
    return [tensor.first_row for tensor in tensors], overhead_bytes


def arena_ranges(data: chunk_pb2.ChunkData) -> list[ArenaRange]:
    """Returns the arena range of each tensor that is located in the producer's arena, in the order of the tensors.

    Raises InvalidChunkError if the total size of the ranges exceeds the size that the chunk states.
    """
    places: list[ArenaRange] = []
    size_bytes = 0
    for message in data.tensors:
        if message.HasField("shm"):
            region = message.shm
            places.append(ArenaRange(region.offset, region.size_bytes, region.generation))
            size_bytes += region.size_bytes
    if size_bytes > data.size_bytes:
        raise InvalidChunkError("a chunk's tensors are larger than the chunk claims to be")
    return places


def read_in_place(data: chunk_pb2.ChunkData, reader: InPlaceReader) -> tuple[Packet, list[Bytes]]:
    """Returns the packet of a chunk that is read in place, and the arena views that contain the packet's tensors.

    Raises InvalidChunkError if the fields of the chunk contradict each other, if no tensor is located in the arena, or
    if a region of the arena was freed.
    """
    views: list[Bytes] = []
    tensors: dict[str, Array] = {}
    for message in data.tensors:
        name, view = _name_of(message), None
        if message.HasField("shm"):
            region = message.shm
            view = reader.view(ArenaRange(region.offset, region.size_bytes, region.generation))
            views.append(view)
        tensors[name] = _tensor(message, view)
    if not views:
        raise InvalidChunkError("a chunk has a lease but no tensor in the arena")
    return _checked(data, tensors), views


def packet_of(data: chunk_pb2.ChunkData, contents: Sequence[Bytes], *, location: Location) -> Packet:
    """Converts a chunk message to a packet.

    `contents` are the bytes of the tensors whose location is `location`, in the order of the tensors. The other tensors
    are inline or empty. Raises InvalidChunkError if the fields of the chunk contradict each other.
    """
    remaining = iter(contents)
    tensors: dict[str, Array] = {}
    for message in data.tensors:
        name = _name_of(message)
        tensors[name] = _tensor(message, next(remaining) if message.HasField(location) else None)
    return _checked(data, tensors)


MakeTicket: TypeAlias = Callable[[tensor_pb2.Handover], Ticket]


def read_with_tickets(data: chunk_pb2.ChunkData, make_ticket: MakeTicket) -> Packet:
    """Returns the packet of a chunk that has tickets. `make_ticket` converts each ticket.

    Raises InvalidChunkError if the fields of the chunk contradict each other.
    """
    tensors: dict[str, Array] = {}
    handovers: dict[str, tensor_pb2.Handover] = {}
    for message in data.tensors:
        name = _name_of(message)
        if message.HasField("handover"):
            handovers[name] = _checked_handover(message)
        elif handovers:
            raise InvalidChunkError("a chunk has a tensor after a ticket")
        else:
            tensors[name] = _tensor(message, None)
    if len(handovers) > MAX_TICKETS or data.size_bytes > MAX_BESIDE_TICKETS_BYTES:
        raise InvalidChunkError("a chunk has too many tickets, or too large tensors in addition to its tickets")
    if tensors.keys() & handovers.keys():
        raise InvalidChunkError("a ticket and a tensor of a chunk have the same name")
    packet = _checked(data, tensors, tickets=len(handovers))
    # A ticket holds the chunk's lease, and therefore is made only for a valid chunk.
    tickets = {name: make_ticket(each) for name, each in handovers.items()}
    return Packet(tensors, packet.metadata, tickets)


def _checked_handover(message: tensor_pb2.Tensor) -> tensor_pb2.Handover:
    handover = message.handover
    if not is_ticket_kind(handover.kind):
        raise InvalidChunkError(f"ticket {message.name!r} has the kind {handover.kind[:64]!r}, which is not a name")
    if len(handover.state_descriptor) > MAX_DESCRIPTOR_BYTES:
        raise InvalidChunkError(f"the descriptor of ticket {message.name!r} has more than {MAX_DESCRIPTOR_BYTES} bytes")
    if not 0 < handover.time_limit_s < math.inf:
        raise InvalidChunkError(f"ticket {message.name!r} has a time limit of {handover.time_limit_s} s")
    if message.dtype or message.shape:
        raise InvalidChunkError(f"ticket {message.name!r} has a dtype or a shape")
    return handover


def _checked(data: chunk_pb2.ChunkData, tensors: dict[str, Array], *, tickets: int = 0) -> Packet:
    """Returns a packet with `tensors`. `tickets` is the number of tickets with different names in the chunk."""
    packet = Packet(tensors, metadata_from_wire(data))
    if len(tensors) + tickets != len(data.tensors) or packet.size_bytes != data.size_bytes:
        raise InvalidChunkError("a chunk's tensors share a name, or their size differs from the size of the chunk")
    if data.HasField("checksum") and data.checksum.algorithm == chunk_pb2.CHECKSUM_ALGORITHM_CRC32:
        value = 0
        for tensor in tensors.values():
            value = zlib.crc32(as_bytes(tensor), value)
        if value != data.checksum.value:
            problem = (
                f"the bytes of a chunk have the CRC-32 {value:#010x}, but were sent with {data.checksum.value:#010x}"
            )
            raise InvalidChunkError(problem, reason="CHECKSUM_MISMATCH")
    return packet


def _name_of(message: tensor_pb2.Tensor) -> str:
    name = message.name
    if len(name) > MAX_NAME:
        raise InvalidChunkError(f"a tensor of a chunk has a name of more than {MAX_NAME} characters")
    return name


def _tensor(message: tensor_pb2.Tensor, content: Bytes | None) -> Array:
    if content is not None:
        dtype, shape = checked_layout(message, size_bytes=content.nbytes)
        return content.view(dtype).reshape(shape)
    if message.HasField("inline"):
        return read_inline(message)
    if message.HasField("handover"):
        raise InvalidChunkError(f"ticket {message.name!r} has no lease, or is before a tensor")
    if message.HasField("device"):
        raise UnsupportedError(
            f"tensor {message.name!r} is in the memory of a device, which this replica does not read",
            reason="UNKNOWN_KIND",
        )
    if message.WhichOneof("location") is not None:
        raise InvalidChunkError(f"tensor {message.name!r} uses a connector that was not negotiated")
    try:
        dtype, shape = checked_layout(message, size_bytes=0)
    except InvalidChunkError:
        refuse_unknown(message, of=f"the producer of tensor {message.name!r}")
        raise
    return np.empty(shape, dtype)
