"""The messages between a worker that writes hidden states and its replica. Does not import vLLM."""

from dataclasses import dataclass

import msgspec

from stagemesh.connectors.arena.memory_file import ALIGNMENT_BYTES
from stagemesh.connectors.arena.worker_writer import Handle, PartitionTicket

CONFIG_KEY = "stagemesh_layers"
"""The key of vLLM's `additional_config` under which the emitted inner layers are listed."""
OVERFLOW_DIVISOR = 4
"""The size of the overflow memory is the size of the worker's memory divided by this number.

The replica copies rows out of the overflow memory at once, so that unread rows do not block other rows.
"""
_WRITES_IN_OVERFLOW = 2
"""The number of writes that fit into the overflow memory, so that the worker can write while the replica copies."""


def max_rows(overflow_bytes: int, *, row_bytes: int, tensors: int) -> int:
    """Returns the maximum number of rows in one write. `row_bytes` is the size of a row in all tensors together."""
    return (overflow_bytes // _WRITES_IN_OVERFLOW - tensors * ALIGNMENT_BYTES) // row_bytes


def min_overflow_bytes(*, row_bytes: int, tensors: int) -> int:
    """Returns the minimum size of the overflow memory in bytes, which suffices for writes of one row."""
    return _WRITES_IN_OVERFLOW * (row_bytes + tensors * ALIGNMENT_BYTES)


@dataclass(frozen=True)
class Attachment:
    """The addresses and tickets through which a worker accesses its replica."""

    address: str
    """The abstract unix socket for messages. The first message is `token`. Each further message is a `StepRows`."""
    token: bytes
    rows: PartitionTicket
    """Memory for rows. Rows remain in it until they are read."""
    overflow: PartitionTicket
    """Memory for rows when `rows` is full. The replica copies the rows out at once."""
    dtype: str
    """The dtype of the emitted tensors, by its name in the API and in torch."""
    tensors: list[str]
    """The names of the emitted tensors."""


class RequestedRows(msgspec.Struct, frozen=True):
    """A request's argument for vLLM's processes: the rows that the request emits."""

    name: str
    first_position: int
    """The position of the first emitted row. Earlier rows are not emitted."""


class RequestRows(msgspec.Struct, frozen=True, array_like=True):
    """The rows of one request within the rows of a step."""

    name: str
    position: int
    """The position of the first row among the request's tokens."""
    first: int
    """The index of the first row in the tensors."""
    count: int


class StepRows(msgspec.Struct, frozen=True, array_like=True):
    """Rows of one engine step. Each emitted layer has a tensor [rows, hidden].

    A step with many rows is split into several messages.
    """

    handle: Handle
    requests: list[RequestRows]
    overflow: bool
    """Whether the rows are in the overflow memory."""


encode_attachment = msgspec.msgpack.Encoder().encode
decode_attachment = msgspec.msgpack.Decoder(Attachment).decode
encode_rows = msgspec.msgpack.Encoder().encode
decode_rows = msgspec.msgpack.Decoder(StepRows).decode
