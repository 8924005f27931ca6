"""Reads videos that are not trusted: some of their frames, at even times."""

from collections.abc import Iterator, Sequence
from fractions import Fraction
from itertools import repeat
from typing import IO, TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from stagemesh.common.errors import InvalidRequestError
from stagemesh.common.media.decoding import DecodedBytes, check_codec, open_media
from stagemesh.common.media.images import RGB_BYTES, check_sides

if TYPE_CHECKING:
    from av.container import InputContainer
    from av.video.frame import VideoFrame
    from av.video.stream import VideoStream

# Decoding this number of pixels takes about half a minute.
_MAX_DECODED_PIXELS = 4 << 30
# Models compute positions from times, and have a greatest position.
_MAX_DURATION_S = 86_400
_MAX_GROWTH = 4
_SMALL_FRAME_PIXELS = 1 << 20


class DecodedVideo(NamedTuple):
    """Some frames of a decoded video, in the form that vLLM accepts."""

    frames: npt.NDArray[np.uint8]
    """The decoded frames, uint8[frames, height, width, 3]."""
    metadata: dict[str, object]
    """vLLM's metadata of the whole video. Includes the indices of the decoded frames at the mean frame rate."""


class _Extent(NamedTuple):
    """The frames of a video, and the time that they take, by the timestamps of its packets."""

    frames: int
    begin_s: float
    duration_s: float


def read_video(content: IO[bytes], decoded: DecodedBytes, *, max_frames: int) -> DecodedVideo:
    """Decodes at most `max_frames` frames, evenly distributed over the time of a video. Rotates them upright.

    Adds the frames' size to `decoded`. Raises the errors of `reading`, `check_sides` and `DecodedBytes.add`.
    """
    with open_media(content, "video") as container:
        if not container.streams.video:
            raise ValueError("it has no frames")
        stream = container.streams.video[0]
        check_codec(stream)
        width, height = stream.codec_context.width, stream.codec_context.height
        check_sides("video", width, height)
        # With several threads, FFmpeg's decoder of VP8 hangs on some damaged files.
        stream.codec_context.thread_count = 1
        # A frame may be larger than the header says. The decoder rejects one that is much larger.
        stream.codec_context.options = {"max_pixels": str(max(_MAX_GROWTH * width * height, _SMALL_FRAME_PIXELS))}
        extent = _measure(container, stream, max_frames=_MAX_DECODED_PIXELS // (width * height))
        count, rate_hz = extent.frames, extent.frames / extent.duration_s
        wanted = np.unique(np.linspace(0, count - 1, num=min(max_frames, count)).round().astype(int)).tolist()
        decoded.add(len(wanted) * width * height * RGB_BYTES, "video")
        # The middle of a frame, because timestamps are rounded.
        times_s = [(index + 0.5) / rate_hz for index in wanted]
        shown = _shown_frames(container, stream, extent, decoded)
        frames = list(_frames_at(times_s, shown, width=width, height=height))
        if not frames:
            raise ValueError("none of its frames can be decoded")
        metadata: dict[str, object] = {
            "total_num_frames": count,
            "fps": rate_hz,
            "duration": extent.duration_s,
            "video_backend": "pyav",
            "frames_indices": wanted,
            # vLLM may select frames itself only if `frames` contains all frames of the video.
            "do_sample_frames": len(frames) == count,
        }
        return DecodedVideo(np.stack(frames), metadata)


def _measure(container: "InputContainer", stream: "VideoStream", *, max_frames: int) -> _Extent:
    """Returns the extent of a video. Reads all packets, because the header may be wrong.

    Raises ValueError if the video has no frames, and InvalidRequestError if it has more than `max_frames` frames.
    """
    count = hidden = 0
    begin: int | None = None
    last = last_duration = 0
    for packet in container.demux(stream):
        if not packet.size:
            continue
        count += 1
        if count > max_frames:
            raise InvalidRequestError(
                f"the video has over {max_frames} frames of {stream.codec_context.width} by "
                f"{stream.codec_context.height} pixels; send a shorter or smaller video",
                reason="MEDIA_TOO_LARGE",
            )
        time = packet.dts if packet.pts is None else packet.pts
        if packet.is_discard:
            hidden += 1
        elif time is not None:
            begin = time if begin is None else min(begin, time)
            if time >= last:
                last, last_duration = time, packet.duration or 0
    if not count - hidden:
        raise ValueError("it has no frames")
    if count < stream.frames:
        raise ValueError(f"it ends after {count} of {stream.frames} frames")
    container.seek(0)
    shown, unit_s = count - hidden, stream.time_base or Fraction(0)
    span = max(0, last - begin) if begin is not None else 0
    # The last frame is shown at least as long as the mean of the others.
    mean = Fraction(span, shown - 1) if shown > 1 else Fraction(0)
    duration_s = float((span + max(mean, Fraction(last_duration))) * unit_s)
    if duration_s > _MAX_DURATION_S:
        raise ValueError(f"it lasts {duration_s:,.0f} s; at most {_MAX_DURATION_S:,} s are read")
    return _Extent(shown, float((begin or 0) * unit_s), duration_s or float(shown / (stream.average_rate or 1)))


class _ShownFrame(NamedTuple):
    begin_s: float
    frame: "VideoFrame"


def _shown_frames(
    container: "InputContainer", stream: "VideoStream", extent: _Extent, decoded: DecodedBytes
) -> Iterator[_ShownFrame]:
    """Yields the frames of a video in order, with the times from its first frame."""
    # In these files, packets in the order of decoding have ascending timestamps.
    is_untimed = container.format.name == "avi"
    for number, frame in enumerate(container.decode(stream)):
        decoded.add(0, "video")
        if is_untimed or frame.pts is None:
            yield _ShownFrame(number * extent.duration_s / extent.frames, frame)
        else:
            yield _ShownFrame(frame.time - extent.begin_s, frame)


def _frames_at(
    times_s: Sequence[float], frames: Iterator[_ShownFrame], *, width: int, height: int
) -> Iterator[npt.NDArray[np.uint8]]:
    """Yields the pixels that are shown at each of the times, which ascend, in seconds."""
    left, shown = list(times_s), next(frames, None)
    # The size and the rotation may change within a video, but all returned frames have the same.
    quarter_turns = round(shown.frame.rotation / 90) if shown is not None else 0
    while left and shown is not None:
        following = next(frames, None)
        count = len(left) if following is None else sum(each < following.begin_s for each in left)
        if count:
            pixels = shown.frame.to_ndarray(format="rgb24", width=width, height=height).astype(np.uint8, copy=False)
            yield from repeat(np.rot90(pixels, quarter_turns), count)
        left, shown = left[count:], following
