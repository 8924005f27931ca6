"""The result of a finished request, which contains all of its outputs."""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from stagemesh.client.events import (
    Admitted,
    AudioChunk,
    Event,
    Finished,
    Image,
    TensorOutput,
    Text,
    TokenLogprobs,
    Tokens,
)
from stagemesh.client.wav import WavWriter
from stagemesh.common.errors import InternalError, NotFoundError


@dataclass(frozen=True, eq=False)
class Audio:
    """A complete audio output: float32 in [-1, 1], with shape [samples] or [samples, channels]."""

    samples: npt.NDArray[np.float32]
    sample_rate_hz: int

    @property
    def duration_s(self) -> float:
        """The playing time of the samples in seconds."""
        return len(self.samples) / self.sample_rate_hz


@dataclass(frozen=True, eq=False)
class Result:
    """All outputs of a request, by output name.

    `first_text_s`, `first_audio_s` and `first_image_s` are the times of the first text, audio and image, in seconds
    since the call. Each is None if the request produced no such output.
    """

    request_id: str
    seed: int
    texts: Mapping[str, str]
    tokens: Mapping[str, tuple[int, ...]]
    logprobs: Mapping[str, tuple[TokenLogprobs, ...]]
    """The log-probabilities of each token by output name. Empty unless the request asked for log-probabilities."""
    audios: Mapping[str, Audio]
    images: Mapping[str, Image]
    tensors: Mapping[str, tuple[TensorOutput, ...]]
    finished: Finished
    first_text_s: float | None
    first_audio_s: float | None
    first_image_s: float | None
    total_s: float

    @property
    def text(self) -> str:
        """The text of all text outputs, concatenated. Empty if there is no text output."""
        return "".join(self.texts.values())

    @property
    def audio(self) -> npt.NDArray[np.float32]:
        """The samples of the first audio output, or an empty array if there is no audio output."""
        return self._first_audio().samples if self.audios else np.empty(0, np.float32)

    @property
    def sample_rate_hz(self) -> int:
        """The sample rate of the first audio output in hertz, or 0 if there is no audio output."""
        return self._first_audio().sample_rate_hz if self.audios else 0

    def save_wav(self, path: Path | str) -> None:
        """Writes the first audio output to a WAV file as 16-bit PCM.

        Raises NotFoundError if there is no audio output.
        """
        if not self.audios:
            raise NotFoundError("the request produced no audio to save; request an audio output", reason="NO_AUDIO")
        with WavWriter(path) as writer:
            writer.write(self.audio, sample_rate_hz=self.sample_rate_hz)

    def _first_audio(self) -> Audio:
        return next(iter(self.audios.values()))


class ResultBuilder:
    """Collects the events of a request into a Result.

    The times in the Result are in seconds since the ResultBuilder was constructed.
    """

    def __init__(self) -> None:
        self._begun_s = time.monotonic()
        self._admitted: Admitted | None = None
        self._finished: Finished | None = None
        self._texts: dict[str, list[str]] = {}
        self._tokens: dict[str, list[int]] = {}
        self._logprobs: dict[str, list[TokenLogprobs]] = {}
        self._audios: dict[str, list[AudioChunk]] = {}
        self._images: dict[str, Image] = {}
        self._tensors: dict[str, list[TensorOutput]] = {}
        self._first_text_s: float | None = None
        self._first_audio_s: float | None = None
        self._first_image_s: float | None = None

    def add(self, event: Event) -> None:
        """Adds an event. The events must be added in the order in which they arrived."""
        match event:
            case Admitted():
                self._admitted = event
            case Text():
                self._first_text_s = self._first_text_s or self._now_s()
                self._texts.setdefault(event.output, []).append(event.delta)
            case AudioChunk():
                self._first_audio_s = self._first_audio_s or self._now_s()
                self._audios.setdefault(event.output, []).append(event)
            case Tokens():
                self._tokens.setdefault(event.output, []).extend(event.ids)
                if event.logprobs:
                    self._logprobs.setdefault(event.output, []).extend(event.logprobs)
            case Image():
                self._first_image_s = self._first_image_s or self._now_s()
                self._images[event.output] = event
            case TensorOutput():
                self._tensors.setdefault(event.output, []).append(event)
            case Finished():
                self._finished = event
            case _:
                pass

    def build(self) -> Result:
        """Returns the result. Raises InternalError if the `Admitted` or the `Finished` event is missing."""
        if self._admitted is None or self._finished is None:
            raise InternalError("the server ended the stream without a `finished` event; report this as a defect")
        return Result(
            request_id=self._admitted.request_id,
            seed=self._admitted.seed,
            texts={output: "".join(deltas) for output, deltas in self._texts.items()},
            tokens={output: tuple(ids) for output, ids in self._tokens.items()},
            logprobs={output: tuple(logprobs) for output, logprobs in self._logprobs.items()},
            audios={output: _join(chunks) for output, chunks in self._audios.items()},
            images=self._images,
            tensors={output: tuple(tensors) for output, tensors in self._tensors.items()},
            finished=self._finished,
            first_text_s=self._first_text_s,
            first_audio_s=self._first_audio_s,
            first_image_s=self._first_image_s,
            total_s=self._now_s(),
        )

    def _now_s(self) -> float:
        return time.monotonic() - self._begun_s


def _join(chunks: list[AudioChunk]) -> Audio:
    return Audio(np.concatenate([chunk.samples for chunk in chunks]), chunks[0].sample_rate_hz)
