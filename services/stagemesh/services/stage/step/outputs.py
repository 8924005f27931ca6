"""What an engine emits, as pieces for a client."""

import codecs
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np

from stagemesh.common.descriptors import Emitted
from stagemesh.common.errors import UnsupportedError
from stagemesh.common.tensors import Array
from stagemesh.connectors.edge import Packet
from stagemesh.rpc.channels import MAX_MESSAGE_BYTES
from stagemesh.services.engines.base import TokenLogprobs
from stagemesh.services.stage.step.events import AudioOutput, Content, ImageOutput, Output, Tokens

_SOUND_PIECE_BYTES = 1 << 20
# A message holds more than the tensor alone.
_MAX_TENSOR_BYTES = MAX_MESSAGE_BYTES - (64 << 10)
# A token and the logarithm of its probability.
_LOGPROB_BYTES = 8
_MEDIA_TYPES: Mapping[bytes, str] = {
    b"\x89PNG": "image/png",
    b"\xff\xd8\xff": "image/jpeg",
    b"RIFF": "image/webp",
}


class StreamedOutputs:
    """Turns one run's emissions into numbered pieces of the tensors that its caller hears."""

    def __init__(
        self, names: Sequence[str], emits: Mapping[str, Emitted], *, made: Mapping[str, int] | None = None
    ) -> None:
        """`made` is how many pieces of each name an earlier run has made: this one numbers on from there."""
        self.size_bytes = 0
        """Of all that was pushed."""
        self._emitted = {name: emits[name] for name in names}
        self._next_seqs = {name: (made or {}).get(name, 0) for name in names}
        # An emission may end within a character.
        self._decoders = {name: codecs.getincrementaldecoder("utf-8")("replace") for name in names}

    @property
    def made(self) -> dict[str, int]:
        """How many pieces of each name there are, those of earlier runs counted."""
        return dict(self._next_seqs)

    def push(self, packet: Packet, logprobs: tuple[TokenLogprobs, ...] = ()) -> list[Output]:
        """The pieces that `packet` brings, `logprobs` going with its tokens.

        Raises UnsupportedError for what no message can hold.
        """
        pieces: list[Output] = []
        for name, emitted in self._emitted.items():
            tensor = packet.tensors.get(name)
            if tensor is not None and tensor.size:
                self.size_bytes += tensor.nbytes
                if emitted.kind == "tokens":
                    self.size_bytes += sum(_LOGPROB_BYTES * (1 + len(each.top_ids)) for each in logprobs)
                    contents: Iterable[Content] = [Tokens(tuple(tensor.tolist()), logprobs)]
                else:
                    contents = self._contents(name, emitted, tensor)
                self._number(name, contents, pieces)
        return pieces

    def finish(self) -> list[Output]:
        """What was held back."""
        pieces: list[Output] = []
        for name, decoder in self._decoders.items():
            rest = decoder.decode(b"", final=True)
            self._number(name, [rest] if rest else [], pieces)
        return pieces

    def _contents(self, name: str, emitted: Emitted, tensor: Array) -> Iterable[Content]:
        if emitted.kind == "text":
            text = self._decoders[name].decode(tensor.tobytes())
            return [text] if text else []
        if emitted.kind == "audio":
            return [AudioOutput(samples, emitted.sample_rate_hz) for samples in _cut(tensor)]
        if tensor.nbytes > _MAX_TENSOR_BYTES:
            raise UnsupportedError(
                f"output {name} is {tensor.nbytes} bytes; a client can be sent {_MAX_TENSOR_BYTES}: "
                "ask for another output, or for a smaller one",
                reason="OUTPUT_TOO_LARGE",
            )
        if emitted.kind == "image":
            data = tensor.tobytes()
            return [ImageOutput(data, _media_type(data))]
        return [_own(tensor)]

    def _number(self, name: str, contents: Iterable[Content], pieces: list[Output]) -> None:
        for content in contents:
            pieces.append(Output(name, self._next_seqs[name], content))
            self._next_seqs[name] += 1


def _cut(samples: Array) -> Iterator[Array]:
    """Stretches that fit in a message."""
    step = max(1, _SOUND_PIECE_BYTES * len(samples) // max(1, samples.nbytes))
    for start in range(0, len(samples), step):
        yield _own(samples[start : start + step])


def _own(tensor: Array) -> Array:
    """A copy: a view may hold a lease on another replica's arena, and outputs are kept for callers to come."""
    return np.array(tensor)


def _media_type(data: bytes) -> str:
    for magic, media_type in _MEDIA_TYPES.items():
        if data.startswith(magic):
            return media_type
    return "application/octet-stream"
