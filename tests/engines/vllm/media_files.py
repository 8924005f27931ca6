"""Synthetic images, audio and video for tests."""

import io
from collections.abc import Sequence
from typing import Any

import av
import numpy as np
import numpy.typing as npt
from PIL import Image

from stagemesh.services.engines.prompts import MediaFile, Samples
from tests.pictures import encoded_image

Floats = npt.NDArray[np.float32]


def pixels(width: int = 56, height: int = 56, *, seed: int = 0) -> npt.NDArray[np.uint8]:
    """Returns the pixels of a noise image."""
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


def encoded(image: npt.NDArray[np.uint8], file_format: str = "PNG") -> bytes:
    """Returns an image as a file's bytes."""
    return encoded_image(Image.fromarray(image), file_format)


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


def gray_video(
    grays: Sequence[int], *, width: int = 64, height: int = 48, container: str = "mp4", sound: Floats | None = None
) -> bytes:
    """Returns a video file of 10 Hz whose frames are each of one gray, with `sound` as its audio track at 16 kHz."""
    frames = np.broadcast_to(np.array(grays, np.uint8)[:, None, None, None], (len(grays), height, width, 3))
    return video_file(frames, container=container, sound=sound)


def video_file(
    frames: npt.NDArray[np.uint8],
    *,
    codec: str = "mpeg4",
    container: str = "mp4",
    pixel_format: str = "yuv420p",
    rate_hz: int = 10,
    sound: Floats | None = None,
    sound_codec: str = "aac",
    sound_hz: int = 16_000,
) -> bytes:
    """Returns a video file of `frames`, [frames, height, width, 3], with `sound`, [samples], as its audio track."""
    file = io.BytesIO()
    with av.open(file, "w", format=container) as output:
        track: Any = output.add_stream(sound_codec, rate=sound_hz, layout="mono") if sound is not None else None
        stream: Any = output.add_stream(codec, rate=rate_hz)
        stream.height, stream.width, stream.pix_fmt = frames.shape[1], frames.shape[2], pixel_format
        for frame in frames:
            output.mux(stream.encode(av.VideoFrame.from_ndarray(np.ascontiguousarray(frame), format="rgb24")))
        output.mux(stream.encode(None))
        if sound is not None:
            audio = av.AudioFrame.from_ndarray(sound[np.newaxis], format=track.codec_context.format.name, layout="mono")
            audio.sample_rate = sound_hz
            output.mux(track.encode(audio))
            output.mux(track.encode(None))
    return file.getvalue()
