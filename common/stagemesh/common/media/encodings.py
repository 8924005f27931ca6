"""The media types in which a stage can encode tensors, and the encoders, which work while the tensors arrive."""

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from fractions import Fraction
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, cast

import numpy as np
import numpy.typing as npt

from stagemesh.common.errors import UnsupportedError, needs_extra
from stagemesh.common.plugins.descriptors import Emitted
from stagemesh.common.wire.tensors import Array, TensorSpec, as_bytes

if TYPE_CHECKING:
    from av.audio.frame import AudioFrame
    from av.audio.stream import AudioStream
    from av.container import OutputContainer
    from av.video.stream import VideoStream


RAW = "application/octet-stream"
"""The media type of a file that contains the bytes of tensors of any type, in order."""
AUDIO_ENCODINGS = ("audio/wav", "audio/flac", "audio/ogg", "audio/mpeg")
VIDEO_ENCODINGS = ("video/mp4", "video/webm")
PCM = "audio/pcm"
"""Signed 16-bit samples without a header. Only gateways send them."""
MAX_FRAME_RATE = 1000.0

_RGB = 3


def encodings_of(emitted: Emitted) -> Sequence[str]:
    """Returns the media types in which a stage can encode a tensor. Empty for images and media, which are encoded."""
    match emitted.kind:
        case "image" | "media":
            return ()
        case "audio":
            return (*AUDIO_ENCODINGS, RAW)
        case "tensor" if _has_frames(emitted.spec):
            return (*VIDEO_ENCODINGS, RAW)
        case _:
            return (RAW,)


def _has_frames(spec: TensorSpec) -> bool:
    """Returns whether a tensor contains RGB frames: float32[frames, 3, height, width] or uint8[frames, height, width,
    3].
    """
    match spec:
        case TensorSpec("float32", (_, channels, _, _)) | TensorSpec("uint8", (_, _, _, channels)):
            return channels == _RGB
        case _:
            return False


Buffer: TypeAlias = bytes | memoryview

_BLOCK_SAMPLES = 1 << 16
"""The number of samples that are converted at a time. Limits the memory for the conversion."""
_MONO, _STEREO = 1, 2
_SOUND_RATE_HZ = 48_000
_SOUND_CODECS: Mapping[str, str] = {"video/mp4": "aac", "video/webm": "libopus"}
"""The codec of the sound of a video, by the file's media type."""
_THREADS = 4
"""The number of threads of a video encoder. A fixed number, because the encoded bytes depend on it."""


class RawEncoder:
    """The encoder of files that contain the bytes of the tensors themselves."""

    def push(self, tensor: Array) -> Buffer:
        return as_bytes(tensor)

    def finish(self) -> Buffer:
        return b""


class _Format(NamedTuple):
    """A container format and a codec of FFmpeg, each with its options."""

    container: str
    codec: str
    container_options: Mapping[str, str] = {}
    codec_options: Mapping[str, str] = {}


# The options of video codecs disable what looks ahead, which would retain frames.
_FORMATS: Mapping[str, _Format] = {
    "audio/wav": _Format("wav", "pcm_s16le"),
    "audio/flac": _Format("flac", "flac"),
    "audio/ogg": _Format("ogg", "libopus", {"page_duration": "200000"}),
    "audio/aac": _Format("adts", "aac"),
    PCM: _Format("s16le", "pcm_s16le"),
    "audio/mpeg": _Format("mp3", "libmp3lame", {"write_xing": "0", "id3v2_version": "0"}),
    "video/mp4": _Format(
        "mp4",
        "libx264",
        # The file is a sequence of fragments, so that it can be played before it is complete.
        {"movflags": "frag_keyframe+empty_moov+default_base_moof"},
        {"preset": "veryfast", "tune": "zerolatency"},
    ),
    "video/webm": _Format(
        "webm",
        "libvpx-vp9",
        {"live": "1"},
        {"deadline": "realtime", "cpu-used": "8", "lag-in-frames": "0", "crf": "30", "b": "0", "row-mt": "1"},
    ),
}


class _Appender(bytearray):
    """A file that FFmpeg can only append to, because it does not have the methods `seek` and `tell`."""

    write = bytearray.extend


