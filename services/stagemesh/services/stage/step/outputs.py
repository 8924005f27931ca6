"""The outputs that a step streams to its caller, and the rate limit of its progress reports."""

import codecs
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import numpy as np

from stagemesh.common.descriptors import Emitted
from stagemesh.common.errors import UnsupportedError
from stagemesh.common.tensors import Array
from stagemesh.connectors.edge import Packet
from stagemesh.rpc.channels import MAX_MESSAGE_BYTES
from stagemesh.services.engines.base import Progress, TokenLogprobs
from stagemesh.services.stage.step.events import AudioOutput, Content, ImageOutput, Output, Tokens

_AUDIO_FRAGMENT_BYTES = 1 << 20
# The rest of a message needs space, too.
_MAX_TENSOR_BYTES = MAX_MESSAGE_BYTES - (64 << 10)
# The size of a token id with its log-probability.
_LOGPROB_BYTES = 8
PROGRESS_INTERVAL_S = 0.5
_MEDIA_TYPES: Mapping[bytes, str] = {
    b"\x89PNG": "image/png",
    b"\xff\xd8\xff": "image/jpeg",
    b"RIFF": "image/webp",
}


class StreamedOutputs:
    """Splits the emissions of one run into numbered fragments of the tensors that its caller requested."""

    def __init__(
        self, names: Sequence[str], emits: Mapping[str, Emitted], *, made: Mapping[str, int] | None = None
    ) -> None:
        """`made` is the number of fragments that earlier runs have emitted, by output name. Numbering continues after
        them.
        """
        self.size_bytes = 0
        """The total size of all pushed tensors and log-probabilities, in bytes."""
        self._emitted = {name: emits[name] for name in names}
        self._next_seqs = {name: (made or {}).get(name, 0) for name in names}
        # An emission may end in the middle of a UTF-8 character.
        self._decoders = {name: codecs.getincrementaldecoder("utf-8")("replace") for name in names}

    @property
    def made(self) -> dict[str, int]:
        """The number of fragments of each output so far, including fragments of earlier runs."""
        return dict(self._next_seqs)

    def push(self, packet: Packet, logprobs: tuple[TokenLogprobs, ...] = ()) -> list[Output]:
        """Splits a packet into output fragments. `logprobs` are the log-probabilities of the packet's tokens.

        Raises UnsupportedError if a tensor does not fit in a message.
        """
        fragments: list[Output] = []
        for name, emitted in self._emitted.items():
            tensor = packet.tensors.get(name)
            if tensor is not None and tensor.size:
                self.size_bytes += tensor.nbytes
                if emitted.kind == "tokens":
                    self.size_bytes += sum(_LOGPROB_BYTES * (1 + len(each.top_ids)) for each in logprobs)
                    contents: Iterable[Content] = [Tokens(tuple(tensor.tolist()), logprobs)]
                else:
                    contents = self._contents(name, emitted, tensor)
                self._number(name, contents, fragments)
        return fragments

    def finish(self) -> list[Output]:
        """Returns a last fragment for each text output that ends within a character.

        The incomplete character is decoded as a replacement character.
        """
        fragments: list[Output] = []
        for name, decoder in self._decoders.items():
            rest = decoder.decode(b"", final=True)
            self._number(name, [rest] if rest else [], fragments)
        return fragments

    def _contents(self, name: str, emitted: Emitted, tensor: Array) -> Iterable[Content]:
        if emitted.kind == "text":
            text = self._decoders[name].decode(tensor.tobytes())
            return [text] if text else []
        if emitted.kind == "audio":
            return [AudioOutput(samples, emitted.sample_rate_hz) for samples in _slices(tensor)]
        if tensor.nbytes > _MAX_TENSOR_BYTES:
            raise UnsupportedError(
                f"output {name} has {tensor.nbytes} bytes, but at most {_MAX_TENSOR_BYTES} can be sent to a client; "
                "request another output, or a smaller one",
                reason="OUTPUT_TOO_LARGE",
            )
        if emitted.kind == "image":
            data = tensor.tobytes()
            return [ImageOutput(data, _media_type(data))]
        return [_copy(tensor)]

    def _number(self, name: str, contents: Iterable[Content], fragments: list[Output]) -> None:
        for content in contents:
            fragments.append(Output(name, self._next_seqs[name], content))
            self._next_seqs[name] += 1


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


def _slices(samples: Array) -> Iterator[Array]:
    """Splits audio samples into slices that fit in a message. Yields copies of the slices."""
    step = max(1, _AUDIO_FRAGMENT_BYTES * len(samples) // max(1, samples.nbytes))
    for start in range(0, len(samples), step):
        yield _copy(samples[start : start + step])


def _copy(tensor: Array) -> Array:
    """Copies a tensor. A view could retain a lease on another replica's arena while outputs are stored for callers."""
    return np.array(tensor)


def _media_type(data: bytes) -> str:
    for magic, media_type in _MEDIA_TYPES.items():
        if data.startswith(magic):
            return media_type
    return "application/octet-stream"
