"""The amount of each output that a receiver has received, which determines the new part of a replayed output fragment.

Outputs are replayed from the first fragment if a connection breaks, a stage restarts or a client calls another
orchestrator. The fragments of the replay may have other boundaries. A position therefore counts units instead of
fragments: code points of text, tokens, audio samples, images, or rows of a tensor along its first axis. A tensor
without axes counts as one row. Each event of a step (`ExecuteStepResponse`) counts as one unit and is never split.
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
    """The number of units of each output that a receiver has received. Outputs that are not in `counts` start at 0.

    A unit is a code point of text, a token, an audio sample, an image, or a row of a tensor.
    """

    __slots__ = ("_counts",)

    def __init__(self, counts: Mapping[str, int] = _START) -> None:
        self._counts = dict(counts)

    @property
    def counts(self) -> Mapping[str, int]:
        """The number of received units by output name, in the form of `GenerateRequest.next_positions`."""
        return self._counts

    def copy(self) -> "Position":
        """Returns a copy, which does not change when this position advances."""
        return Position(self._counts)

    def is_behind(self, other: "Position") -> bool:
        """Returns whether `other` contains more received units than this position for at least one output."""
        return any(self._counts.get(name, 0) < count for name, count in other.counts.items())

    def advance(self, piece: Piece) -> None:
        """Adds the number of units in an output fragment to the count of the fragment's output."""
        self.advance_by(*_measure(piece))

    def advance_by(self, name: str, count: int) -> int:
        """Adds `count` units to the named output. Returns the output's number of units before the addition."""
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
        """Returns the part of an output fragment that the receiver does not have yet, or None if there is no such part.

        `piece` is the fragment, and `replayed` is the position at which the fragment begins. Advances `replayed` to the
        end of the fragment. Also advances this position, unless it is already at or after the end. Raises
        InvalidChunkError if the number of bytes of a tensor or of audio samples does not match their shape.
        """
        name, length = _measure(piece)
        begin, received = replayed.advance_by(name, length), self._counts.get(name, 0)
        if begin + length > received:
            self._counts[name] = begin + length
        if begin >= received:
            return piece
        return after(piece, received - begin) if isinstance(piece, request_pb2.Output) else None


def _measure(piece: Piece) -> tuple[str, int]:
    """Returns the output name and the number of units of an output fragment, or "" and 1 for an event of a step."""
    return (piece.name, length_of(piece)) if isinstance(piece, request_pb2.Output) else ("", 1)


def length_of(output: request_pb2.Output) -> int:
    """Returns the number of code points, tokens, audio samples, images or tensor rows in an output fragment."""
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
    """Returns an output fragment without its first `count` units, or None if no unit remains. Preserves `seq`.

    A unit is a code point of text, a token, an audio sample, an image, or a row of a tensor. Raises InvalidChunkError
    if the number of bytes of a tensor or of audio samples does not match their shape.
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
