"""The position of a receiver: how much of each output of a request the receiver has received.

When outputs are replayed, the position determines which part of an output fragment is new. Outputs are replayed from
the first fragment if a connection breaks, a stage restarts or a client calls another orchestrator. The fragments of the
replay may have other boundaries. A position therefore counts units instead of fragments: code points of text, tokens,
audio samples, images, or rows of a tensor along its first axis. A tensor without axes counts as one row. Each event of
a step (`ExecuteStepResponse`) counts as one unit and is never split.
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
    """The number of units of each output that a receiver has received. An output that is not in `counts` has 0 units.

    A unit is a code point of text, a token, an audio sample, an image, or a row of a tensor.
    """

    __slots__ = ("_counts",)

    def __init__(self, counts: Mapping[str, int] = _START) -> None:
        self._counts = dict(counts)

    @property
    def counts(self) -> Mapping[str, int]:
        """The number of received units of each output, by output name, as in `GenerateRequest.next_positions`."""
        return self._counts

    def copy(self) -> "Position":
        """Returns an independent copy, which does not change when this position advances."""
        return Position(self._counts)

    def is_behind(self, other: "Position") -> bool:
        """Returns whether `other` has more received units than this position for at least one output."""
        return any(self._counts.get(name, 0) < count for name, count in other.counts.items())

    def advance(self, piece: Piece) -> None:
        """Counts the units of an output fragment as received."""
        self.advance_by(*_measure(piece))

    def advance_by(self, name: str, count: int) -> int:
        """Counts `count` units of the output `name` as received. Returns the output's previous number of units."""
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
        """Returns the part of the output fragment `piece` that the receiver does not have, or None if it has all units.

        `replayed` is the position at which the fragment begins, and is advanced to the end of the fragment. This
        position is also advanced to that end, unless it is already at or after that end. Raises InvalidChunkError if a
        tensor's or the audio's number of bytes does not match its shape.
        """
        name, length = _measure(piece)
        begin, received = replayed.advance_by(name, length), self._counts.get(name, 0)
        if begin + length > received:
            self._counts[name] = begin + length
        if begin >= received:
            return piece
        return after(piece, received - begin, begin=begin) if isinstance(piece, request_pb2.Output) else None


def _measure(piece: Piece) -> tuple[str, int]:
    """Returns the output name of a fragment and the fragment's number of units.

    For an event of a step, the name is "" and the number is 1.
    """
    return (piece.name, length_of(piece)) if isinstance(piece, request_pb2.Output) else ("", 1)


def length_of(output: request_pb2.Output) -> int:
    """Returns the number of units in an output fragment.

    A unit is a code point of text, a token, an audio sample, an image, or a row of a tensor.
    """
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


def after(output: request_pb2.Output, count: int, *, begin: int = 0) -> request_pb2.Output | None:
    """Returns an output fragment without its first `count` units, or None if no unit remains. Preserves `seq`.

    `begin` is the position of the fragment in its output, in units. A fragment of text keeps the log-probabilities of
    the tokens that begin in the remaining text.

    A unit is a code point of text, a token, an audio sample, an image, or a row of a tensor. Raises InvalidChunkError
    if a tensor's or the audio's number of bytes does not match its shape.
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
            rest.logprobs.extend(each for each in output.logprobs if each.position >= begin + count)
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
