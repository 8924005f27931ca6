"""The user's audio in a realtime conversation: the input buffer, and the detection of turns."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import TypeAlias

import numpy as np

from stagemesh.client import AsyncSession, AudioSamples, SpeechDetected, TurnCommitted, TurnDetection, TurnEnded
from stagemesh.common.errors import OverloadedError, StagemeshError
from stagemesh.common.tasks import end_tasks
from stagemesh.gateway.audio import PCM_RATE_HZ
from stagemesh.gateway.catalog import Model
from stagemesh.gateway.content import decode_base64
from stagemesh.gateway.errors import ParameterError
from stagemesh.gateway.realtime.g711 import G711, G711_RATE_HZ, AudioFormatName
from stagemesh.gateway.realtime.items import PCM_BYTES_PER_S, InputAudioContent, ItemBody, UserMessage, pcm_to_base64

_SCALE = np.float32(1 / 32_768)
_MAX_BYTES = 16 << 20
"""The limit for the audio of one message: almost six minutes."""
_KEPT_SILENCE_BYTES = 10 * PCM_BYTES_PER_S
"""The audio that is retained while a detection of turns has found no speech in it."""


def decode_audio(item: ItemBody, audio_format: AudioFormatName) -> None:
    """Converts the audio of a client's item to PCM, if the session's audio is G.711. Blocks.

    Raises ParameterError if it is not base64, and OverloadedError if it is too long.
    """
    for content in item.content if isinstance(item, UserMessage) and audio_format != "audio/pcm" else ():
        if isinstance(content, InputAudioContent) and content.audio is not None:
            buffer = InputBuffer()
            buffer.accept(audio_format)
            buffer.append(content.audio)
            content.audio = pcm_to_base64(buffer.take())


class InputBuffer:
    """16-bit PCM samples. Times are those of all audio that the client has appended, in seconds."""

    def __init__(self) -> None:
        self._pcm = bytearray()
        self._g711: G711 | None = None
        self._begin_bytes = 0
        """The amount of audio before the buffer."""

    @property
    def end_s(self) -> float:
        """The time at which the buffer ends."""
        return (self._begin_bytes + len(self._pcm)) / PCM_BYTES_PER_S

    @property
    def size_bytes(self) -> int:
        """The memory of the audio."""
        return len(self._pcm)

    @property
    def expansion(self) -> int:
        """The number of bytes of PCM for each byte that is appended."""
        return 1 if self._g711 is None else PCM_BYTES_PER_S // G711_RATE_HZ

    def accept(self, audio_format: AudioFormatName) -> None:
        """Sets the format of the audio that will be appended."""
        self._g711 = None if audio_format == "audio/pcm" else G711(audio_format, "decode")

    def append(self, data: str) -> AudioSamples:
        """Appends audio in base64. Returns its samples.

        Raises ParameterError if it is not base64 or has half a sample, and OverloadedError if the buffer is full.
        """
        pcm = decode_base64(data, param="audio")
        if self._g711 is None and len(pcm) % 2:
            raise ParameterError("audio", "it has half a sample; send 16-bit PCM", reason="INVALID_MEDIA")
        if len(self._pcm) + self.expansion * len(pcm) > _MAX_BYTES:
            raise OverloadedError(
                f"the input buffer would exceed {_MAX_BYTES:,} bytes; commit or clear it", reason="SESSION_TOO_LARGE"
            )
        if self._g711 is not None:
            pcm = self._g711.decode(pcm)
        self._pcm += pcm
        return AudioSamples(np.frombuffer(pcm, "<i2").astype(np.float32) * _SCALE, PCM_RATE_HZ)

    def forget_silence(self) -> None:
        """Drops old audio, if no speech was found in the buffer."""
        if len(self._pcm) > 2 * _KEPT_SILENCE_BYTES:
            self._drop(len(self._pcm) - _KEPT_SILENCE_BYTES)

    def take(self, *, until_s: float | None = None) -> bytes:
        """Removes and returns the audio before a time, or all of it."""
        size = len(self._pcm)
        if until_s is not None:
            size = min(size, max(0, 2 * round(until_s * PCM_RATE_HZ) - self._begin_bytes))
        pcm = bytes(self._pcm[:size])
        self._drop(size)
        return pcm

    def _drop(self, size: int) -> None:
        del self._pcm[:size]
        self._begin_bytes += size


Heard: TypeAlias = SpeechDetected | TurnCommitted | StagemeshError
"""Speech that begins or ends, a complete turn, or the error that has ended the listener."""


class Listener:
    """One session that detects turns. Reports its events one after the other."""

    def __init__(self, session: AsyncSession, *, begin_s: float, on_event: Callable[[Heard], Awaitable[None]]) -> None:
        self._session, self._begin_s, self._on_event = session, begin_s, on_event
        self._task = asyncio.create_task(self._run())

    @classmethod
    async def open(
        cls, model: Model, detection: TurnDetection, *, begin_s: float, on_event: Callable[[Heard], Awaitable[None]]
    ) -> "Listener":
        """Opens the session. Raises its error if the pipeline rejects it.

        `begin_s` is the time of the first audio of the session, which is added to the times of its events. `on_event`
        is called with each of them.
        """
        session = model.client.converse(
            pipeline=model.description.pipeline, outputs=[model.require_output("text")], turn_detection=detection
        )
        return cls(await session.__aenter__(), begin_s=begin_s, on_event=on_event)

    async def append(self, samples: AudioSamples) -> None:
        """Appends audio. Waits until the session accepts it."""
        await self._session.append(samples)

    async def close(self) -> None:
        """Ends the session. No report follows."""
        await end_tasks([self._task])
        await self._session.close()

    async def _run(self) -> None:
        try:
            async for event in self._session:
                match event:
                    case SpeechDetected():
                        await self._on_event(replace(event, at_s=event.at_s + self._begin_s))
                    case TurnCommitted():
                        await self._on_event(replace(event, audio_end_s=event.audio_end_s + self._begin_s))
                    case TurnEnded(error=StagemeshError() as error):
                        raise error
                    case _:
                        pass
        except StagemeshError as exc:
            await self._on_event(exc)
            await self._session.close()
