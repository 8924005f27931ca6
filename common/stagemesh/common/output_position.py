"""How much of a request's outputs a receiver has, and which part of a replayed piece it lacks.

Outputs are replayed from their first piece if a connection breaks, a stage restarts or a client calls another
orchestrator, and the replayed pieces may be cut in other places. A position therefore counts units and not pieces: code
points of text, tokens, audio samples, images, or rows of a tensor along its first axis (a tensor without axes counts as
one row). Events of a step are never cut: each counts as one unit.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import TypeAlias, overload

from stagemesh.common.errors import InvalidChunkError
from stagemesh.common.tensors import checked_layout
from stagemesh.v1 import request_pb2, stage_pb2, tensor_pb2

Piece: TypeAlias = request_pb2.Output | stage_pb2.ExecuteStepResponse

_START: Mapping[str, int] = MappingProxyType({})


class Position:
    """The number of units of each output, by the output's name. Starts at 0 or at `counts`."""

    __slots__ = ("_counts",)

    def __init__(self, counts: Mapping[str, int] = _START) -> None:
        self._counts = dict(counts)

    @property
    def counts(self) -> Mapping[str, int]:
        """The units by output, as `GenerateRequest.next_positions` has them."""
        return self._counts

    def copy(self) -> "Position":
        """Returns an independent copy."""
        return Position(self._counts)

    def is_behind(self, other: "Position") -> bool:
        """Returns whether `other` is further in at least one output."""
        return any(self._counts.get(name, 0) < count for name, count in other.counts.items())

    def advance(self, piece: Piece) -> None:
        """Adds the length of a piece."""
        self.advance_by(*_measure(piece))

    def advance_by(self, name: str, count: int) -> int:
        """Adds `count` units to an output. Returns the units before."""
        begin = self._counts.get(name, 0)
        self._counts[name] = begin + count
        return begin

    @overload
    def remainder(self, piece: request_pb2.Output, *, replayed: "Position") -> request_pb2.Output | None: ...

    @overload
    def remainder(
        self, piece: stage_pb2.ExecuteStepResponse, *, replayed: "Position"
    ) -> stage_pb2.ExecuteStepResponse | None: ...

    def remainder(self, piece: Piece, *, replayed: "Position") -> Piece | None:
        """Returns the part of `piece` that lies after this position, or None if the receiver has all of it.

        The piece begins at `replayed`. Both positions are advanced to the end of the piece. Raises InvalidChunkError
        for a tensor whose size and shape do not match.
        """
        name, length = _measure(piece)
        begin, received = replayed.advance_by(name, length), self._counts.get(name, 0)
        if begin + length > received:
            self._counts[name] = begin + length
        if begin >= received:
            return piece
        return after(piece, received - begin) if isinstance(piece, request_pb2.Output) else None


def _measure(piece: Piece) -> tuple[str, int]:
    """Returns the output's name and the number of units. Events count under an empty name."""
    return (piece.name, length_of(piece)) if isinstance(piece, request_pb2.Output) else ("", 1)


def length_of(output: request_pb2.Output) -> int:
    """Returns the number of units in a piece."""
    match output.WhichOneof("content"):
        case "text":
            return len(output.text)
        case "token_ids":
            return len(output.token_ids.ids)
        case "audio":
            return _rows(output.audio.samples)
        case "image":
            return 1
        case "tensor":
            return _rows(output.tensor)
        case None:
            return 0


def after(output: request_pb2.Output, count: int) -> request_pb2.Output | None:
    """Returns a piece without its first `count` units, or None if no unit remains. Keeps the piece's `seq`.

    Raises InvalidChunkError for a tensor whose size and shape do not match.
    """
    if count <= 0:
        return output
    if count >= length_of(output):
        return None
    rest = request_pb2.Output(name=output.name, seq=output.seq)
    # An image is a single unit: it was returned above, whole or not at all.
    match output.WhichOneof("content"):
        case "text":
            rest.text = output.text[count:]
        case "token_ids":
            rest.token_ids.ids.extend(output.token_ids.ids[count:])
            rest.logprobs.extend(output.logprobs[count:])
        case "audio":
            rest.audio.sample_rate_hz = output.audio.sample_rate_hz
            rest.audio.samples.CopyFrom(_rows_after(output.audio.samples, count))
        case _:
            rest.tensor.CopyFrom(_rows_after(output.tensor, count))
    return rest


def _rows(tensor: tensor_pb2.Tensor) -> int:
    return max(0, tensor.shape[0]) if tensor.shape else 1


def _rows_after(tensor: tensor_pb2.Tensor, count: int) -> tensor_pb2.Tensor:
    if tensor.WhichOneof("location") not in ("inline", None):
        raise InvalidChunkError(f"tensor {tensor.name!r} of an output is not inline; it must be")
    checked_layout(tensor, size_bytes=len(tensor.inline))
    row_bytes = len(tensor.inline) // tensor.shape[0]
    rest = tensor_pb2.Tensor(name=tensor.name, dtype=tensor.dtype, inline=tensor.inline[count * row_bytes :])
    rest.shape.extend([tensor.shape[0] - count, *tensor.shape[1:]])
    return rest