class _FileEncoder:
    """Base class of the encoders that use FFmpeg. A subclass adds the stream to the container, and encodes frames."""

    def __init__(self, media_type: str) -> None:
        with needs_extra("media", of=f"the output as {media_type}"):
            import av
        self._av = av
        self._media_type, self._format = media_type, _FORMATS[media_type]
        self._complete = _Appender()
        self._units = 0
        """The number of samples or frames that were encoded."""
        options = {"fflags": "+bitexact", "flush_packets": "1", **self._format.container_options}
        self._container: OutputContainer = av.open(
            cast("Any", self._complete), "w", format=self._format.container, options=options
        )
        self._stream: AudioStream | VideoStream | None = None

    def finish(self) -> Buffer:
        with self._encoding():
            if self._stream is not None:
                self._container.mux(self._stream.encode(None))
            self._container.close()
        return self._take()

    def _add_stream(self, rate: int | Fraction) -> Any:
        container: Any = self._container
        return container.add_stream(self._format.codec, rate=rate, options=dict(self._format.codec_options))

    def _audio_frame(self, samples: Array, *, rate_hz: int, position: int) -> "AudioFrame":
        """Returns a frame of samples, an array of shape [samples, channels] with one or two channels.

        `position` is the number of samples before it.
        """
        planes = np.ascontiguousarray(samples.T.astype(np.float32, copy=False))
        layout = "mono" if samples.shape[1] == _MONO else "stereo"
        frame = self._av.AudioFrame.from_ndarray(planes, format="fltp", layout=layout)
        frame.sample_rate, frame.pts, frame.time_base = rate_hz, position, Fraction(1, rate_hz)
        return frame

    def _take(self) -> bytes:
        taken = bytes(self._complete)
        self._complete.clear()
        return taken

    @contextmanager
    def _encoding(self) -> Generator[None]:
        from av.error import FFmpegError

        try:
            yield
        except FFmpegError as exc:
            raise self._not_encodable(exc.strerror or str(exc)) from exc

    def _not_encodable(self, problem: str) -> UnsupportedError:
        return UnsupportedError(
            f"the output cannot be encoded as {self._media_type}: {problem}; request another size, or change the "
            "output's media_type in the pipeline file",
            reason="OUTPUT_NOT_ENCODABLE",
            metadata={"media_type": self._media_type},
        )


class AudioEncoder(_FileEncoder):
    """The encoder of audio: float32[samples] for one channel, or float32[samples, channels] for two."""

    def __init__(self, media_type: str, *, sample_rate_hz: int, rates_hz: Sequence[int] = ()) -> None:
        """`rates_hz` are the sample rates that the file may have. By default, all that its codec supports."""
        super().__init__(media_type)
        self._rate_hz, self._rates_hz = sample_rate_hz, rates_hz
        self._channels = 0

    def push(self, tensor: Array) -> Buffer:
        samples = tensor[:, None] if tensor.ndim == 1 else tensor
        if not self._channels:
            self._open(samples.shape[1])
        if samples.shape[1] != self._channels:
            raise self._not_encodable(f"it begins with {self._channels} channels and continues with {samples.shape[1]}")
        with self._encoding():
            for start in range(0, len(samples), _BLOCK_SAMPLES):
                self._encode(samples[start : start + _BLOCK_SAMPLES])
        return self._take()

    def _open(self, channels: int) -> None:
        if channels not in {_MONO, _STEREO}:
            raise self._not_encodable(f"it has {channels} channels, but one or two are supported")
        rates_hz = self._rates_hz or self._av.Codec(self._format.codec, "w").audio_rates
        # The encoder resamples to a rate that the file may have.
        rate_hz = self._rate_hz if not rates_hz or self._rate_hz in rates_hz else max(rates_hz)
        with self._encoding():
            stream = cast("AudioStream", self._add_stream(rate_hz))
            stream.codec_context.layout = "mono" if channels == _MONO else "stereo"
            _make_bitexact(stream)
        self._stream, self._channels = stream, channels

    def _encode(self, samples: Array) -> None:
        frame = self._audio_frame(samples, rate_hz=self._rate_hz, position=self._units)
        self._units += len(samples)
        assert self._stream is not None, "`push` has opened the stream"
        self._container.mux(cast("AudioStream", self._stream).encode(frame))


class VideoEncoder(_FileEncoder):
    """The encoder of RGB frames: float32[frames, 3, height, width] in [0, 1], or uint8[frames, height, width, 3]."""

    def __init__(self, media_type: str, *, frame_rate: float) -> None:
        super().__init__(media_type)
        self._frame_rate = Fraction(frame_rate).limit_denominator(10_000)
        self._size = (0, 0)

    def push(self, tensor: Array) -> Buffer:
        with self._encoding():
            for pixels in map(_pixels, tensor):
                size = pixels.shape[:2]
                if self._stream is None:
                    self._open(*size)
                elif size != self._size:
                    raise self._not_encodable(f"its frames change from {self._size} to {size} (height, width)")
                frame = self._av.VideoFrame.from_ndarray(pixels, format="rgb24")
                frame.pts, frame.time_base = self._units, 1 / self._frame_rate
                self._units += 1
                self._container.mux(cast("VideoStream", self._stream).encode(frame))
        return self._take()

    def _open(self, height: int, width: int) -> None:
        if not height or not width or height % 2 or width % 2:
            raise self._not_encodable(f"its frames have {width} by {height} pixels, but both must be even numbers")
        stream = cast("VideoStream", self._add_stream(self._frame_rate))
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        # A keyframe each second is where players can seek to, and where a fragment of the file begins.
        stream.codec_context.gop_size = max(1, round(self._frame_rate))
        stream.codec_context.thread_count = _THREADS
        _make_bitexact(stream)
        self._stream, self._size = stream, (height, width)


