"""Media files from callers are decoded within limits, or rejected."""

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from stagemesh.common.errors import InvalidRequestError
from stagemesh.common.media.decoding import DecodedBytes
from stagemesh.services.engines.media_decoding import read_audio, read_image, read_samples, read_video
from stagemesh.services.engines.prompts import MediaFile, Samples
from tests.engines.vllm.media_files import encoded, gray_video, pixels, tone
from tests.gateway.sounds import wav
from tests.pictures import encoded_image
from tests.rpc.call_errors import raises

PLENTY = 64 << 20
Reader = Callable[[Any, DecodedBytes], object]


def image_file(data: bytes, media_type: str = "image/png") -> MediaFile:
    return MediaFile("image", data, media_type)


def video(data: bytes, media_type: str = "video/mp4") -> MediaFile:
    return MediaFile("video", data, media_type)


def audio(data: bytes, media_type: str = "audio/wav") -> MediaFile:
    return MediaFile("audio", data, media_type)


@pytest.mark.parametrize("name", ["png", "jpeg", "webp", "gif", "bmp"])
def test_images_of_each_type_are_read(name: str) -> None:
    read = read_image(image_file(encoded(pixels(30, 20), name), f"image/{name}"), DecodedBytes(PLENTY))
    assert read.size == (30, 20)


def test_audio_keeps_its_rate_and_length() -> None:
    read = read_audio(audio(wav(tone(rate_hz=8_000), 8_000)), DecodedBytes(PLENTY))
    assert read.sample_rate_hz == 8_000
    np.testing.assert_allclose(read.samples, tone(rate_hz=8_000), atol=1e-4)


def test_channels_of_a_file_are_averaged() -> None:
    both = np.stack([tone(), np.zeros_like(tone())], axis=1)
    read = read_audio(audio(wav(both)), DecodedBytes(PLENTY))
    assert read.samples.shape == tone().shape
    assert np.corrcoef(read.samples, tone())[0, 1] > 0.99


def test_video_frames_are_sampled_evenly() -> None:
    read = read_video(video(gray_video([10 * number for number in range(20)])), DecodedBytes(PLENTY), max_frames=5)
    assert read.metadata["frames_indices"] == [0, 5, 10, 14, 19]
    np.testing.assert_allclose(read.frames.mean(axis=(1, 2, 3)), [0, 50, 100, 140, 190], atol=3)
    assert read.frames.shape == (5, 48, 64, 3)
    assert (read.metadata["total_num_frames"], read.metadata["duration"]) == (20, 2.0)


def test_all_frames_of_a_short_video_are_read() -> None:
    file = video(gray_video([0, 100, 200], container="avi"), "video/x-msvideo")
    read = read_video(file, DecodedBytes(PLENTY), max_frames=32)
    assert read.metadata["frames_indices"] == [0, 1, 2]


def test_a_wav_file_of_unknown_length_is_read_to_its_end() -> None:
    data = wav(tone())
    piped = data[:4] + b"\xff\xff\xff\xff" + data[8:40] + b"\xff\xff\xff\xff" + data[44:]
    read, expected = (read_audio(audio(each), DecodedBytes(PLENTY)).samples for each in (piped, data))
    np.testing.assert_array_equal(read, expected)


def test_channels_of_samples_are_averaged() -> None:
    both = Samples(np.stack([tone(), np.zeros_like(tone())], axis=1), 16_000)
    np.testing.assert_allclose(read_samples(both, DecodedBytes(PLENTY)).samples, tone() / 2)


PLAYLIST = b"#EXTM3U\n#EXT-X-TARGETDURATION:1\n#EXTINF:1,\nhttp://127.0.0.1:9/a.ts\n"
read_few_frames = partial(read_video, max_frames=4)
WRONG: list[tuple[Reader, MediaFile | Samples, str]] = [
    (read_image, image_file(b"%!PS-Adobe"), "the image cannot be read"),
    (read_image, image_file(encoded(pixels())[:200]), "the image cannot be read"),
    (read_image, image_file(encoded(pixels()), "image/gif"), "not that of its media type"),
    (read_image, image_file(encoded(np.zeros((1, 900, 3), np.uint8))), "900 by 1"),
    (read_audio, audio(PLAYLIST), "the audio cannot be read"),
    (read_audio, audio(gray_video([0]), "audio/mp4"), "it has no audio track"),
    (read_audio, audio(wav(tone())[:20_000]), "it ends after 20000 of 32044 bytes"),
    (read_audio, audio(wav(tone(0.0))), "it has no samples"),
    (read_samples, Samples(np.full(5, np.inf, np.float32), 8_000), "is inf"),
    (read_samples, Samples(np.array([0.0, np.nan] * 8, np.float32), 8_000), "audio sample 1 is nan; it must be finite"),
    (read_few_frames, video(PLAYLIST), "the video cannot be read"),
    (read_few_frames, video(wav(tone())), "the video cannot be read"),
]
TOO_LARGE: list[tuple[Reader, MediaFile, str]] = [
    (read_image, image_file(encoded(pixels(600, 600))), "the image exceeds the limit of 1000000"),
    (read_audio, audio(wav(tone(20.0))), "the audio exceeds the limit"),
    (read_few_frames, video(gray_video([0] * 9, width=400, height=400)), "video"),
]


@pytest.mark.parametrize(
    ("read", "media", "message", "reason"),
    [*((*each, "INVALID_MEDIA") for each in WRONG), *((*each, "MEDIA_TOO_LARGE") for each in TOO_LARGE)],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_unreadable_media_are_rejected(read: Reader, media: MediaFile | Samples, message: str, reason: str) -> None:
    with raises(InvalidRequestError, reason=reason, match=re.escape(message)):
        read(media, DecodedBytes(1_000_000))


def test_decompression_bomb_is_rejected_before_decoding() -> None:
    bomb = encoded_image(Image.new("1", (9_000, 9_000)))
    assert len(bomb) < 1 << 20
    with pytest.raises(InvalidRequestError, match="when decoded"):
        read_image(image_file(bomb), DecodedBytes(PLENTY))


def test_all_media_of_a_request_share_one_limit() -> None:
    counted = DecodedBytes(1_000_000)
    read_image(image_file(encoded(pixels(500, 500))), counted)
    with pytest.raises(InvalidRequestError, match="when decoded"):
        read_samples(Samples(np.zeros(100_000, np.float32), 8_000), counted)


GOOD: dict[str, tuple[Reader, Callable[[bytes], MediaFile], bytes]] = {
    "image": (read_image, image_file, encoded(pixels(20, 20))),
    "audio": (read_audio, audio, wav(tone(0.1))),
    "video": (read_few_frames, video, gray_video([0, 50, 100])),
}


@settings(max_examples=150, deadline=None)
@given(data=st.data(), kind=st.sampled_from(sorted(GOOD)))
def test_damaged_files_are_read_or_rejected(data: st.DataObject, kind: str) -> None:
    read, file_of, good = GOOD[kind]
    damaged = bytearray(good)
    for _ in range(data.draw(st.integers(1, 8))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    cut = bytes(damaged[: data.draw(st.integers(1, len(damaged)))])
    try:
        read(file_of(cut), DecodedBytes(PLENTY))
    except InvalidRequestError as exc:
        assert exc.reason in {"INVALID_MEDIA", "MEDIA_TOO_LARGE"}  # noqa: PT017  # either is right
