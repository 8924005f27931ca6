"""The outputs that a step streams to its caller, and the rate limit of its progress reports."""

import codecs
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

from stagemesh.common.descriptors import Emitted
from stagemesh.common.errors import UnsupportedError
from stagemesh.common.tensors import Array, inline_tensor
from stagemesh.connectors.edge import Packet
from stagemesh.rpc.channels import MAX_MESSAGE_BYTES
from stagemesh.services.engines.base import Progress, TokenLogprobs
from stagemesh.v1 import stage_pb2

_AUDIO_FRAGMENT_BYTES = 1 << 20
# The rest of a message needs space, too.
_MAX_TENSOR_BYTES = MAX_MESSAGE_BYTES - (64 << 10)
PROGRESS_INTERVAL_S = 0.5
_MEDIA_TYPES: Mapping[bytes, str] = {
    b"\x89PNG": "image/png",
    b"\xff\xd8\xff": "image/jpeg",
    b"RIFF": "image/webp",
}


class StreamedOutputs:
    """Splits the emissions of one run into numbered fragments of the tensors that its caller requested.

    Each fragment is an event for the caller with one output. The event contains a copy of the data, because a view
    could retain a lease on another replica's arena.
    """

    def __init__(
        self, names: Sequence[str], emits: Mapping[str, Emitted], *, made: Mapping[str, int] | None = None
    ) -> None:
        """`made` is the number of fragments that earlier runs have emitted, by output name. Numbering continues after
        them.
        """
        self._emitted = {name: emits[name] for name in names}
        self._next_seqs = {name: (made or {}).get(name, 0) for name in names}
        # An emission may end in the middle of a UTF-8 character.
        self._decoders = {name: codecs.getincrementaldecoder("utf-8")("replace") for name in names}

    @property
    def made(self) -> dict[str, int]:
        """The number of fragments of each output so far, including fragments of earlier runs."""
        return dict(self._next_seqs)

    def push(self, packet: Packet, logprobs: Sequence[TokenLogprobs] = ()) -> Iterator[stage_pb2.ExecuteStepResponse]:
        """Splits a packet into output fragments. `logprobs` are the log-probabilities of the packet's tokens.

        Raises UnsupportedError if a tensor does not fit in a message.
        """
        for name, emitted in self._emitted.items():
            tensor = packet.tensors.get(name)
            if tensor is None or not tensor.size:
                continue
            match emitted.kind:
                case "text":
                    yield from self._text(name, self._decoders[name].decode(tensor.tobytes()))
                case "tokens":
                    yield self._tokens(name, tensor, logprobs)
                case "audio":
                    yield from self._audio(name, tensor, emitted.sample_rate_hz)
                case _:
                    yield self._whole(name, emitted, tensor)

    def finish(self) -> Iterator[stage_pb2.ExecuteStepResponse]:
        """Returns a last fragment for each text output that ends within a character.

        The incomplete character is decoded as a replacement character.
        """
        for name, decoder in self._decoders.items():
            yield from self._text(name, decoder.decode(b"", final=True))

    def _text(self, name: str, text: str) -> Iterator[stage_pb2.ExecuteStepResponse]:
        if text:
            fragment = self._next(name)
            fragment.output.text = text
            yield fragment

    def _tokens(self, name: str, ids: Array, logprobs: Sequence[TokenLogprobs]) -> stage_pb2.ExecuteStepResponse:
        fragment = self._next(name)
        fragment.output.token_ids.ids.extend(ids.tolist())
        for each in logprobs:
            fragment.output.logprobs.add(**each._asdict())
        return fragment

    def _audio(self, name: str, samples: Array, sample_rate_hz: int) -> Iterator[stage_pb2.ExecuteStepResponse]:
        """Splits audio samples into fragments that fit in a message."""
        step = max(1, _AUDIO_FRAGMENT_BYTES * len(samples) // max(1, samples.nbytes))
        for start in range(0, len(samples), step):
            fragment = self._next(name)
            fragment.output.audio.samples.CopyFrom(inline_tensor(name, samples[start : start + step]))
            fragment.output.audio.sample_rate_hz = sample_rate_hz
            yield fragment

    def _whole(self, name: str, emitted: Emitted, tensor: Array) -> stage_pb2.ExecuteStepResponse:
        if tensor.nbytes > _MAX_TENSOR_BYTES:
            raise UnsupportedError(
                f"output {name} has {tensor.nbytes} bytes, but at most {_MAX_TENSOR_BYTES} can be sent to a client; "
                "request another output, or a smaller one",
                reason="OUTPUT_TOO_LARGE",
            )
        fragment = self._next(name)
        if emitted.kind == "image":
            image = fragment.output.image
            image.data = tensor.tobytes()
            image.media_type = _media_type(image.data)
        else:
            fragment.output.tensor.CopyFrom(inline_tensor(name, tensor))
        return fragment

    def _next(self, name: str) -> stage_pb2.ExecuteStepResponse:
        """Returns the next fragment of an output, which the caller of this method fills in place.

        Building the output separately and copying it would be slower, and each token has its own fragment.
        """
        fragment = stage_pb2.ExecuteStepResponse()
        fragment.output.name, fragment.output.seq = name, self._next_seqs[name]
        self._next_seqs[name] += 1
        return fragment


class ProgressThrottle:
    """Limits progress reports to one per PROGRESS_INTERVAL_S, unless the engine knows its total number of steps.

    An engine that emits tokens reports progress for each token. Without the limit, the number of messages would double.
    """

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._reported_s = -math.inf

    def is_due(self, progress: Progress) -> bool:
        """Returns whether to report this progress. A later report or the step's end replaces a skipped report."""
        now_s = self._clock()
        if progress.total_steps is None and now_s - self._reported_s < PROGRESS_INTERVAL_S:
            return False
        self._reported_s = now_s
        return True


def _media_type(data: bytes) -> str:
    for magic, media_type in _MEDIA_TYPES.items():
        if data.startswith(magic):
            return media_type
    return "application/octet-stream"
