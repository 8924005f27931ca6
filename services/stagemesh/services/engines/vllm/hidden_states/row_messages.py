"""Hidden states on their way from a worker process to its replica: what both ends agree on. Imports nothing of vLLM."""

from dataclasses import dataclass

import msgspec

from stagemesh.connectors.arena.memory_file import ALIGNMENT_BYTES
from stagemesh.connectors.arena.worker_writer import Handle, PartitionTicket

EXTRA_ARGUMENT = "stagemesh"
"""Under this name a request's `SamplingParams.extra_args` hold a `RequestedRows`, as builtins."""
CONFIG_KEY = "stagemesh_layers"
"""Under this name vLLM's `additional_config` lists the layers before the last."""
PASSING_PART = 4
"""A share's passing room is this part of it: however many rows lie in the rest, others get past them."""
_PARTS = 2
"""A write takes this part of the passing room at most, so that the next finds room while one is copied."""


def max_rows(passing_bytes: int, *, row_bytes: int, tensors: int) -> int:
    """How many rows are written at once where the passing room has that size; a row has `row_bytes` in all tensors."""
    return (passing_bytes // _PARTS - tensors * ALIGNMENT_BYTES) // row_bytes


def least_passing_bytes(*, row_bytes: int, tensors: int) -> int:
    """The passing room that one row needs."""
    return _PARTS * (row_bytes + tensors * ALIGNMENT_BYTES)


@dataclass(frozen=True)
class Attachment:
    """What a worker needs to know of its replica."""

    address: str
    """An abstract unix socket that takes messages: first `token`, then a `StepRows` each."""
    token: bytes
    ticket: PartitionTicket
    """Room for rows, which stay there until they are read."""
    passing: PartitionTicket
    """Room that the replica empties at once, for when the other is full of rows that nobody reads."""
    dtype: str
    """That of the emitted tensors, in the contract's and torch's words."""
    tensors: list[str]
    """Those that are emitted."""


class RequestedRows(msgspec.Struct, frozen=True):
    """What a request wants of its hidden states."""

    name: str
    first_position: int
    """Rows before it are not wanted."""


class RequestRows(msgspec.Struct, frozen=True, array_like=True):
    """A request's rows within those of a step."""

    name: str
    position: int
    """Of the first row among the request's tokens."""
    first: int
    """Of the tensors' rows."""
    count: int


class StepRows(msgspec.Struct, frozen=True, array_like=True):
    """What one engine step made, or a part of it: tensors [rows, hidden] by layer, and whose rows they are."""

    handle: Handle
    requests: list[RequestRows]
    passes: bool
    """Whether they lie where the replica is to copy them out at once."""


encode_attachment = msgspec.msgpack.Encoder().encode
decode_attachment = msgspec.msgpack.Decoder(Attachment).decode
encode_rows = msgspec.msgpack.Encoder().encode
decode_rows = msgspec.msgpack.Decoder(StepRows).decode
