"""Hidden states on their way from a worker process to its replica: what both ends agree on. Imports nothing of vLLM."""

from dataclasses import dataclass

import msgspec

from stagemesh.connectors.arena_writer import Handle, ShareTicket

EXTRA_ARGUMENT = "stagemesh"
"""Under this name a request's `SamplingParams.extra_args` hold a `Wish`, as builtins."""
CONFIG_KEY = "stagemesh_layers"
"""Under this name vLLM's `additional_config` lists the layers before the last."""


@dataclass(frozen=True)
class Attachment:
    """What a worker needs to know of its replica."""

    address: str
    """An abstract unix socket that takes messages: first `token`, then a `StepRows` each."""
    token: bytes
    ticket: ShareTicket
    dtype: str
    """That of the emitted tensors, in the contract's and torch's words."""
    tensors: list[str]
    """Those that are emitted."""


class Wish(msgspec.Struct, frozen=True):
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


encode_attachment = msgspec.msgpack.Encoder().encode
decode_attachment = msgspec.msgpack.Decoder(Attachment).decode
encode_rows = msgspec.msgpack.Encoder().encode
decode_rows = msgspec.msgpack.Decoder(StepRows).decode
