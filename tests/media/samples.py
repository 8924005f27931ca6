"""Media files as cameras, browsers and telephones write them."""

import io
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any, Literal

import av
import numpy as np
import numpy.typing as npt
from PIL import Image

from stagemesh.common.media.decoding import MediaKind
from tests.engines.vllm.media_files import gray_video, pixels, tone, video_file
from tests.gateway.sounds import audio_file, encode, wav
from tests.pictures import encoded_image

_PORTRAIT = bytes.fromhex("00000000 00010000 00000000 ffff0000 00000000 00000000 00000000 00000000 40000000")
"""The display matrix of a video that is shown rotated by 90 degrees, clockwise."""


NOISE = Image.fromarray(pixels(24, 16))
_ALPHA = Image.fromarray(pixels(24, 16, seed=2)[:, :, 0])
_DEEP = Image.fromarray(np.random.default_rng(1).integers(0, 1 << 16, (16, 24), dtype=np.uint16))


def _with_alpha(mode: str) -> Image.Image:
    image = NOISE.convert(mode)
    image.putalpha(_ALPHA)
    return image


PICTURES: Mapping[str, bytes] = {
    **{mode: encoded_image(NOISE.convert(mode)) for mode in ("1", "L", "RGB", "P")},
    "LA": encoded_image(_with_alpha("L")),
    "RGBA": encoded_image(_with_alpha("RGB")),
    "RGBA in WebP": encoded_image(_with_alpha("RGB"), "WEBP", lossless=True),
    "I;16": encoded_image(_DEEP),
    "CMYK": encoded_image(NOISE.convert("CMYK"), "JPEG"),
    "P with a transparent color": encoded_image(NOISE.quantize(8), transparency=3),
    "P with alphas": encoded_image(NOISE.quantize(8), transparency=bytes(range(0, 256, 32))),
    "L with a transparent color": encoded_image(NOISE.convert("L"), transparency=100),
    "RGB with a transparent color": encoded_image(NOISE, transparency=NOISE.getpixel((1, 1))),
    "GIF with a transparent color": encoded_image(NOISE.quantize(8), "GIF", transparency=3),
}
"""Image files of noise by what distinguishes them."""


def oriented(orientation: int, file_format: str = "JPEG") -> bytes:
    """Returns an image with an orientation in its EXIF data."""
    exif = Image.Exif()
    exif[0x0112] = orientation
    return encoded_image(NOISE, file_format, exif=exif)


def animated(file_format: Literal["GIF", "PNG", "WEBP"]) -> bytes:
    """Returns an animated image of three colors: red, green and blue."""
    first, *others = [Image.new("RGB", (24, 16), color) for color in ("red", "lime", "blue")]
    return encoded_image(first, file_format, save_all=True, append_images=others, duration=100)


def channels_file(
    samples: "npt.NDArray[np.floating[Any]]", *, codec: str, container: str, layout: str, rate_hz: int = 16_000
) -> bytes:
    """Returns an audio file of samples, [samples, channels]."""
    file = io.BytesIO()
    with av.open(file, "w", format=container) as output:
        stream: Any = output.add_stream(codec, rate=rate_hz, layout=layout)
        frame = av.AudioFrame.from_ndarray(np.ascontiguousarray(samples.reshape(1, -1)), format="flt", layout=layout)
        frame.sample_rate, frame.pts = rate_hz, 0
        resampler = av.AudioResampler(
            stream.codec_context.format.name, layout, rate_hz, stream.codec_context.frame_size
        )
        for part in [*resampler.resample(frame), *resampler.resample(None), None]:
            output.mux(stream.encode(part))
    return file.getvalue()


def timed_video(
    times_ms: Sequence[int], grays: Sequence[int], *, codec: str = "libvpx", container: str = "webm"
) -> bytes:
    """Returns a video as a browser records one: its header states 1,000 frames per second."""
    file = io.BytesIO()
    with av.open(file, "w", format="webm") as output:
        stream: Any = output.add_stream("libvpx", rate=1000)
        stream.height, stream.width, stream.pix_fmt = 48, 64, "yuv420p"
        for time_ms, gray in zip(times_ms, grays, strict=True):
            frame = av.VideoFrame.from_ndarray(np.full((48, 64, 3), gray, np.uint8), format="rgb24")
            frame.pts, frame.time_base = time_ms, Fraction(1, 1000)
            output.mux(stream.encode(frame))
        output.mux(stream.encode(None))
    return file.getvalue()


def portrait_video(frames: npt.NDArray[np.uint8]) -> bytes:
    """Returns an MP4 file that is shown rotated by 90 degrees, clockwise."""
    data = video_file(frames, codec="libx264")
    upright = bytes.fromhex("00010000 00000000 00000000 00000000 00010000 00000000 00000000 00000000 40000000")
    # The matrix of the movie is before the matrix of its track.
    begin = data.index(upright, data.index(b"tkhd"))
    return data[:begin] + _PORTRAIT + data[begin + len(_PORTRAIT) :]


def seeds_of(kind: MediaKind) -> list[bytes]:
    """Returns small valid files of each format of a kind."""
    if kind == "image":
        formats = [encoded_image(NOISE, name) for name in ("JPEG", "WEBP", "GIF", "BMP")]
        return [*PICTURES.values(), *formats, oriented(6), oriented(8, "PNG"), animated("GIF"), animated("WEBP")]
    if kind == "audio":
        formats = [encode(tone(0.1), f"audio/{name}") for name in ("wav", "flac", "ogg", "mpeg", "aac")]
        surround = np.repeat(tone(0.1)[:, None], 6, axis=1)
        files = [("aac", "ipod"), ("libopus", "webm"), ("adpcm_ima_wav", "wav")]
        layouts = [channels_file(surround, codec="aac", container="mp4", layout="5.1")]
        return [*formats, *layouts, wav(surround[:, :2]), *(audio_file(*each, seconds=0.1) for each in files)]
    black = np.zeros((2, 32, 32, 3), np.uint8)
    codecs = [("libx264", "mp4"), ("libvpx", "webm"), ("libvpx-vp9", "matroska"), ("mpeg4", "avi")]
    coded = [video_file(black, codec=codec, container=container) for codec, container in codecs]
    recorded = [portrait_video(black), timed_video([0, 900], [0, 9]), animated("GIF")]
    return [*coded, *recorded, gray_video([0], sound=tone(0.1))]
