"""The audio of callers: the type, length and loudness of their files, and the formats in which answers are encoded."""

import asyncio
import io
from collections.abc import Callable, Generator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from typing import Literal, NamedTuple, TypeAlias, TypeVar

import numpy as np
from av.container import InputContainer
from fastapi import Request

from stagemesh.client import AudioSamples
from stagemesh.common.errors import InvalidRequestError
from stagemesh.common.media.decoding import DecodedBytes, decode_audio, find_audio, media_type_of, open_media
from stagemesh.common.media.encodings import PCM, AudioEncoder
from stagemesh.common.process.host import lower_thread_priority
from stagemesh.gateway.answers import until_disconnected
from stagemesh.gateway.errors import ParameterError
from stagemesh.gateway.limits import Sender

T = TypeVar("T")

MAX_RATE_HZ, MAX_CHANNELS = 96_000, 2
"""The limits of audio whose length is limited."""
_VALUE_BYTES = 2048
"""The size of decoded audio that counts as a value of the request's content."""
_THREADS = ThreadPoolExecutor(8, "decoding", initializer=lower_thread_priority)


class Measured(NamedTuple):
    """The audio of a file, mixed to one channel."""

    media_type: str
    duration_s: float
    peak: float
    """The largest absolute value of a sample, at most 1."""


async def decode(request: Request, work: Callable[[], T], decoded: DecodedBytes) -> T:
    """Returns the result of `work`, which decodes a file within a budget, in a thread. The caller may have to wait.

    Ends it if the caller disconnects. If the request is rejected, its decoded audio counts as part of its content.
    """
    sender: Sender = request.scope["sender"]

    async def run() -> T:
        async with sender.decoders():
            return await asyncio.get_running_loop().run_in_executor(_THREADS, work)

    try:
        with closing(decoded):
            return await until_disconnected(request, run())
    finally:
        sender.add(0, values=decoded.size_bytes // _VALUE_BYTES)


def find_media_type(data: bytes, *, param: str) -> str:
    """Returns the media type of an audio file by its content. Blocks for a short time.

    Raises ParameterError (INVALID_MEDIA) if it is not a file of a known format with audio.
    """
    with _opened(data, param) as container:
        return media_type_of(container, "audio")


def measure(data: bytes, *, param: str, decoded: DecodedBytes, max_s: float | None = None) -> Measured:
    """Decodes an audio file, and measures its audio. Blocks. Stops when the audio exceeds `max_s` seconds.

    Adds the size of all channels to `decoded`. Raises ParameterError (INVALID_MEDIA) if it is not a file of a known
    format with audio, is damaged, or has a limited length and too many channels or samples per second, and the errors
    of `DecodedBytes.add`.
    """
    samples, peak = 0, 0.0
    with _opened(data, param) as container:
        rate_hz, channels = container.streams.audio[0].rate, container.streams.audio[0].channels
        if max_s is not None and (rate_hz > MAX_RATE_HZ or channels > MAX_CHANNELS):
            limit = f"send at most {MAX_CHANNELS} channels, and at most {MAX_RATE_HZ:,} Hz"
            problem = f"it has {channels} channels at {rate_hz:,} Hz; {limit}"
            raise ParameterError(param, problem, reason="INVALID_MEDIA")
        for block, rate_hz in decode_audio(container, decoded):
            samples, peak = samples + len(block), max(peak, float(np.abs(block).max(initial=0.0)))
            if max_s is not None and samples > max_s * rate_hz:
                break
        return Measured(media_type_of(container, "audio"), samples / rate_hz, peak)


@contextmanager
def _opened(data: bytes, param: str) -> Generator[InputContainer]:
    try:
        with open_media(io.BytesIO(data), "audio") as container:
            find_audio(container)
            yield container
    except InvalidRequestError as exc:
        if isinstance(exc, ParameterError) or exc.reason != "INVALID_MEDIA":
            raise
        raise ParameterError(param, exc.message, reason=exc.reason) from exc


AudioFormat: TypeAlias = Literal["wav", "mp3", "flac", "opus", "aac", "pcm", "pcm16"]

MEDIA_TYPES: Mapping[AudioFormat, str] = {
    "wav": "audio/wav",
    "mp3": "audio/mpeg",
    "flac": "audio/flac",
    "opus": "audio/ogg",
    "aac": "audio/aac",
    "pcm": PCM,
    "pcm16": PCM,
}
PCM_RATE_HZ = 24_000
"""The number of samples per second of pcm and pcm16, which OpenAI's clients assume."""


class AnswerEncoder:
    """An encoder of the audio of one answer, in parts, which depend on how the audio is divided.

    A file has the sample rate of the audio. PCM has the rate that clients assume, and one channel.
    """

    def __init__(self, audio_format: AudioFormat) -> None:
        self._media_type = MEDIA_TYPES[audio_format]
        self._is_pcm = self._media_type == PCM
        self._encoder: AudioEncoder | None = None

    def push(self, chunk: AudioSamples) -> bytes:
        """Returns the bytes that are complete after a part of the audio."""
        if self._encoder is None:
            rates_hz = [PCM_RATE_HZ] if self._is_pcm else []
            self._encoder = AudioEncoder(self._media_type, sample_rate_hz=chunk.sample_rate_hz, rates_hz=rates_hz)
        is_mixed = self._is_pcm and chunk.samples.ndim > 1
        return bytes(self._encoder.push(chunk.samples.mean(axis=1) if is_mixed else chunk.samples))

    def finish(self) -> bytes:
        """Returns the remaining bytes. Called once, after the last chunk."""
        return b"" if self._encoder is None else bytes(self._encoder.finish())
