"""Audio files for tests of the gateway."""

import io
import wave
from typing import Any

import av
import numpy as np
import numpy.typing as npt

from stagemesh.common.media.encodings import AudioEncoder

RATE_HZ = 16_000


def tone(seconds: float, *, loudness: float = 0.5) -> npt.NDArray[np.float32]:
    """Returns a tone of 440 Hz, float32[samples] at 16 kHz."""
    times_s = np.arange(round(seconds * RATE_HZ)) / RATE_HZ
    samples: npt.NDArray[np.float32] = (loudness * np.sin(2 * np.pi * 440 * times_s)).astype(np.float32)
    return samples


def wav(samples: npt.NDArray[np.float32], rate_hz: int = RATE_HZ) -> bytes:
    """Returns a WAV file with 16 bits, from [samples] or [samples, channels]."""
    buffer = io.BytesIO()
    with wave.open(buffer, "wb") as file:
        file.setparams((samples.shape[1] if samples.ndim > 1 else 1, 2, rate_hz, 0, "NONE", "NONE"))
        file.writeframes((samples * 32_767).astype("<i2").tobytes())
    return buffer.getvalue()


def encode(samples: npt.NDArray[np.float32], media_type: str) -> bytes:
    """Returns a file of a media type."""
    encoder = AudioEncoder(media_type, sample_rate_hz=RATE_HZ)
    return bytes(encoder.push(samples)) + bytes(encoder.finish())


def audio_file(
    codec: str, container: str, *, seconds: float = 1.0, rate_hz: int = 16_000, layout: str = "mono"
) -> bytes:
    """Returns a file with silence, by the names of the codec, the format and the layout of the channels in FFmpeg."""
    file = io.BytesIO()
    with av.open(file, "w", format=container) as output:
        stream: Any = output.add_stream(codec, rate=rate_hz)
        stream.codec_context.layout = layout
        for start in range(0, round(seconds * rate_hz), 1 << 20):
            samples = min(1 << 20, round(seconds * rate_hz) - start)
            silence = np.zeros((1, samples * av.AudioLayout(layout).nb_channels), np.int16)
            frame = av.AudioFrame.from_ndarray(silence, "s16", layout)
            frame.sample_rate, frame.pts = rate_hz, start
            output.mux(stream.encode(frame))
        output.mux(stream.encode(None))
    return file.getvalue()


def hours_of_silence() -> bytes:
    """Returns a FLAC file of four megabytes with five hours of silence. The frames of five minutes are repeated."""
    minutes = audio_file("flac", "flac", seconds=300)
    begin = minutes.index(b"\xff\xf8")
    return minutes[:begin] + 60 * minutes[begin:]
