"""The messages that a worker sends to its replica about hidden states. This module does not import vLLM."""

from dataclasses import dataclass

import msgspec

from stagemesh.connectors.arena.memory_file import ALIGNMENT_BYTES
from stagemesh.connectors.arena.worker_writer import Handle, PartitionTicket

CONFIG_KEY = "stagemesh_layers"
"""The key of vLLM's `additional_config` under which the numbers of the emitted inner layers are listed."""
OVERFLOW_DIVISOR = 4
"""The ratio of the worker's total memory in the arena to its overflow memory.

The replica copies rows out of the overflow memory immediately, so that unread rows do not block other rows.
"""
_WRITES_IN_OVERFLOW = 2
"""The number of writes of maximum size that fit into the overflow memory.

With two, the worker can write while the replica copies.
"""


def max_rows(overflow_bytes: int, *, row_bytes: int, tensors: int) -> int:
    """Returns the maximum number of rows in one write.

    `row_bytes` is the total size of one row in all tensors. `tensors` is the number of tensors.
    """
    return (overflow_bytes // _WRITES_IN_OVERFLOW - tensors * ALIGNMENT_BYTES) // row_bytes


def min_overflow_bytes(*, row_bytes: int, tensors: int) -> int:
    """Returns the minimum size of the overflow memory in bytes, which suffices for writes of one row each.

    `row_bytes` is the total size of one row in all tensors. `tensors` is the number of tensors.
    """
    return _WRITES_IN_OVERFLOW * (row_bytes + tensors * ALIGNMENT_BYTES)


@dataclass(frozen=True)
class Attachment:
    """The data that a worker needs to connect to its replica and to write into the replica's arena."""

    address: str
    """The name of the abstract Unix socket for messages to the replica.

    The first message is `token`. Each further message is a `StepRows`.
    """
    token: bytes
    rows: PartitionTicket
    """The arena's partition for rows. Rows remain in the partition until the consumer has read them."""
    overflow: PartitionTicket
    """The arena's partition for rows that do not fit into `rows`.

    The replica copies the rows out of this partition immediately.
    """
    dtype: str
    """The name of the emitted tensors' dtype, which is the same in the API and in torch."""
    tensors: list[str]
    """The names of the emitted tensors."""


class RequestedRows(msgspec.Struct, frozen=True):
    """The rows that a request emits.

    The replica sends this object to vLLM's workers with the request (`extra_arguments`).
    """

    name: str
    first_position: int
    """The token position of the first emitted row. Earlier rows are not emitted."""


class RequestRows(msgspec.Struct, frozen=True, array_like=True):
    """The location of one request's rows in the tensors of a `StepRows` message."""

    name: str
    position: int
    """The position of the first row among the request's tokens."""
    first: int
    """The index of the first row in the tensors."""
    count: int


class StepRows(msgspec.Struct, frozen=True, array_like=True):
    """A message that reports written rows of one engine step. Each emitted layer has a tensor [rows, hidden].

    A step with many rows is reported in several messages.
    """

    handle: Handle
    requests: list[RequestRows]
    overflow: bool
    """Whether the rows are in the overflow memory."""


encode_attachment = msgspec.msgpack.Encoder().encode
decode_attachment = msgspec.msgpack.Decoder(Attachment).decode
encode_rows = msgspec.msgpack.Encoder().encode
decode_rows = msgspec.msgpack.Decoder(StepRows).decode
