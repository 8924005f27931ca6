"""Detects speech: finds its start and its end in a stream of audio.

The audio is divided into frames of 20 ms. A frame is loud if its level in the band of speech exceeds the noise
floor by a threshold. The noise floor is the lowest level of the last seconds. It follows noise that grows or
fades, but not speech, whose level falls between words.
"""

import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from stagemesh.common.errors import InvalidChunkError, InvalidRequestError
from stagemesh.common.plugins.descriptors import Emitted, FunctionDescriptor, OptionSpec, Signature
from stagemesh.common.wire.tensors import TensorSpec, Value
from stagemesh.connectors.packets import Packet
from stagemesh.services.engines.function.base import Call

_OPTIONS = {
    "threshold_db": OptionSpec(10.0, minimum=3.0, maximum=40.0, description="Level of speech above the noise, in dB."),
    "speech_ms": OptionSpec(100, minimum=20, maximum=2_000, description="Duration of sound that is speech, in ms."),
    "silence_ms": OptionSpec(
        500, minimum=20, maximum=10_000, description="Duration of silence that ends speech, in ms."
    ),
    "padding_ms": OptionSpec(
        300, minimum=0, maximum=2_000, description="Audio that counts as speech before and after the sound, in ms."
    ),
}
TURNS = FunctionDescriptor(
    signature=Signature(
        accepts={"audio": TensorSpec("float32", ("samples",))},
        # A row for each begin (1.0) and each end (0.0) of speech, with its time in the audio in seconds.
        emits={"speech": Emitted(TensorSpec("float64", ("events", 2)))},
        options=_OPTIONS,
    ),
    factory="stagemesh.services.models.speech_detection:Turns",
    stage_options={},
)


Floats: TypeAlias = npt.NDArray[np.float32]

SAMPLE_RATES_HZ = range(8_000, 48_001)
_FRAMES_PER_S = 50
_BAND_HZ = (250.0, 4_000.0)
"""The frequencies whose power is measured. The hum of power lines is below them."""
_LOWEST_DB = -55.0
"""The lowest noise floor, in dB relative to full scale. Without it, any noise after digital silence would be speech."""
_FLOOR_FRAMES = 150
"""The number of last frames whose lowest level is the noise floor: 3 s."""
_SMOOTHED_FRAMES = 3
"""The number of frames whose mean level is compared with the noise floor, because single frames of noise vary."""


class Turns:
    """A `Function` that emits the begins and the ends of speech in audio. The state of a request is a `SpeechStream`.

    The events do not depend on how the audio is divided into packets.
    """

    def __init__(self, model: Path | None, options: Mapping[str, object]) -> None:
        if model is not None or options:
            raise InvalidRequestError("audio.turns accepts neither a model nor options", reason="UNKNOWN_OPTION")

    def open(self, *, seed: int, options: Mapping[str, Value]) -> "SpeechStream":  # noqa: ARG002
        return SpeechStream(options)

    def __call__(self, batch: Sequence[Call["SpeechStream"]]) -> Sequence[Sequence[Packet]]:
        for call in batch:
            if call.packet is not None:
                call.state.check(call.packet)
        return [_packets(call.state.push(call.packet) if call.packet else call.state.finish()) for call in batch]


class SpeechEvent(NamedTuple):
    """The begin or the end of speech. `at_s` is its time in the audio, in seconds."""

    begins: bool
    at_s: float


class SpeechStream:
    """Finds speech in the audio of one request. `options` are those of the function, completed with the defaults."""

    def __init__(self, options: Mapping[str, Value]) -> None:
        self._detector = SpeechDetector(
            threshold_db=float(options["threshold_db"]),
            speech_frames=_frames_of(options["speech_ms"]),
            silence_frames=_frames_of(options["silence_ms"]),
            padding_frames=_frames_of(options["padding_ms"]),
        )
        self._levels: FrameLevels | None = None

    def check(self, packet: Packet) -> None:
        """Checks a packet before any state changes.

        Raises InvalidRequestError (INVALID_MEDIA) if its sample rate is not from 8,000 to 48,000 Hz or not that of
        earlier packets, or if a sample is not finite. Raises InvalidChunkError if it has no sample rate.
        """
        rate_hz = packet.metadata.get("sample_rate_hz")
        if rate_hz is None:
            raise InvalidChunkError("a packet of audio has no metadata value sample_rate_hz")
        if rate_hz not in SAMPLE_RATES_HZ:
            raise InvalidRequestError(
                f"audio is at {rate_hz} Hz; turns are detected at {SAMPLE_RATES_HZ[0]} to {SAMPLE_RATES_HZ[-1]} Hz",
                reason="INVALID_MEDIA",
            )
        if self._levels is not None and rate_hz != self._levels.sample_rate_hz:
            raise InvalidRequestError(
                f"audio is at {rate_hz} Hz after audio at {self._levels.sample_rate_hz} Hz; send one rate in a request",
                reason="INVALID_MEDIA",
            )
        if not np.isfinite(packet.tensors["audio"]).all():
            raise InvalidRequestError("audio contains samples that are not finite", reason="INVALID_MEDIA")

    def push(self, packet: Packet) -> Iterator[SpeechEvent]:
        """Yields the events that the packet completes."""
        if self._levels is None:
            self._levels = FrameLevels(int(packet.metadata["sample_rate_hz"]))
        for level_db in self._levels.push(packet.tensors["audio"].astype(np.float32, copy=False)):
            if event := self._detector.push(level_db):
                yield event

    def finish(self) -> Iterator[SpeechEvent]:
        """Yields the end of speech if the audio ends within speech."""
        if event := self._detector.finish():
            yield event


