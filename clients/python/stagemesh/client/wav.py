"""WAV files with 16-bit PCM samples: reads them, and writes them while the samples arrive."""

import wave
from contextlib import AbstractContextManager
from pathlib import Path
from typing import BinaryIO

import numpy as np
import numpy.typing as npt

from stagemesh.client.content import AudioSamples
from stagemesh.common.errors import InvalidRequestError, writing

_SAMPLE_BYTES = 2
_SCALE = np.float32(1 / 32768)


def read_wav(path: Path | str) -> AudioSamples:
    """Returns the samples of a WAV file.

    Raises InvalidRequestError (INVALID_MEDIA) if the file cannot be read, or if its samples are not 16-bit PCM.
    """
    try:
        with wave.open(str(path), "rb") as file:
            channels, width, rate, frames = file.getparams()[:4]
            data = file.readframes(frames)
    except (OSError, EOFError, wave.Error) as exc:
        raise InvalidRequestError(f"cannot read {path} as a WAV file: {exc}", reason="INVALID_MEDIA") from exc
    if width != _SAMPLE_BYTES:
        text = f"the samples of {path} have {8 * width} bits; convert them to 16-bit PCM"
        raise InvalidRequestError(text, reason="INVALID_MEDIA")
    samples = np.frombuffer(data, np.dtype("<i2")).astype(np.float32) * _SCALE
    return AudioSamples(samples.reshape(-1, channels) if channels > 1 else samples, rate)


class WavWriter(AbstractContextManager["WavWriter"]):
    """A writer of float32 samples to a WAV file. Clips samples outside [-1, 1].

    The first call of `write` creates the file and, if necessary, the file's folder. No file is created if `write` is
    never called.
    """

    def __init__(self, path: Path | str) -> None:
        self._path = Path(path)
        self._raw: BinaryIO | None = None
        self._file: wave.Wave_write | None = None

    def write(self, samples: npt.NDArray[np.float32], *, sample_rate_hz: int) -> None:
        """Appends float32 samples of shape [samples] or [samples, channels] to the file.

        Raises InvalidRequestError if the file cannot be created, or if the sample rate or the number of channels
        differs from that of the first samples.
        """
        channels = 1 if samples.ndim == 1 else samples.shape[1]
        if self._file is None:
            self._raw = _create(self._path)
            self._file = wave.open(self._raw, "wb")  # noqa: SIM115 - `close` closes it
            # The 0 stands for the number of frames, which the file determines when it is closed.
            self._file.setparams((channels, 2, sample_rate_hz, 0, "NONE", "not compressed"))
        if (self._file.getnchannels(), self._file.getframerate()) != (channels, sample_rate_hz):
            raise InvalidRequestError(
                f"{self._path} has {self._file.getnchannels()} channels at {self._file.getframerate()} Hz; "
                f"{channels} channels at {sample_rate_hz} Hz cannot be appended"
            )
        self._file.writeframes(_pcm16(samples))

    def close(self) -> None:
        """Completes the WAV header and closes the file. Idempotent."""
        if self._file is not None:
            self._file.close()
        if self._raw is not None:
            self._raw.close()

    def __exit__(self, *_: object) -> None:
        self.close()


def _create(path: Path) -> BinaryIO:
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        return path.open("wb")


def _pcm16(samples: npt.NDArray[np.float32]) -> bytes:
    # NaN becomes silence.
    scaled: npt.NDArray[np.float32] = np.rint(np.clip(np.nan_to_num(samples), -1.0, 1.0) * np.float32(32767))
    return scaled.astype(np.dtype("<i2")).tobytes()
