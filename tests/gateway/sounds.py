"""Audio files for tests of the gateway."""

import io
import wave

import numpy as np
import numpy.typing as npt

from stagemesh.common.media.encodings import AudioEncoder

RATE_HZ = 16_000


def tone(seconds: float, *, loudness: float = 0.5) -> npt.NDArray[np.float32]:
    """Returns a tone of 440 Hz, float32[samples] at 16 kHz."""
    times_s = np.arange(round(seconds * RATE_HZ)) / RATE_HZ
    samples: npt.NDArray[np.float32] = (loudness * np.sin(2 * np.pi * 440 * times_s)).astype(np.float32)
    return samples


def wav(samples: npt.NDArray[np.float32], *, rate_hz: int = RATE_HZ) -> bytes:
    """Returns a WAV file with 16 bits of one channel."""
    buffer = io.BytesIO()
    with wave.open(buffer, "wb") as file:
        file.setparams((1, 2, rate_hz, 0, "NONE", "NONE"))
        file.writeframes((samples * 32_767).astype("<i2").tobytes())
    return buffer.getvalue()


def encode(samples: npt.NDArray[np.float32], media_type: str) -> bytes:
    """Returns a file of a media type."""
    encoder = AudioEncoder(media_type, sample_rate_hz=RATE_HZ)
    return bytes(encoder.push(samples)) + bytes(encoder.finish())
