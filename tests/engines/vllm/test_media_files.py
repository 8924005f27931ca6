"""Media files from callers are decoded within limits, or rejected."""

import io
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from vllm.multimodal.media.image import ImageMediaIO

from stagemesh.common.errors import InvalidRequestError
from stagemesh.common.media import decoding, images, videos
from stagemesh.common.media.decoding import DecodedAudio, DecodedBytes
from stagemesh.common.media.videos import DecodedVideo
from stagemesh.services.engines.media_decoding import read_samples
from stagemesh.services.engines.prompts import Samples
from tests.engines.vllm.media_files import encoded, gray_video, pixels, tone, video_file
from tests.gateway.sounds import wav
from tests.media.samples import PICTURES, animated, channels_file, oriented, portrait_video, timed_video
from tests.pictures import encoded_image
from tests.rpc.call_errors import raises

PLENTY = 64 << 20
Reader = Callable[[Any, DecodedBytes], object]


def read_image(data: bytes, decoded: DecodedBytes) -> Image.Image:
    return images.read_image(io.BytesIO(data), decoded)


def read_audio(data: bytes, decoded: DecodedBytes) -> DecodedAudio:
    return decoding.read_audio(io.BytesIO(data), "audio", decoded)


def read_video(data: bytes, decoded: DecodedBytes, *, max_frames: int = 4) -> DecodedVideo:
    return videos.read_video(io.BytesIO(data), decoded, max_frames=max_frames)


@pytest.mark.parametrize("name", ["png", "jpeg", "webp", "gif", "bmp"])
def test_images_of_each_type_are_read(name: str) -> None:
    read = read_image(encoded(pixels(30, 20), name), DecodedBytes(PLENTY))
    assert read.size == (30, 20)


def test_audio_keeps_its_rate_and_length() -> None:
    read = read_audio(wav(tone(rate_hz=8_000), 8_000), DecodedBytes(PLENTY))
    assert read.sample_rate_hz == 8_000
    np.testing.assert_allclose(read.samples, tone(rate_hz=8_000), atol=1e-4)


CHANNELS = np.stack([tone() / number for number in range(1, 9)], axis=1)


@pytest.mark.parametrize(("layout", "channels"), [("mono", 1), ("stereo", 2), ("5.1", 6), ("7.1", 8)])
@pytest.mark.parametrize(
    ("codec", "container"),
    [
        *(("pcm_u8", "wav"), ("pcm_s16le", "wav"), ("pcm_s24le", "wav"), ("pcm_f32le", "wav"), ("pcm_f64le", "wav")),
        *(("flac", "flac"), ("aac", "mp4"), ("libopus", "webm")),
    ],
)
def test_channels_are_averaged_and_keep_their_scale(codec: str, container: str, layout: str, channels: int) -> None:
    rate_hz = 48_000 if codec == "libopus" else 16_000
    data = channels_file(CHANNELS[:, :channels], codec=codec, container=container, layout=layout, rate_hz=rate_hz)
    read, expected = read_audio(data, DecodedBytes(PLENTY)).samples, CHANNELS[:, :channels].mean(axis=1)
    # Codecs remove the high frequencies of a channel for bass.
    assert read.std() == pytest.approx(expected.std(), rel=0.15)
    if container in {"wav", "flac"}:
        np.testing.assert_allclose(read, expected, atol=0.005)


@pytest.mark.parametrize(
    "data",
    [*PICTURES.values(), *map(oriented, range(1, 9)), oriented(6, "PNG"), oriented(3, "WEBP"), animated("WEBP")],
    ids=[*PICTURES, *map(str, range(1, 9)), "PNG", "WEBP", "animated"],
)
def test_images_are_those_of_vllms_own_loader(data: bytes) -> None:
    read, expected = read_image(data, DecodedBytes(PLENTY)), ImageMediaIO().load_bytes(data).media
    assert read.mode == "RGB"
    np.testing.assert_array_equal(read, expected)


def test_only_the_first_frame_of_an_animated_image_is_read() -> None:
    for name in ("GIF", "PNG", "WEBP"):
        read = read_image(animated(name), DecodedBytes(PLENTY))
        np.testing.assert_allclose(np.asarray(read)[0, 0], [255, 0, 0], atol=3)


def test_the_times_of_a_recorded_video_are_those_of_its_frames() -> None:
    times_ms = [*range(0, 500, 20), *range(1_000, 4_000, 1_000)]
    read = read_video(timed_video(times_ms, [40] * 25 + [80, 120, 160]), DecodedBytes(PLENTY), max_frames=5)
    assert read.metadata["duration"] == pytest.approx(3.1, abs=0.1)
    assert read.metadata["total_num_frames"] == 28
    # Half of the frames are of the first half second, but a sixth of the time.
    np.testing.assert_allclose(read.frames.mean(axis=(1, 2, 3)), [40, 40, 80, 120, 160], atol=3)


def test_a_portrait_video_is_upright() -> None:
    frame = np.zeros((48, 64, 3), np.uint8)
    frame[:, 32:] = 255
    read = read_video(portrait_video(frame[None]), DecodedBytes(PLENTY))
    assert read.frames.shape == (1, 64, 48, 3)
    # The right half becomes the lower half.
    assert read.frames[0, 40:].min() > 200
    assert read.frames[0, :24].max() < 50


