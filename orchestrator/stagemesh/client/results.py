"""The result of a finished request, which contains all of its outputs."""

import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TypeVar

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

EventT = TypeVar("EventT", Admitted, Finished)
OutputT = TypeVar("OutputT", Text, Tokens, AudioChunk, Image, TensorOutput)


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
        self._events: list[Event] = []
        self._first_s: dict[type[Event], float] = {}
        """The time in seconds at which the first event of each type was added."""

    def add(self, event: Event) -> None:
        """Adds an event. The events must be added in the order in which they arrived."""
        self._events.append(event)
        self._first_s.setdefault(type(event), self._now_s())

    def build(self) -> Result:
        """Returns the result. Raises InternalError if the `Admitted` or the `Finished` event is missing."""
        admitted, finished = self._last(Admitted), self._last(Finished)
        if admitted is None or finished is None:
            raise InternalError("the server ended the stream without a `finished` event; report this as a defect")
        tokens = self._by_output(Tokens)
        return Result(
            request_id=admitted.request_id,
            seed=admitted.seed,
            texts={output: "".join(each.delta for each in texts) for output, texts in self._by_output(Text).items()},
            tokens={output: tuple(chain.from_iterable(each.ids for each in made)) for output, made in tokens.items()},
            logprobs={output: logprobs for output, made in tokens.items() if (logprobs := _logprobs(made))},
            audios={output: _join(chunks) for output, chunks in self._by_output(AudioChunk).items()},
            images={output: images[-1] for output, images in self._by_output(Image).items()},
            tensors={output: tuple(tensors) for output, tensors in self._by_output(TensorOutput).items()},
            finished=finished,
            first_text_s=self._first_s.get(Text),
            first_audio_s=self._first_s.get(AudioChunk),
            first_image_s=self._first_s.get(Image),
            total_s=self._now_s(),
        )

    def _last(self, kind: type[EventT]) -> EventT | None:
        return next((event for event in reversed(self._events) if isinstance(event, kind)), None)

    def _by_output(self, kind: type[OutputT]) -> Mapping[str, Sequence[OutputT]]:
        """Returns the events of this type, by output name."""
        events = defaultdict[str, list[OutputT]](list)
        for event in self._events:
            if isinstance(event, kind):
                events[event.output].append(event)
        return events

    def _now_s(self) -> float:
        return time.monotonic() - self._begun_s


def _logprobs(made: Sequence[Tokens]) -> tuple[TokenLogprobs, ...]:
    return tuple(chain.from_iterable(each.logprobs for each in made))


def _join(chunks: Sequence[AudioChunk]) -> Audio:
    return Audio(np.concatenate([chunk.samples for chunk in chunks]), chunks[0].sample_rate_hz)
