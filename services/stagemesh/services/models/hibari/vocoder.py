"""The vocoder stage, which converts spectral frames to audio. The samples do not depend on the packet boundaries.

The stage computes the same samples as `hibari.dsp.synth` does for a whole sentence, but as a stream. Between packets it
retains the phase of the pulse train, the pulse samples of the next windows, and the frames that still overlap. The
audio lags behind the frames by four frames. Noise is generated frame by frame. It therefore does not depend on the
packet boundaries either.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from hibari import dsp

from stagemesh.common.errors import InvalidRequestError
from stagemesh.common.wire.tensors import Array, Tensors, Value
from stagemesh.connectors.packets import Packet
from stagemesh.services.engines.function.base import Call, Saves
from stagemesh.services.models.hibari import BINS

Floats: TypeAlias = npt.NDArray[np.float32]

_HOP, _WINDOW = dsp.HOP, dsp.N_FFT
_OVERLAP = _WINDOW // _HOP
_HALF = _WINDOW // 2
_VOICED_HZ = 40.0
_HIGHEST_HZ = 11_000.0
_NEAR_POLE = 2e-3
_UINT64 = (1 << 64) - 1


class Vocoder(Saves["VocoderStream"]):
    """A `Function` that converts spectral frames to audio. The state of a request is a `VocoderStream`."""

    def __init__(self, model: Path | None, options: Mapping[str, object]) -> None:
        if model is not None or options:
            raise InvalidRequestError("hibari.vocoder accepts neither a model nor options", reason="UNKNOWN_OPTION")

    def open(self, *, seed: int, options: Mapping[str, Value]) -> "VocoderStream":  # noqa: ARG002
        return VocoderStream(seed)

    def save(self, state: "VocoderStream") -> Tensors:
        return state.save()

    def restore(self, tensors: Tensors, *, seed: int, options: Mapping[str, Value]) -> "VocoderStream":
        stream = self.open(seed=seed, options=options)
        stream.restore(tensors)
        return stream

    def __call__(self, batch: Sequence[Call["VocoderStream"]]) -> Sequence[Sequence[Packet]]:
        return [list(call.state.push(call.packet)) if call.packet else [] for call in batch]


class VocoderStream:
    """Converts the frames of one request to audio, sentence by sentence."""

    def __init__(self, seed: int) -> None:
        self._rng = np.random.default_rng(seed)
        self._sentence = SentenceStream(self._rng)

    def push(self, packet: Packet) -> Iterator[Packet]:
        """Converts a packet of frames to audio. Yields at most one packet of audio for each sentence in the
        packet.
        """
        spectrum, f0 = (packet.tensors[name].astype(np.float32, copy=False) for name in ("spectrum", "f0"))
        ends = [int(end) + 1 for end in np.flatnonzero(packet.tensors["boundary"])]
        start = 0
        for end in [*ends, len(f0)]:
            ended = end in ends
            if end > start or ended:
                samples = self._sentence.push(spectrum[start:end], f0[start:end], last=ended)
                if len(samples):
                    yield Packet({"audio": samples})
            if ended:
                self._sentence = SentenceStream(self._rng)
                ends.remove(end)
            start = end

    def save(self) -> Tensors:
        """Returns the tensors that `restore` needs, by name."""
        return {"random": _random_state(self._rng), **self._sentence.save()}

    def restore(self, tensors: Tensors) -> None:
        """Continues after the frames of the saved stream. Raises KeyError or ValueError if a tensor is not suitable."""
        _set_random_state(self._rng, tensors["random"])
        self._sentence.restore(tensors)


class SentenceStream:
    """Converts the frames of one sentence to audio."""

    def __init__(self, rng: np.random.Generator) -> None:
        self._rng = rng
        self._pulses = PulseTrain()
        self._source: Floats | None = None
        """The pulse samples that have not been converted, from the start of the next frame's window onwards.

        At the start of the sentence, a reflection of the first samples precedes them. None until enough samples for the
        reflection are available.
        """
        self._early: Floats = np.empty(0, np.float32)
        """The first pulse samples of the sentence, buffered until they suffice for the reflection."""
        self._spectrum: Floats = np.empty((0, 5, BINS), np.float32)
        self._overlapping: Floats = np.zeros((_OVERLAP - 1, _OVERLAP, _HOP), np.float32)
        self._frames_done = 0

    def push(self, spectrum: Floats, f0: Floats, *, last: bool) -> Floats:
        """Converts the sentence's next frames to audio. Returns the samples that are complete.

        `spectrum` is float32[frames, 5, bins]. `f0` is the pitch in Hz. `last` is True for the last frames of the
        sentence.
        """
        self._spectrum = np.concatenate([self._spectrum, spectrum])
        self._extend_source(self._pulses.push(f0, last=last), last=last)
        frames = self._inverse(self._next_windows())
        blocks = np.concatenate([self._overlapping, frames])
        total = self._frames_done + len(frames)
        if last:
            blocks = np.concatenate([blocks, np.zeros((_OVERLAP - 2, _OVERLAP, _HOP), np.float32)])
        first = self._frames_done
        self._frames_done, self._overlapping = total, blocks[len(blocks) - (_OVERLAP - 1) :]
        return _overlap_add(blocks, first=first, total=total if last else None)

    def save(self) -> Tensors:
        """Returns the tensors that `restore` needs, by name. They exclude the state of the random generator."""
        pending = {} if self._source is None else {"source": self._source}
        return {
            **pending,
            "early": self._early,
            "spectrum": self._spectrum,
            "overlapping": self._overlapping,
            "frames_done": np.array(self._frames_done),
            **self._pulses.save(),
        }

    def restore(self, tensors: Tensors) -> None:
        """Continues after the saved sentence. Raises KeyError or ValueError if a tensor is not suitable."""
        self._source = _checked(tensors, "source", (None,)) if "source" in tensors else None
        self._early = _checked(tensors, "early", (None,))
        self._spectrum = _checked(tensors, "spectrum", (None, *self._spectrum.shape[1:]))
        self._overlapping = _checked(tensors, "overlapping", self._overlapping.shape)
        self._frames_done = int(tensors["frames_done"])
        self._pulses.restore(tensors)

    def _extend_source(self, samples: Floats, *, last: bool) -> None:
        """Appends pulse samples to the source.

        Adds the reflections that the transform expects at both ends of the sentence. `last` is True for the last
        samples of the sentence.
        """
        if self._source is not None:
            self._source = np.concatenate([self._source, samples])
        else:
            self._early = np.concatenate([self._early, samples])
            if len(self._early) <= _HALF and not last:
                return
            self._source = np.pad(self._early, (_HALF, 0), mode="reflect") if len(self._early) else self._early
        if last and len(self._source):
            self._source = np.pad(self._source, (0, _HALF), mode="reflect")

    def _next_windows(self) -> Floats:
        """Removes and returns the complete windows of pulse samples, as float32[frames, window]."""
        if self._source is None or len(self._source) < _WINDOW:
            return np.empty((0, _WINDOW), np.float32)
        windows = np.lib.stride_tricks.sliding_window_view(self._source, _WINDOW)[::_HOP][: len(self._spectrum)]
        self._source = self._source[len(windows) * _HOP :]
        return windows

    def _inverse(self, windows: Floats) -> Floats:
        """Shapes windows of pulse samples with the spectrum of their frames.

        Returns the windowed frames in the time domain, as float32[frames, overlap, hop].
        """
        count = len(windows)
        if not count:
            return np.empty((0, _OVERLAP, _HOP), np.float32)
        parts, self._spectrum = self._spectrum[:count], self._spectrum[count:]
        log_harmonic, theta, log_noise, log_residual, phi = (parts[:, part] for part in range(parts.shape[1]))
        spectrum = dsp.rfft(windows * dsp.WIN_SRC, 1)
        spectrum *= _polar(dsp.ex(log_harmonic), np.tanh(theta) * np.float32(np.pi))
        noise = self._rng.standard_normal((count, 2 * BINS), dtype=np.float32).view(np.complex64)
        spectrum += noise * dsp.ex(log_noise)
        spectrum += _polar(dsp.ex(log_residual), phi)
        frames = dsp.irfft(spectrum, _WINDOW, 1) * dsp.WIN
        return frames.reshape(count, _OVERLAP, _HOP)


class PulseTrain:
    """The vocoder's source signal: a stream of band-limited pulses at the pitch frequency.

    The signal is the sum of all harmonics of the pitch below 11 kHz, at unit amplitude. It is zero if the pitch is at
    most 40 Hz. The samples lag behind the pitch by one frame.
    """

    def __init__(self) -> None:
        self._f0: Floats = np.empty(0, np.float32)
        """The pitch of the frames that have not been converted to samples, preceded by one converted frame,
        in Hz.
        """
        self._cycles_hz = 0.0
        """The sum of the pitch in Hz over all samples so far.

        Equals the phase in cycles, multiplied by the sample rate.
        """

    def push(self, f0: Floats, *, last: bool) -> Floats:
        """Converts the pitch of the next frames, in Hz, to pulse samples.

        `last` is True for the last frames of the sentence. Returns the samples of the frames that are complete, as
        float32[frames * hop].
        """
        before = f0[:1] if not len(self._f0) else self._f0[:0]
        known = np.concatenate([before, self._f0, f0])
        if last:
            known = np.concatenate([known, known[-1:]])
        count = max(0, len(known) - 2)
        self._f0 = known[count:] if not last else known[:0]
        return self._pulses(_interpolate(known)) if count else np.empty(0, np.float32)

    def save(self) -> Tensors:
        """Returns the tensors that `restore` needs, by name."""
        return {"f0": self._f0, "cycles_hz": np.array(self._cycles_hz)}

    def restore(self, tensors: Tensors) -> None:
        """Continues after the saved pitch. Raises KeyError or ValueError if a tensor is not suitable."""
        self._f0 = _checked(tensors, "f0", (None,))
        self._cycles_hz = float(tensors["cycles_hz"])

    def _pulses(self, pitch_hz: Floats) -> Floats:
        """Returns a pulse sample for each pitch in `pitch_hz`: the sum of cos(h t) over the harmonics h = 1 to H.

        H is the number of harmonics below 11 kHz, and t is the phase of the pitch in radians. In closed form, the
        sum is:

        sin((H + 1/2) t) / (2 sin(t / 2)) - 1/2
        """
        voiced = pitch_hz > _VOICED_HZ
        pitch_hz = np.maximum(pitch_hz, np.float32(_VOICED_HZ))
        # A running sum adds the samples one by one, so splitting the input does not change any bit of the result.
        cycles = np.cumsum(np.concatenate([[self._cycles_hz], pitch_hz]), dtype=np.float64)[1:]
        self._cycles_hz = float(cycles[-1])
        phase = (np.modf(cycles / dsp.SR)[0] * (2 * np.pi)).astype(np.float32)
        order = np.floor(np.float32(_HIGHEST_HZ) / pitch_hz) + np.float32(0.5)
        denominator = 2 * np.sin(phase * np.float32(0.5))
        near_pole = np.abs(denominator) <= _NEAR_POLE
        pulses = np.sin(order * phase) / np.where(near_pole, np.float32(1), denominator)
        pulses = np.where(near_pole, order, pulses) - np.float32(0.5)
        return np.where(voiced, pulses, np.float32(0)).astype(np.float32)


def _checked(tensors: Tensors, name: str, shape: tuple[int | None, ...]) -> Floats:
    """Returns a saved tensor of float32. Raises KeyError if it is missing, and ValueError if its shape differs.

    None in `shape` permits any size.
    """
    tensor = tensors[name]
    if tensor.ndim != len(shape) or any(size not in (None, own) for own, size in zip(tensor.shape, shape, strict=True)):
        raise ValueError(f"{name} has the shape {tensor.shape}; it must be {shape}")
    return tensor.astype(np.float32)


def _random_state(rng: np.random.Generator) -> Array:
    """Returns the state of a generator that `numpy.random.default_rng` has created, as int64[6]."""
    state: Any = rng.bit_generator.state
    numbers = (state["state"]["state"], state["state"]["inc"])
    halves = [half for number in numbers for half in (number >> 64, number & _UINT64)]
    return np.array([*halves, state["has_uint32"], state["uinteger"]], np.uint64).view(np.int64)


def _set_random_state(rng: np.random.Generator, saved: Array) -> None:
    """Sets the state of a generator to a result of `_random_state`. Raises ValueError if `saved` has another shape."""
    if saved.shape != (6,):
        raise ValueError(f"random has the shape {saved.shape}; it must be (6,)")
    high, low, high_step, low_step, has_half, half = map(int, saved.view(np.uint64))
    numbers = {"state": high << 64 | low, "inc": high_step << 64 | low_step}
    name = type(rng.bit_generator).__name__
    rng.bit_generator.state = {"bit_generator": name, "state": numbers, "has_uint32": has_half, "uinteger": half}


def _interpolate(f0: Floats) -> Floats:
    """Returns the pitch at each sample, in Hz, for all frames of `f0` except the first and the last one.

    The pitch is interpolated linearly between the centres of frames.
    """
    offset = ((np.arange(_HOP) + 0.5) / _HOP - 0.5).astype(np.float32)
    half = _HOP // 2
    rising, falling = offset[half:], offset[:half]
    frames = np.empty((len(f0) - 2, _HOP), np.float32)
    frames[:, :half] = f0[1:-1, None] * (1 + falling) - f0[:-2, None] * falling
    frames[:, half:] = f0[1:-1, None] * (1 - rising) + f0[2:, None] * rising
    return frames.reshape(-1)


def _polar(magnitude: Floats, angle: Floats) -> npt.NDArray[np.complex64]:
    result = np.empty(angle.shape, np.complex64)
    np.cos(angle, out=result.real)
    np.sin(angle, out=result.imag)
    result *= magnitude
    return result


def _overlap_add(blocks: Floats, *, first: int, total: int | None) -> Floats:
    """Adds overlapping frames and normalises the sums. Returns the samples that are complete.

    `first` is the number of the first new frame in the sentence. `blocks` starts with the earlier frames that overlap
    the new frames. `total` is the number of frames in the sentence, or None if the sentence continues.
    """
    count = len(blocks) - (_OVERLAP - 1)
    terms = [blocks[_OVERLAP - 1 - k : _OVERLAP - 1 - k + count, k] for k in range(_OVERLAP)]
    # The newest frame comes first, so that every sample is summed in the same order.
    samples = ((terms[0] + terms[1]) + terms[2]) + terms[3]
    for row in range(count):
        samples[row] *= _norm(
            tuple(first + row - k >= 0 and (total is None or first + row - k < total) for k in range(_OVERLAP))
        )
    # The transform is centred: the first half window precedes the sentence.
    return samples[max(0, _OVERLAP // 2 - first) :].reshape(-1)


@cache
def _norm(present: tuple[bool, ...]) -> Floats:
    """Returns the factors that normalise the samples of one hop, float32[hop].

    The factors are the reciprocals of the sums of the overlapping windows' squares. `present` states for each
    overlapping frame whether the sentence contains it.
    """
    squares = (dsp.WIN * dsp.WIN).reshape(_OVERLAP, _HOP)
    total = np.zeros(_HOP, np.float32)
    for k, is_present in enumerate(present):
        if is_present:
            total += squares[k]
    return (1.0 / np.maximum(total, 1e-11)).astype(np.float32)
