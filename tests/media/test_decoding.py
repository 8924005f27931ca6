"""Limits of decoders: formats, codecs and sizes, in stages and in the gateway."""

import io
import struct
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from stagemesh.common.errors import CancelledRequestError, InvalidRequestError, StagemeshError
from stagemesh.common.media.decoding import FORMATS, DecodedBytes, open_media, read_audio
from stagemesh.common.media.images import read_image
from stagemesh.common.media.videos import read_video
from stagemesh.gateway.audio import find_media_type, measure
from tests.engines.vllm.media_files import video_file
from tests.gateway.sounds import audio_file, encode, hours_of_silence, tone, wav
from tests.pictures import encoded_image
from tests.rpc.call_errors import raises

PLENTY = 1 << 30


def black_video(codec: str, container: str) -> io.BytesIO:
    return io.BytesIO(video_file(np.zeros((3, 64, 64, 3), np.uint8), codec=codec, container=container))


@pytest.mark.parametrize(("codec", "container"), [("adpcm_yamaha", "wav"), ("mp2", "matroska")])
def test_an_audio_codec_that_is_not_permitted_is_not_decoded(codec: str, container: str) -> None:
    data = audio_file(codec, container)
    calls: list[Callable[[], object]] = [
        lambda: read_audio(io.BytesIO(data), "audio", DecodedBytes(PLENTY)),
        lambda: measure(data, param="file", decoded=DecodedBytes(PLENTY)),
        lambda: find_media_type(data, param="file"),
    ]
    for call in calls:
        with raises(StagemeshError, reason="INVALID_MEDIA", match="codec"):
            call()


@pytest.mark.parametrize(
    ("codec", "container"), [("mpeg2video", "matroska"), ("ffvhuff", "avi"), ("mpeg2video", "mov")]
)
def test_a_video_codec_that_is_not_permitted_is_not_decoded(codec: str, container: str) -> None:
    file = black_video(codec, container)
    with raises(InvalidRequestError, reason="INVALID_MEDIA", match=f"its codec {codec} is not supported"):
        read_video(file, DecodedBytes(PLENTY), max_frames=4)


@pytest.mark.parametrize(
    ("codec", "container"), [("libx264", "mp4"), ("mpeg4", "avi"), ("libvpx-vp9", "webm"), ("ffv1", "matroska")]
)
def test_common_video_codecs_are_decoded(codec: str, container: str) -> None:
    file = black_video(codec, container)
    assert read_video(file, DecodedBytes(PLENTY), max_frames=4).metadata["total_num_frames"] == 3


def test_the_picture_of_a_cover_does_not_matter() -> None:
    content = b"\0image/png\0\x03\0" + encoded_image(Image.new("RGB", (30, 30)))
    frame = b"APIC" + struct.pack(">I", len(content)) + b"\0\0" + content
    tag = b"ID3\x03\0\0" + bytes((len(frame) >> shift) & 127 for shift in (21, 14, 7, 0)) + frame
    data = tag + encode(tone(1.0), "audio/mpeg")
    assert find_media_type(data, param="file") == "audio/mpeg"
    assert len(read_audio(io.BytesIO(data), "audio", DecodedBytes(PLENTY)).samples) > 10_000


@pytest.mark.parametrize("form", ["concat", "hls", "dash"])
def test_a_file_that_names_another_file_does_not_open_it(
    form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret = tmp_path / "secret.wav"
    secret.write_bytes(wav(tone(1.0)))
    playlists = {
        "concat": f"ffconcat version 1.0\nfile {secret.name}\n",
        "hls": f"#EXTM3U\n#EXT-X-TARGETDURATION:1\n#EXTINF:1,\nfile://{secret}\n#EXT-X-ENDLIST\n",
        "dash": f"<MPD><BaseURL>file://{secret}</BaseURL></MPD>",
    }
    # Even if the format were permitted.
    monkeypatch.setitem(FORMATS, "video", {form: ""})
    file = io.BytesIO(playlists[form].encode())
    with raises(InvalidRequestError, reason="INVALID_MEDIA"), open_media(file, "video"):
        pass


@pytest.mark.parametrize(
    ("codec", "container"), [("pcm_s16le", "wav"), ("flac", "ogg"), ("aac", "adts"), ("libopus", "matroska")]
)
def test_the_limit_counts_each_channel_in_every_format(codec: str, container: str) -> None:
    # Its eight channels have 1.5 MB when decoded, and one channel has 0.2 MB.
    data = audio_file(codec, container, rate_hz=48_000, layout="7.1")
    for call in (
        lambda: measure(data, param="file", decoded=DecodedBytes(1_000_000)),
        lambda: read_audio(io.BytesIO(data), "audio", DecodedBytes(1_000_000)),
    ):
        with raises(InvalidRequestError, reason="MEDIA_TOO_LARGE"):
            call()


def test_decoding_stops_when_its_request_has_ended() -> None:
    begun = threading.Event()

    class Watched(DecodedBytes):
        def add(self, size_bytes: int, kind: str) -> None:
            super().add(size_bytes, kind)
            begun.set()

    with ThreadPoolExecutor(1) as pool:
        with closing(Watched(PLENTY * 100)) as decoded:
            measuring = pool.submit(measure, hours_of_silence(), param="file", decoded=decoded)
            assert begun.wait(10)
        with pytest.raises(CancelledRequestError):
            measuring.result(10)


def test_no_reader_of_a_stage_continues_after_its_request_has_ended() -> None:
    ended = DecodedBytes(PLENTY)
    ended.close()
    image = encoded_image(Image.new("RGB", (30, 30)))
    video = black_video("mpeg4", "avi")
    for call in (
        lambda: read_audio(io.BytesIO(wav(tone(1.0))), "audio", ended),
        lambda: read_image(io.BytesIO(image), ended),
        lambda: read_video(video, ended, max_frames=4),
    ):
        with pytest.raises(CancelledRequestError):
            call()
