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
from stagemesh.v1 import request_pb2, stage_pb2

_AUDIO_FRAGMENT_BYTES = 1 << 20
# The other fields of a message also need space.
_MAX_TENSOR_BYTES = MAX_MESSAGE_BYTES - (64 << 10)
PROGRESS_INTERVAL_S = 0.5
_MEDIA_TYPES: Mapping[bytes, str] = {
    b"\x89PNG": "image/png",
    b"\xff\xd8\xff": "image/jpeg",
    b"RIFF": "image/webp",
}


class StreamedOutputs:
    """Splits the emissions of one run into numbered fragments. Only includes the outputs that the caller requested.

    Each fragment is an event for the caller and contains one output. The event contains a copy of the data, because a
    view could retain a lease on another replica's arena.
    """

    def __init__(
        self, names: Sequence[str], emits: Mapping[str, Emitted], *, made: Mapping[str, int] | None = None
    ) -> None:
        """`names` are the outputs that the caller requested, and `emits` describes the outputs that the stage can emit,
        by name.

        `made` contains the number of fragments of each output that earlier runs of the request have emitted, by output
        name. The numbering continues from there. None means that there was no earlier run.
        """
        self._emitted = {name: emits[name] for name in names}
        self._next_seqs = {name: (made or {}).get(name, 0) for name in names}
        # An emission may end in the middle of a UTF-8 character.
        self._decoders = {name: codecs.getincrementaldecoder("utf-8")("replace") for name in names}

    @property
    def made(self) -> dict[str, int]:
        """The number of fragments of each output so far, by output name. Includes the fragments of earlier runs of the
        request.
        """
        return dict(self._next_seqs)

    def push(
        self,
        packet: Packet,
        logprobs: Sequence[TokenLogprobs] = (),
        text_logprobs: Sequence[TokenLogprobs] = (),
    ) -> Iterator[stage_pb2.ExecuteStepResponse]:
        """Yields the fragments of a packet's tensors. `logprobs` are the log-probabilities of the packet's tokens, and
        `text_logprobs` those of the tokens that begin in the packet's text.

        Raises UnsupportedError if a tensor does not fit in one message.
        """
        for name, emitted in self._emitted.items():
            tensor = packet.tensors.get(name)
            if tensor is None or not tensor.size:
                continue
            match emitted.kind:
                case "text":
                    yield from self._text(name, self._decoders[name].decode(tensor.tobytes()), text_logprobs)
                case "tokens":
                    yield self._tokens(name, tensor, logprobs)
                case "audio":
                    yield from self._audio(name, tensor, emitted.sample_rate_hz)
                case _:
                    yield self._whole(name, emitted, tensor)

    def finish(self) -> Iterator[stage_pb2.ExecuteStepResponse]:
        """Yields a final fragment for each text output whose bytes end within a UTF-8 character.

        The incomplete character is decoded as the replacement character U+FFFD.
        """
        for name, decoder in self._decoders.items():
            yield from self._text(name, decoder.decode(b"", final=True))

    def _text(
        self, name: str, text: str, logprobs: Sequence[TokenLogprobs] = ()
    ) -> Iterator[stage_pb2.ExecuteStepResponse]:
        if text:
            fragment = self._next(name)
            fragment.output.text = text
            _add_logprobs(fragment.output, logprobs)
            yield fragment

    def _tokens(self, name: str, ids: Array, logprobs: Sequence[TokenLogprobs]) -> stage_pb2.ExecuteStepResponse:
        fragment = self._next(name)
        fragment.output.token_ids.ids.extend(ids.tolist())
        _add_logprobs(fragment.output, logprobs)
        return fragment

    def _audio(self, name: str, samples: Array, sample_rate_hz: int) -> Iterator[stage_pb2.ExecuteStepResponse]:
        """Yields fragments of the audio samples that fit in a message."""
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
        """Returns an event with the next number of the output `name`. The event does not contain data yet: the caller
        of this method adds the data in place.

        Building the output separately and then copying it would be slower, and every generated token requires a
        fragment.
        """
        fragment = stage_pb2.ExecuteStepResponse()
        fragment.output.name, fragment.output.seq = name, self._next_seqs[name]
        self._next_seqs[name] += 1
        return fragment


class ProgressThrottle:
    """Limits progress reports to one per PROGRESS_INTERVAL_S seconds. Progress with a known total number of steps is
    not limited.

    An engine that emits tokens reports progress for each token. Without the limit, progress reports would double the
    number of messages.
    """

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._reported_s = -math.inf

    def is_due(self, progress: Progress) -> bool:
        """Returns whether to report this progress to the caller. Skipped progress is superseded by a later report or by
        the end of the step.
        """
        now_s = self._clock()
        if progress.total_steps is None and now_s - self._reported_s < PROGRESS_INTERVAL_S:
            return False
        self._reported_s = now_s
        return True


def _add_logprobs(output: request_pb2.Output, logprobs: Sequence[TokenLogprobs]) -> None:
    for each in logprobs:
        added = output.logprobs.add(sampled=each.sampled._asdict(), position=each.position)
        added.top.extend(request_pb2.TokenLogprob(**token._asdict()) for token in each.top)


def _media_type(data: bytes) -> str:
    for magic, media_type in _MEDIA_TYPES.items():
        if data.startswith(magic):
            return media_type
    return "application/octet-stream"
