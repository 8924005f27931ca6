"""How much of an output a piece is, and what of it lies behind a position.

Positions count code points of text, tokens, samples of sound, rows of a tensor along its first axis (one for a tensor
without axes), or images.
"""

from stagemesh.common.errors import InvalidChunkError
from stagemesh.common.tensors import checked_layout
from stagemesh.v1 import request_pb2, tensor_pb2


def length_of(output: request_pb2.Output) -> int:
    """By how much the piece takes its output on."""
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


def after(output: request_pb2.Output, position: int) -> request_pb2.Output | None:
    """The piece without its first `position` units, under its own seq; itself from 0 on, None where nothing is left.

    Raises InvalidChunkError for a tensor that does not hold together.
    """
    if position <= 0:
        return output
    if position >= length_of(output):
        return None
    rest = request_pb2.Output(name=output.name, seq=output.seq)
    # An image is one unit, and was returned whole or not at all.
    match output.WhichOneof("content"):
        case "text":
            rest.text = output.text[position:]
        case "token_ids":
            rest.token_ids.ids.extend(output.token_ids.ids[position:])
            rest.logprobs.extend(output.logprobs[position:])
        case "audio":
            rest.audio.sample_rate_hz = output.audio.sample_rate_hz
            rest.audio.samples.CopyFrom(_rows_after(output.audio.samples, position))
        case _:
            rest.tensor.CopyFrom(_rows_after(output.tensor, position))
    return rest


def _rows(tensor: tensor_pb2.Tensor) -> int:
    return max(0, tensor.shape[0]) if tensor.shape else 1


def _rows_after(tensor: tensor_pb2.Tensor, position: int) -> tensor_pb2.Tensor:
    if tensor.WhichOneof("location") not in ("inline", None):
        raise InvalidChunkError(f"tensor {tensor.name!r} of an output is not inline; it must be")
    checked_layout(tensor, size_bytes=len(tensor.inline))
    row_bytes = len(tensor.inline) // tensor.shape[0]
    rest = tensor_pb2.Tensor(name=tensor.name, dtype=tensor.dtype, inline=tensor.inline[position * row_bytes :])
    rest.shape.extend([tensor.shape[0] - position, *tensor.shape[1:]])
    return rest
