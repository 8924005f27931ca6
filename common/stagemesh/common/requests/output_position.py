"""The position of a receiver: how much of each output of a request the receiver has received, for each choice.

Outputs are replayed if a connection breaks, a stage restarts or a client calls another orchestrator. The parts of the
replay may have other boundaries. A position therefore counts units: bytes of text or of a message in UTF-8, tokens,
audio samples, images, bytes of an encoded file, stored files, or rows of a tensor along its first axis. A text is only
divided between two characters.
"""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TypeAlias

from stagemesh.common.errors import InternalError, InvalidChunkError, InvalidRequestError
from stagemesh.common.wire.tensors import checked_layout, rows_of
from stagemesh.v1 import request_pb2, tensor_pb2

OutputKey: TypeAlias = tuple[str, int]
"""The name of an output, and the index of the choice to which the output belongs."""
INVALID_POSITION = "INVALID_POSITION"
"""The error reason of a position within a character of a text."""
_INCOMPLETE = (request_pb2.FINISH_REASON_CANCELLED, request_pb2.FINISH_REASON_FAILED)
_START: Mapping[OutputKey, int] = MappingProxyType({})


class Position:
    """The number of units of each output that a receiver has received. An output that is not in `counts` has 0 units.

    `length_of` says what a unit is. Parts of an image that the receiver does not have as a whole are passed on again.
    """

    __slots__ = ("counts", "finished")

    def __init__(self, counts: Mapping[OutputKey, int] = _START) -> None:
        self.counts = dict(counts)
        """The number of received units of each output of each choice, as in `GenerateRequest.next_positions`."""
        self.finished = set[OutputKey]()
        """The outputs that have ended, apart from those that are incomplete."""

    def remainder(self, output: request_pb2.Output) -> request_pb2.Output | None:
        """Returns the part of `output` that the receiver does not have yet, or None if it has all of `output`.

        Advances to the end of `output`, unless it raises an error. Raises InternalError (OUTPUT_OUT_OF_ORDER) if an
        earlier part is missing, or if the receiver's position is within a character of `output`, and InvalidChunkError
        if a tensor's or the audio's number of bytes does not match its shape.
        """
        key = output.name, output.index
        received, end = self.counts.get(key, 0), output.position + length_of(output)
        if output.position > received:
            raise InternalError(
                f"output {output.name!r} continues at {output.position}, but only {received} were received; report "
                "this as a defect",
                reason="OUTPUT_OUT_OF_ORDER",
            )
        if key in self.finished:
            return None
        try:
            rest = after(output, received - output.position)
        except InvalidRequestError as exc:
            if exc.reason != INVALID_POSITION:
                raise
            problem = f"output {output.name!r} is repeated with another text, in which {received} is within a character"
            raise InternalError(f"{problem}; report this as a defect", reason="OUTPUT_OUT_OF_ORDER") from exc
        if end > received:
            self.counts[key] = end
        if output.HasField("finish"):
            # A request that failed may be run again at another orchestrator, where its outputs continue.
            if output.finish.reason not in _INCOMPLETE:
                self.finished.add(key)
        elif end <= received and output.WhichOneof("content") and not _continues_image(output, received):
            # A receiver passes on content of an unknown kind, which has no length.
            return None
        return rest


def _rows(tensor: tensor_pb2.Tensor) -> int:
    return max(0, tensor.shape[0]) if tensor.shape else 1


def _message_texts(delta: request_pb2.MessageDelta) -> Sequence[tuple[str, str]]:
    """Returns the texts in a part of a message that count, in order, each with the name of its field."""
    kind = delta.WhichOneof("delta")
    if kind == "tool_call":
        return [("name", delta.tool_call.name), ("arguments", delta.tool_call.arguments)]
    return [(kind, getattr(delta, kind))] if kind is not None else []


_LENGTHS: Mapping[str, Callable[[request_pb2.Output], int]] = {
    "text": lambda output: len(output.text.encode()),
    "token_ids": lambda output: len(output.token_ids.ids),
    "audio": lambda output: _rows(output.audio.samples),
    "image": lambda output: int(output.image.last),
    "media": lambda output: len(output.media.data),
    "file": lambda _: 1,
    "tensor": lambda output: _rows(output.tensor),
    "message": lambda output: sum(len(text.encode()) for _, text in _message_texts(output.message)),
}
"""The length of a part of an output in units, by the kind of its content."""


