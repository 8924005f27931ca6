"""The receiver's position in a request's outputs, which determines the new part of a replayed output piece.

Outputs are replayed from the first piece if a connection breaks, a stage restarts or a client calls another
orchestrator. The replayed pieces may be cut at other boundaries. A position therefore counts units instead of pieces:
code points of text, tokens, audio samples, images, or rows of a tensor along its first axis. A tensor without axes
counts as one row. Each event of a step (`ExecuteStepResponse`) counts as one unit and is never cut.
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
    """The number of units of each output, by the output's name. Outputs that are not in `counts` start at 0."""

    __slots__ = ("_counts",)

    def __init__(self, counts: Mapping[str, int] = _START) -> None:
        self._counts = dict(counts)

    @property
    def counts(self) -> Mapping[str, int]:
        """The number of units by output name, as in `GenerateRequest.next_positions`."""
        return self._counts

    def copy(self) -> "Position":
        """Returns an independent copy."""
        return Position(self._counts)

    def is_behind(self, other: "Position") -> bool:
        """Returns whether `other` has more units of at least one output."""
        return any(self._counts.get(name, 0) < count for name, count in other.counts.items())

    def advance(self, piece: Piece) -> None:
        """Adds the units of a piece to its output."""
        self.advance_by(*_measure(piece))

    def advance_by(self, name: str, count: int) -> int:
        """Adds `count` units to the named output. Returns the number of units before the addition."""
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
        """Returns the part of `piece` after this position, or None if the receiver already has the whole piece.

        The piece begins at `replayed`. The method advances both positions to the end of the piece. Raises
        InvalidChunkError if the piece is a tensor whose size does not match its shape.
        """
        name, length = _measure(piece)
        begin, received = replayed.advance_by(name, length), self._counts.get(name, 0)
        if begin + length > received:
            self._counts[name] = begin + length
        if begin >= received:
            return piece
        return after(piece, received - begin) if isinstance(piece, request_pb2.Output) else None


def _measure(piece: Piece) -> tuple[str, int]:
    """Returns the name and the number of units of a piece. Events are counted under an empty name."""
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
    """Returns a piece without its first `count` units, or None if no unit remains. The result has the same `seq`.

    Raises InvalidChunkError if the piece is a tensor whose size does not match its shape.
    """
    if count <= 0:
        return output
    if count >= length_of(output):
        return None
    rest = request_pb2.Output(name=output.name, seq=output.seq)
    # An image is a single unit, so one of the returns above has already handled it.
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
        raise InvalidChunkError(f"tensor {tensor.name!r} of an output must be inline")
    checked_layout(tensor, size_bytes=len(tensor.inline))
    row_bytes = len(tensor.inline) // tensor.shape[0]
    rest = tensor_pb2.Tensor(name=tensor.name, dtype=tensor.dtype, inline=tensor.inline[count * row_bytes :])
    rest.shape.extend([tensor.shape[0] - count, *tensor.shape[1:]])
    return rest