class FrameLevels:
    """Measures the level of each frame of 20 ms, in dB relative to full scale, from -55 dB.

    The frame k begins with the sample floor(k * 20 ms * rate). The levels do not depend on how the audio is divided.
    """

    def __init__(self, sample_rate_hz: int) -> None:
        self.sample_rate_hz = sample_rate_hz
        self._length = sample_rate_hz // _FRAMES_PER_S
        # The side lobes of this window are so low that loud hum does not reach the band.
        self._window = np.blackman(self._length)
        low, high = np.searchsorted(np.fft.rfftfreq(self._length, 1 / sample_rate_hz), _BAND_HZ)
        self._band = slice(int(low), int(high))
        self._scale = 2 / (self._length * float(np.sum(self._window**2)))
        self._samples: Floats = np.empty(0, np.float32)
        """The received samples from `self._begin` on."""
        self._begin = self._frame = 0

    def push(self, samples: Floats) -> Iterator[float]:
        """Yields the levels of the frames that the samples complete."""
        self._samples = np.concatenate([self._samples, samples])
        while (start := self._next_start) + self._length <= len(self._samples):
            yield self._level_db(self._samples[start : start + self._length])
            self._frame += 1
        # At some rates, a sample between two frames belongs to neither.
        done = min(start, len(self._samples))
        self._begin += done
        self._samples = self._samples[done:].copy()

    @property
    def _next_start(self) -> int:
        return self._frame * self.sample_rate_hz // _FRAMES_PER_S - self._begin

    def _level_db(self, frame: Floats) -> float:
        spectrum = np.fft.rfft(frame * self._window)[self._band]
        power = float(np.sum(spectrum.real**2 + spectrum.imag**2)) * self._scale
        return max(_LOWEST_DB, 10 * math.log10(power)) if power > 0 else _LOWEST_DB


class SpeechDetector:
    """Finds the begin and the end of speech in the levels of frames.

    Speech begins with a run of at least `speech_frames` loud frames. It ends when no such run has been found in the
    last `silence_frames` frames. A run begins with a level of `threshold_db` above the noise floor, and continues at
    half of that. So does speech. `padding_frames` before the first and after the last loud frame belong to the speech.
    """

    def __init__(self, *, threshold_db: float, speech_frames: int, silence_frames: int, padding_frames: int) -> None:
        self._threshold_db = threshold_db
        self._speech_frames, self._silence_frames = speech_frames, silence_frames
        self._padding_frames = padding_frames
        self._latest = deque[float](maxlen=_SMOOTHED_FRAMES)
        self._smoothed = deque[float](maxlen=_FLOOR_FRAMES)
        self._frames = self._run = 0
        self._speaks = False
        self._loud_until = self._silent_from = 0
        """The frames after the last run of loud frames, and after the last end of speech."""

    def push(self, level_db: float) -> SpeechEvent | None:
        """Adds a frame. Returns the event that it completes, or None."""
        self._frames += 1
        if self._is_loud(level_db):
            self._run += 1
            return self._begin_or_continue() if self._run >= self._speech_frames else None
        self._run = 0
        return self.finish() if self._frames - self._loud_until >= self._silence_frames else None

    def finish(self) -> SpeechEvent | None:
        """Returns the end of the speech, or None if there is no speech."""
        if not self._speaks:
            return None
        self._speaks = False
        self._silent_from = min(self._loud_until + self._padding_frames, self._frames)
        return SpeechEvent(begins=False, at_s=self._silent_from / _FRAMES_PER_S)

    def _is_loud(self, level_db: float) -> bool:
        self._latest.append(level_db)
        self._smoothed.append(sum(self._latest) / len(self._latest))
        continues = self._speaks or self._run > 0
        return level_db - min(self._smoothed) > self._threshold_db * (0.5 if continues else 1.0)

    def _begin_or_continue(self) -> SpeechEvent | None:
        self._loud_until = self._frames
        if self._speaks:
            return None
        self._speaks = True
        begin = max(self._frames - self._run - self._padding_frames, self._silent_from)
        return SpeechEvent(begins=True, at_s=begin / _FRAMES_PER_S)


def _frames_of(duration_ms: Value) -> int:
    return math.ceil(float(duration_ms) * _FRAMES_PER_S / 1_000)


def _packets(events: Iterator[SpeechEvent]) -> list[Packet]:
    rows = list(events)
    return [Packet({"speech": np.array(rows, np.float64)})] if rows else []
