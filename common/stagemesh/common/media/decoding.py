"""Opens audio and video files that are not trusted, and limits what a request may decode."""

import os
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import IO, TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from stagemesh.common.errors import CancelledRequestError, InvalidRequestError

if TYPE_CHECKING:
    from av.audio.stream import AudioStream
    from av.container import InputContainer
    from av.stream import Stream

_PCM = "pcm_alaw,pcm_f32le,pcm_f64le,pcm_mulaw,pcm_s16be,pcm_s16le,pcm_s24be,pcm_s24le,pcm_s32le,pcm_u8"
_AUDIO = f"aac,ac3,adpcm_ima_wav,adpcm_ms,alac,eac3,flac,mp3,mp3float,opus,vorbis,{_PCM}"
CODECS = f"av1,ffv1,gif,h264,hevc,libdav1d,mjpeg,mpeg4,vp8,vp9,{_AUDIO}"
"""FFmpeg's decoders that may read a caller's file, separated by commas. Others are old, and rarely examined."""
AUDIO_FORMATS: Mapping[str, str] = {
    "audio/wav": "wav",
    "audio/x-wav": "wav",
    "audio/mpeg": "mp3",
    "audio/flac": "flac",
    "audio/x-flac": "flac",
    "audio/ogg": "ogg",
    "audio/aac": "aac",
    "audio/mp4": "mp4",
    "audio/x-m4a": "mp4",
    "audio/webm": "matroska",
}
"""The name of FFmpeg's format by the media type of an audio file. The usual type of a format is its first one."""
_SAMPLE_BYTES = 4
_BLOCK_SAMPLES = 1 << 16
_WAV_HEADER_BYTES = 8
_WAV_SLACK_BYTES = 64
_WAV_UNKNOWN_BYTES = 0x7FFF_0000


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


def open_container(content: IO[bytes], formats: Sequence[str]) -> "InputContainer":
    """Opens an audio or video file that has one of the formats, by their names in FFmpeg.

    FFmpeg opens nothing but `content`, also if the file names other files or addresses. Raises FFmpegError if the file
    is damaged or of another format, ValueError if a WAV file is cut off, and ImportError if PyAV is not installed.
    """
    import av

    if "wav" in formats:
        _check_wav_size(content)
    options = {"format_whitelist": ",".join(formats), "codec_whitelist": CODECS, "protocol_whitelist": "none"}
    return av.open(content, "r", format=formats[0] if len(formats) == 1 else None, options=options)


def _check_wav_size(content: IO[bytes]) -> None:
    """Raises ValueError if a WAV file is shorter than its header says. FFmpeg would decode only the rest.

    Ignores the huge size in the header of a file that was written to a pipe, and small errors of encoders.
    """
    header = content.read(_WAV_HEADER_BYTES)
    size_bytes, stated_bytes = content.seek(0, os.SEEK_END), int.from_bytes(header[4:], "little") + _WAV_HEADER_BYTES
    content.seek(0)
    if header[:4] == b"RIFF" and size_bytes + _WAV_SLACK_BYTES < stated_bytes < _WAV_UNKNOWN_BYTES:
        raise ValueError(f"it ends after {size_bytes} of {stated_bytes} bytes")


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


def decode_audio(container: "InputContainer", decoded: DecodedBytes) -> Iterator[npt.NDArray[np.float32]]:
    """Decodes the first audio track of an open file. Yields blocks of its audio, mixed to one channel of float32.

    Adds the size of all channels to `decoded`, as float32. Raises FFmpegError if the file is damaged, and the errors of
    `find_audio` and `DecodedBytes.add`.
    """
    from av import AudioResampler

    stream = find_audio(container)
    resampler = AudioResampler(format="fltp", layout="mono", rate=stream.rate, frame_size=_BLOCK_SAMPLES)
    # None flushes the resampler.
    for frame in chain(container.decode(stream), [None]):
        if frame is not None:
            decoded.add(frame.samples * frame.layout.nb_channels * _SAMPLE_BYTES, "audio")
        for block in resampler.resample(frame):
            yield block.to_ndarray()[0].astype(np.float32, copy=False)