def length_of(output: request_pb2.Output) -> int:
    """Returns the number of units in a part of an output.

    A unit is a byte of text or of a message in UTF-8, a token, an audio sample, a whole image, a byte of an encoded
    file, a stored file, or a row of a tensor. A part of an image has no length unless it ends the image.
    """
    kind = output.WhichOneof("content")
    return 0 if kind is None else _LENGTHS[kind](output)


def text_until(text: str, length: int, *, begin: int = 0) -> str:
    """Returns the first `length` bytes of a text in UTF-8. `begin` is the position of the text in its output.

    Raises InvalidRequestError (INVALID_POSITION) if they end within a character.
    """
    try:
        return text.encode()[:length].decode()
    except UnicodeDecodeError as exc:
        problem = f"position {begin + length} is within a character; positions in a text count bytes of UTF-8"
        text = f"{problem}: use the end of the last part that was received"
        raise InvalidRequestError(text, reason=INVALID_POSITION) from exc


def after(output: request_pb2.Output, count: int) -> request_pb2.Output | None:
    """Returns an output without its first `count` units, or None if neither a unit nor `finish` remains.

    A text or a message keeps the log-probabilities of the tokens that begin in the remaining text.

    `length_of` says what a unit is. Raises InvalidRequestError (INVALID_POSITION) if the remaining text would begin
    within a character, and InvalidChunkError if a tensor's or the audio's number of bytes does not match its shape.
    """
    if count <= 0:
        return output
    rest = request_pb2.Output(name=output.name, position=output.position + count, index=output.index)
    if output.prompt_tokens:
        rest.prompt_tokens, rest.output_tokens = output.prompt_tokens, output.output_tokens
    if output.HasField("finish"):
        rest.finish.CopyFrom(output.finish)
    if count >= length_of(output):
        return rest if output.HasField("finish") else None
    # Images and stored files are single units, so one of the returns above has already handled them.
    match output.WhichOneof("content"):
        case "text":
            rest.text = output.text[len(text_until(output.text, count, begin=output.position)) :]
            rest.logprobs.extend(each for each in output.logprobs if each.position >= rest.position)
        case "message":
            rest.message.CopyFrom(_message_after(output.message, count, begin=output.position))
            rest.logprobs.extend(each for each in output.logprobs if each.position >= rest.position)
        case "token_ids":
            rest.token_ids.ids.extend(output.token_ids.ids[count:])
            rest.logprobs.extend(output.logprobs[count:])
        case "audio":
            rest.audio.sample_rate_hz = output.audio.sample_rate_hz
            rest.audio.samples.CopyFrom(_rows_after(output.audio.samples, count))
        case "media":
            rest.media.CopyFrom(output.media)
            rest.media.data, rest.media.offset = output.media.data[count:], rest.position
        case _:
            rest.tensor.CopyFrom(_rows_after(output.tensor, count))
    return rest


def _message_after(delta: request_pb2.MessageDelta, count: int, *, begin: int) -> request_pb2.MessageDelta:
    rest = request_pb2.MessageDelta()
    rest.CopyFrom(delta)
    part = rest.tool_call if rest.HasField("tool_call") else rest
    for field, text in _message_texts(delta):
        taken = min(count, len(text.encode()))
        setattr(part, field, text[len(text_until(text, taken, begin=begin)) :])
        count, begin = count - taken, begin + taken
    return rest


def _continues_image(output: request_pb2.Output, received: int) -> bool:
    """Returns whether the output is a part of an image that the receiver does not have as a whole."""
    return output.WhichOneof("content") == "image" and output.position == received


def _rows_after(tensor: tensor_pb2.Tensor, count: int) -> tensor_pb2.Tensor:
    if tensor.WhichOneof("location") not in ("inline", None):
        raise InvalidChunkError(f"tensor {tensor.name!r} of an output must be inline")
    checked_layout(tensor, size_bytes=len(tensor.inline))
    return rows_of(tensor, count, tensor.shape[0])
