"""The vocoder's source signal: a band-limited pulse train that follows the pitch, computed as a stream."""

from typing import TypeAlias

import numpy as np
import numpy.typing as npt
from hibari import dsp

Floats: TypeAlias = npt.NDArray[np.float32]

_HOP = dsp.HOP
_VOICED_HZ = 40.0
_HIGHEST_HZ = 11_000.0
_NEAR_POLE = 2e-3


class PulseTrain:
    """A stream of pulses: the sum of all harmonics of the pitch below 11 kHz, at unit amplitude.

    Silent if the pitch is below 40 Hz. The samples lag behind the pitch by one frame.
    """

    def __init__(self) -> None:
        self._f0: Floats = np.empty(0, np.float32)
        """The pitch of the frames that have not been converted to samples, in Hz. Starts with one earlier frame."""
        self._cycles_hz = 0.0
        """The sum of the pitch over all samples so far. It equals the phase in cycles times the sample rate."""

    def push(self, f0: Floats, *, last: bool) -> Floats:
        """Converts the pitch of the next frames to samples. `f0` is in Hz. `last` marks the end of the sentence.

        Returns the samples of the frames that are complete, as float32[frames * hop].
        """
        before = f0[:1] if not len(self._f0) else self._f0[:0]
        known = np.concatenate([before, self._f0, f0])
        if last:
            known = np.concatenate([known, known[-1:]])
        count = max(0, len(known) - 2)
        self._f0 = known[count:] if not last else known[:0]
        return self._pulses(_interpolate(known)) if count else np.empty(0, np.float32)

    def _pulses(self, pitch_hz: Floats) -> Floats:
        """Returns, for each sample, the sum of cos(h t) over the harmonics h = 1 to H.

        H is the number of harmonics below the limit, and t is the phase of the pitch in radians.

        The sum equals sin((H + 1/2) t) / (2 sin(t / 2)) - 1/2.
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


def _interpolate(f0: Floats) -> Floats:
    """Returns the pitch at each sample of all frames except the first and the last frame, in Hz.

    The pitch is interpolated linearly between the centres of frames.
    """
    offset = ((np.arange(_HOP) + 0.5) / _HOP - 0.5).astype(np.float32)
    half = _HOP // 2
    rising, falling = offset[half:], offset[:half]
    frames = np.empty((len(f0) - 2, _HOP), np.float32)
    frames[:, :half] = f0[1:-1, None] * (1 + falling) - f0[:-2, None] * falling
    frames[:, half:] = f0[1:-1, None] * (1 - rising) + f0[2:, None] * rising
    return frames.reshape(-1)
