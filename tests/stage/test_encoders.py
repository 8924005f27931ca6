"""Encoders of audio and video files."""

import io
from typing import Any

import av
import numpy as np
import pytest

from stagemesh.common.errors import UnsupportedError
from stagemesh.common.media.encodings import AUDIO_ENCODINGS, VIDEO_ENCODINGS, make_encoder
from stagemesh.common.wire.tensors import Array

RATE_HZ = 24_000
TONE = (0.3 * np.sin(np.arange(2 * RATE_HZ) / 8)).astype(np.float32)
FRAMES = np.linspace(0, 1, 50 * 3 * 32 * 48, dtype=np.float32).reshape(50, 3, 32, 48)


def encode(media_type: str, tensors: list[Array], **options: Any) -> bytes:
    encoder = make_encoder(media_type, **options)
    return b"".join([*(bytes(encoder.push(tensor)) for tensor in tensors), bytes(encoder.finish())])


@pytest.mark.parametrize("media_type", AUDIO_ENCODINGS)
@pytest.mark.parametrize("channels", [1, 2])
def test_audio_is_readable_and_does_not_depend_on_its_division(media_type: str, channels: int) -> None:
    samples = TONE if channels == 1 else np.stack([TONE, TONE], axis=1)
    file = encode(media_type, [samples[:100], samples[100:]], sample_rate_hz=RATE_HZ)
    assert file == encode(media_type, np.array_split(samples, 7), sample_rate_hz=RATE_HZ)
    with av.open(io.BytesIO(file), "r") as container:
        stream = container.streams.audio[0]
        decoded = list(container.decode(stream))
        assert sum(frame.samples for frame in decoded) / stream.rate == pytest.approx(2, abs=0.1)
        assert stream.layout.nb_channels == channels


@pytest.mark.parametrize("media_type", VIDEO_ENCODINGS)
def test_video_is_readable_and_does_not_depend_on_its_division(media_type: str) -> None:
    file = encode(media_type, np.array_split(FRAMES, 3), frame_rate=24)
    pixels = (FRAMES.transpose(0, 2, 3, 1) * 255).round().astype(np.uint8)
    assert file == encode(media_type, np.array_split(pixels, 5), frame_rate=24)
    with av.open(io.BytesIO(file), "r") as container:
        decoded = np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)])
        assert container.streams.video[0].average_rate == 24
    assert decoded.shape == pixels.shape
    assert np.abs(decoded.astype(np.int16) - pixels).mean() < 8


def test_a_video_is_made_while_its_frames_arrive() -> None:
    encoder = make_encoder("video/mp4", frame_rate=10)
    made = [len(encoder.push(part)) for part in np.array_split(FRAMES, 5)]
    assert sum(size > 0 for size in made) >= 3
    assert len(encoder.finish())


def test_raw_bytes_are_not_copied() -> None:
    tensor = np.arange(6, dtype=np.int16).reshape(2, 3)
    data = make_encoder("application/octet-stream").push(tensor)
    tensor[0, 0] = 9
    assert bytes(data) == tensor.tobytes()


@pytest.mark.parametrize(
    ("media_type", "tensors", "said"),
    [
        ("video/mp4", [np.zeros((1, 31, 48, 3), np.uint8)], "48 by 31 pixels, but both must be even"),
        ("video/mp4", [FRAMES[:1], FRAMES[:1, :, :16]], "change from"),
        ("audio/ogg", [np.zeros((9, 3), np.float32)], "3 channels, but one or two"),
        ("audio/wav", [TONE, TONE[:, None].repeat(2, 1)], "begins with 1 channels"),
    ],
)
def test_what_a_format_cannot_contain_is_rejected(media_type: str, tensors: list[Array], said: str) -> None:
    with pytest.raises(UnsupportedError, match=said) as caught:
        encode(media_type, tensors, sample_rate_hz=RATE_HZ, frame_rate=24)
    assert caught.value.reason == "OUTPUT_NOT_ENCODABLE"