class MovieEncoder(VideoEncoder):
    """The encoder of RGB frames with sound. The file's sound is stereo at 48 kHz, whatever arrives.

    The file does not depend on whether frames or sound arrive first. Sound that arrives before the first frame is
    retained. Afterwards only as much is retained, encoded, as one of the two is ahead of the other.
    """

    def __init__(self, media_type: str, *, frame_rate: float) -> None:
        super().__init__(media_type, frame_rate=frame_rate)
        # Without a limit for the time, packets are interleaved in the order of their times in every run.
        self._container.options["max_interleave_delta"] = "0"
        self._early: list[tuple[Array, int]] = []
        self._sound: AudioStream | None = None
        self._samples = self._sound_rate_hz = 0

    def push_sound(self, samples: Array, *, sample_rate_hz: int) -> Buffer:
        """Adds float32[samples], or float32[samples, channels] of one or two channels, at one rate for all calls."""
        samples = samples[:, None] if samples.ndim == 1 else samples
        if samples.shape[1] not in {_MONO, _STEREO}:
            raise self._not_encodable(f"its sound has {samples.shape[1]} channels, but one or two are supported")
        if sample_rate_hz != (self._sound_rate_hz or sample_rate_hz):
            raise self._not_encodable(f"its sound changes from {self._sound_rate_hz} to {sample_rate_hz} Hz")
        self._sound_rate_hz = sample_rate_hz
        if self._sound is None:
            self._early.append((np.array(samples), sample_rate_hz))
            return b""
        with self._encoding():
            for start in range(0, len(samples), _BLOCK_SAMPLES):
                block = samples[start : start + _BLOCK_SAMPLES]
                frame = self._audio_frame(block, rate_hz=sample_rate_hz, position=self._samples)
                self._samples += len(block)
                self._container.mux(self._sound.encode(frame))
        return self._take()

    def finish(self) -> Buffer:
        if self._stream is None:
            raise self._not_encodable("it has no frames")
        with self._encoding():
            self._container.mux(cast("AudioStream", self._sound).encode(None))
        return super().finish()

    def _open(self, height: int, width: int) -> None:
        super()._open(height, width)
        container: Any = self._container
        self._sound = cast("AudioStream", container.add_stream(_SOUND_CODECS[self._media_type], rate=_SOUND_RATE_HZ))
        self._sound.codec_context.layout = "stereo"
        _make_bitexact(self._sound)
        early, self._early = self._early, []
        for samples, rate_hz in early:
            self._complete.extend(self.push_sound(samples, sample_rate_hz=rate_hz))


Encoder: TypeAlias = RawEncoder | AudioEncoder | VideoEncoder
"""An encoder of one file, which one thread at a time uses.

`push` returns the bytes of the file that are complete after a tensor. They may be a view of the tensor. It raises
UnsupportedError (OUTPUT_NOT_ENCODABLE) if the format cannot contain the tensor. `finish` returns the remaining bytes of
the file. Call it once, after the last tensor.
"""


def make_encoder(media_type: str, *, sample_rate_hz: int = 0, frame_rate: float = 0.0) -> Encoder:
    """Returns an encoder of files of this media type. Any type that is not an audio or video encoding is raw.

    Raises NotReadyError (MISSING_MODULE) if PyAV is not installed.
    """
    if media_type in AUDIO_ENCODINGS:
        return AudioEncoder(media_type, sample_rate_hz=sample_rate_hz)
    if media_type in VIDEO_ENCODINGS:
        return VideoEncoder(media_type, frame_rate=frame_rate)
    return RawEncoder()


def _make_bitexact(stream: "AudioStream | VideoStream") -> None:
    # Without it, files contain random serial numbers and versions.
    from av.codec.context import Flags

    stream.codec_context.flags |= Flags.bitexact


def _pixels(frame: Array) -> npt.NDArray[np.uint8]:
    """Returns a frame as uint8[height, width, 3]."""
    if frame.dtype == np.uint8:
        return np.ascontiguousarray(frame.view(np.uint8))
    finite = np.nan_to_num(frame.transpose(1, 2, 0).astype(np.float32, copy=False), posinf=1.0, neginf=0.0)
    return np.ascontiguousarray((finite * np.float32(255)).round().clip(0, 255).astype(np.uint8))
