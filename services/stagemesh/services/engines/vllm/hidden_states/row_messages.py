"""The messages between a worker that writes hidden states and its replica. Imports nothing of vLLM."""

from dataclasses import dataclass

import msgspec

from stagemesh.connectors.arena.memory_file import ALIGNMENT_BYTES
from stagemesh.connectors.arena.worker_writer import Handle, PartitionTicket

CONFIG_KEY = "stagemesh_layers"
"""The key of vLLM's `additional_config` under which the emitted inner layers are listed."""
OVERFLOW_DIVISOR = 4
"""The size of the worker's memory divided by this number is the size of the overflow memory.

The replica copies rows out of the overflow memory at once, so that unread rows do not block other rows.
"""
_WRITES_IN_OVERFLOW = 2
"""The number of writes that fit into the overflow memory, so that the worker can write while the replica copies."""


def max_rows(overflow_bytes: int, *, row_bytes: int, tensors: int) -> int:
    """Returns the largest number of rows in one write. A row has `row_bytes` in all tensors together."""
    return (overflow_bytes // _WRITES_IN_OVERFLOW - tensors * ALIGNMENT_BYTES) // row_bytes


def min_overflow_bytes(*, row_bytes: int, tensors: int) -> int:
    """Returns the size of the overflow memory that one row needs."""
    return _WRITES_IN_OVERFLOW * (row_bytes + tensors * ALIGNMENT_BYTES)


@dataclass(frozen=True)
class Attachment:
    """The addresses through which a worker reaches its replica."""

    address: str
    """An abstract unix socket for messages: first `token`, then one `StepRows` each."""
    token: bytes
    rows: PartitionTicket
    """Memory for rows, which stay there until they are read."""
    overflow: PartitionTicket
    """Memory for rows while `rows` is full. The replica copies them out at once."""
    dtype: str
    """The dtype of the emitted tensors, by its name in the contract and in torch."""
    tensors: list[str]
    """The names of the emitted tensors."""


class RequestedRows(msgspec.Struct, frozen=True):
    """A request's argument: the rows that it emits."""

    name: str
    first_position: int
    """Rows before this position are not emitted."""


class RequestRows(msgspec.Struct, frozen=True, array_like=True):
    """A request's rows within a step's rows."""

    name: str
    position: int
    """The position of the first row among the request's tokens."""
    first: int
    """The index of the first row in the tensors."""
    count: int


class StepRows(msgspec.Struct, frozen=True, array_like=True):
    """The rows of one engine step, or a part of them: tensors [rows, hidden], one for each emitted layer."""

    handle: Handle
    requests: list[RequestRows]
    overflow: bool
    """Whether the rows are in the overflow memory."""


encode_attachment = msgspec.msgpack.Encoder().encode
decode_attachment = msgspec.msgpack.Decoder(Attachment).decode
encode_rows = msgspec.msgpack.Encoder().encode
decode_rows = msgspec.msgpack.Decoder(StepRows).decode