def test_frames_of_formats_with_and_without_times_are_the_same() -> None:
    grays = np.broadcast_to(np.arange(0, 200, 10, dtype=np.uint8)[:, None, None, None], (20, 48, 64, 3))
    for container in ("mp4", "matroska", "avi"):
        read = read_video(video_file(grays, codec="libx264", container=container), DecodedBytes(PLENTY), max_frames=5)
        np.testing.assert_allclose(read.frames.mean(axis=(1, 2, 3)), [0, 50, 100, 140, 190], atol=3)


def test_video_frames_are_sampled_evenly() -> None:
    read = read_video(gray_video([10 * number for number in range(20)]), DecodedBytes(PLENTY), max_frames=5)
    assert read.metadata["frames_indices"] == [0, 5, 10, 14, 19]
    np.testing.assert_allclose(read.frames.mean(axis=(1, 2, 3)), [0, 50, 100, 140, 190], atol=3)
    assert read.frames.shape == (5, 48, 64, 3)
    assert (read.metadata["total_num_frames"], read.metadata["duration"]) == (20, 2.0)


def test_all_frames_of_a_short_video_are_read() -> None:
    file = gray_video([0, 100, 200], container="avi")
    read = read_video(file, DecodedBytes(PLENTY), max_frames=32)
    assert read.metadata["frames_indices"] == [0, 1, 2]


def test_a_wav_file_of_unknown_length_is_read_to_its_end() -> None:
    data = wav(tone())
    piped = data[:4] + b"\xff\xff\xff\xff" + data[8:40] + b"\xff\xff\xff\xff" + data[44:]
    read, expected = (read_audio(each, DecodedBytes(PLENTY)).samples for each in (piped, data))
    np.testing.assert_array_equal(read, expected)


def test_channels_of_samples_are_averaged() -> None:
    both = Samples(np.stack([tone(), np.zeros_like(tone())], axis=1), 16_000)
    np.testing.assert_allclose(read_samples(both, DecodedBytes(PLENTY)).samples, tone() / 2)


PLAYLIST = b"#EXTM3U\n#EXT-X-TARGETDURATION:1\n#EXTINF:1,\nhttp://127.0.0.1:9/a.ts\n"
WRONG: list[tuple[Reader, bytes | Samples, str]] = [
    (read_image, b"%!PS-Adobe", "the image cannot be read"),
    (read_image, encoded(pixels())[:200], "the image cannot be read"),
    (read_image, encoded(pixels(), "TIFF"), "it is damaged, or not one of png, jpeg, webp, gif, bmp"),
    (read_image, encoded(np.zeros((1, 900, 3), np.uint8)), "900 by 1"),
    (read_audio, PLAYLIST, "the audio cannot be read"),
    (read_audio, gray_video([0]), "it has no audio track"),
    (read_audio, wav(tone())[:20_000], "it ends after 20000 of 32044 bytes"),
    (read_audio, wav(tone(0.0)), "it has no samples"),
    (read_samples, Samples(np.full(5, np.inf, np.float32), 8_000), "is inf"),
    (read_samples, Samples(np.array([0.0, np.nan] * 8, np.float32), 8_000), "audio sample 1 is nan; it must be finite"),
    (read_video, PLAYLIST, "the video cannot be read"),
    (read_video, wav(tone()), "the video cannot be read"),
]
TOO_LARGE: list[tuple[Reader, bytes, str]] = [
    (read_image, encoded(pixels(600, 600)), "the image exceeds the limit of 1000000"),
    (read_audio, wav(tone(20.0)), "the audio exceeds the limit"),
    (read_video, gray_video([0] * 9, width=400, height=400), "video"),
]


@pytest.mark.parametrize(
    ("read", "media", "message", "reason"),
    [*((*each, "INVALID_MEDIA") for each in WRONG), *((*each, "MEDIA_TOO_LARGE") for each in TOO_LARGE)],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_unreadable_media_are_rejected(read: Reader, media: bytes | Samples, message: str, reason: str) -> None:
    with raises(InvalidRequestError, reason=reason, match=re.escape(message)):
        read(media, DecodedBytes(1_000_000))


def test_decompression_bomb_is_rejected_before_decoding() -> None:
    bomb = encoded_image(Image.new("1", (9_000, 9_000)))
    assert len(bomb) < 1 << 20
    with pytest.raises(InvalidRequestError, match="when decoded"):
        read_image(bomb, DecodedBytes(PLENTY))


def test_all_media_of_a_request_share_one_limit() -> None:
    counted = DecodedBytes(1_000_000)
    read_image(encoded(pixels(500, 500)), counted)
    with pytest.raises(InvalidRequestError, match="when decoded"):
        read_samples(Samples(np.zeros(100_000, np.float32), 8_000), counted)


GOOD: dict[str, tuple[Reader, bytes]] = {
    "image": (read_image, encoded(pixels(20, 20))),
    "audio": (read_audio, wav(tone(0.1))),
    "video": (read_video, gray_video([0, 50, 100])),
}


@settings(max_examples=150, deadline=None)
@given(data=st.data(), kind=st.sampled_from(sorted(GOOD)))
def test_damaged_files_are_read_or_rejected(data: st.DataObject, kind: str) -> None:
    read, good = GOOD[kind]
    damaged = bytearray(good)
    for _ in range(data.draw(st.integers(1, 8))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    cut = bytes(damaged[: data.draw(st.integers(1, len(damaged)))])
    try:
        read(cut, DecodedBytes(PLENTY))
    except InvalidRequestError as exc:
        assert exc.reason in {"INVALID_MEDIA", "MEDIA_TOO_LARGE"}  # noqa: PT017  # either is right
