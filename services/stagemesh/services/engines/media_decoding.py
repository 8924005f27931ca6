"""Decodes the audio of prompts: files, and samples from the caller."""

import numpy as np
import numpy.typing as npt

from stagemesh.common.errors import InvalidRequestError
from stagemesh.common.media.decoding import DecodedAudio, DecodedBytes, read_audio, reading
from stagemesh.services.engines.prompts import MediaFile, Medium, Samples


def read_sound(medium: Medium, decoded: DecodedBytes) -> DecodedAudio:
    """Decodes the samples or the audio track of a medium. See `read_samples` and `read_audio`."""
    if not isinstance(medium, MediaFile):
        return read_samples(medium, decoded)
    with medium.open() as content:
        return read_audio(content, medium.kind, decoded)


def read_samples(audio: Samples, decoded: DecodedBytes) -> DecodedAudio:
    """Converts audio samples from the caller to float32 samples of one channel. Adds their size to `decoded`.

    Raises InvalidRequestError if a sample is not finite or if the audio is too long.
    """
    decoded.add(audio.samples.nbytes, "audio")
    mono = audio.samples.astype(np.float32, copy=False)
    if mono.ndim > 1:
        mono = mono.mean(axis=1, dtype=np.float32)
    if not np.isfinite(mono).all():
        first = int(np.flatnonzero(~np.isfinite(mono))[0])
        raise InvalidRequestError(f"audio sample {first} is {mono[first]}; it must be finite", reason="INVALID_MEDIA")
    return DecodedAudio(mono, audio.sample_rate_hz)


def resample(audio: DecodedAudio, sample_rate_hz: int) -> npt.NDArray[np.float32]:
    """Returns audio at another sample rate, float32[samples]. Raises UnsupportedError if PyAV is not installed."""
    if audio.sample_rate_hz == sample_rate_hz:
        return audio.samples
    with reading("audio"):
        from av import AudioFrame, AudioResampler

        frame = AudioFrame.from_ndarray(audio.samples[None], format="fltp", layout="mono")
        frame.sample_rate = audio.sample_rate_hz
        resampler = AudioResampler(format="fltp", layout="mono", rate=sample_rate_hz)
        # None flushes the resampler.
        parts = [part.to_ndarray()[0] for given in (frame, None) for part in resampler.resample(given)]
        samples: npt.NDArray[np.float32] = np.concatenate(parts).astype(np.float32, copy=False)
        return samples
