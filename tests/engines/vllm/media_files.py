"""Synthetic images, audio and video for tests."""

import io
import wave
from collections.abc import Sequence

import av
import numpy as np
import numpy.typing as npt
from PIL import Image

from stagemesh.services.engines.prompts import MediaFile, Samples

Floats = npt.NDArray[np.float32]


def pixels(width: int = 56, height: int = 56, *, seed: int = 0) -> npt.NDArray[np.uint8]:
    """Returns the pixels of a noise image."""
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


def encoded(image: npt.NDArray[np.uint8], file_format: str = "PNG") -> bytes:
    """Returns an image as a file's bytes."""
    file = io.BytesIO()
    Image.fromarray(image).save(file, file_format)
    return file.getvalue()


def image(width: int = 56, height: int = 56, *, seed: int = 0) -> MediaFile:
    """Returns a PNG of noise."""
    return MediaFile("image", encoded(pixels(width, height, seed=seed)), "image/png")


def tone(seconds: float = 1.0, *, rate_hz: int = 16_000, pitch_hz: float = 440.0) -> Floats:
    """Returns the samples of a tone with a little noise."""
    times_s = np.arange(int(seconds * rate_hz)) / rate_hz
    noise = np.random.default_rng(0).standard_normal(len(times_s))
    return (0.5 * np.sin(2 * np.pi * pitch_hz * times_s) + 0.01 * noise).astype(np.float32)


def audio_samples(seconds: float = 1.0, *, rate_hz: int = 16_000, pitch_hz: float = 440.0) -> Samples:
    """Returns a tone as samples."""
    return Samples(tone(seconds, rate_hz=rate_hz, pitch_hz=pitch_hz), rate_hz)


def wav(samples: Floats, rate_hz: int = 16_000) -> bytes:
    """Returns a WAV file of 16-bit samples, from [samples] or [samples, channels]."""
    file = io.BytesIO()
    with wave.open(file, "wb") as writer:
        writer.setnchannels(samples.shape[1] if samples.ndim > 1 else 1)
        writer.setsampwidth(2)
        writer.setframerate(rate_hz)
        writer.writeframes((samples * 32767).astype("<i2").tobytes())
    return file.getvalue()


def video_file(
    grays: Sequence[int], *, width: int = 64, height: int = 48, file_format: str = "mp4", sound: Floats | None = None
) -> bytes:
    """Returns a video file of 10 Hz whose frames are each of one gray, with `sound` as its audio track at 16 kHz."""
    file = io.BytesIO()
    with av.open(file, "w", format=file_format) as container:
        track = container.add_stream("aac", rate=16_000, layout="mono") if sound is not None else None
        stream = container.add_stream("mpeg4", rate=10)
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        for gray in grays:
            frame = av.VideoFrame.from_ndarray(np.full((height, width, 3), gray, np.uint8), format="rgb24")
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
        if track is not None and sound is not None:
            audio = av.AudioFrame.from_ndarray(sound[np.newaxis], format="fltp", layout="mono")
            audio.sample_rate = 16_000
            container.mux(track.encode(audio))
            container.mux(track.encode(None))
    return file.getvalue()
