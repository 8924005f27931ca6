"""The input buffer of a realtime conversation: the audio of the user that belongs to no message yet."""

import numpy as np

from stagemesh.client import AudioSamples
from stagemesh.common.errors import OverloadedError
from stagemesh.gateway.audio_formats import PCM_RATE_HZ
from stagemesh.gateway.content import decode_base64
from stagemesh.gateway.errors import ParameterError
from stagemesh.gateway.realtime.items import PCM_BYTES_PER_S

_SCALE = np.float32(1 / 32_768)
_MAX_BYTES = 16 << 20
"""The limit for the audio of one message: almost six minutes."""
_KEPT_SILENCE_BYTES = 10 * PCM_BYTES_PER_S
"""The audio that is retained while a detection of turns has found no speech in it."""


class InputBuffer:
    """16-bit PCM samples. Times are those of all audio that the client has appended, in seconds."""

    def __init__(self) -> None:
        self._pcm = bytearray()
        self._begin_bytes = 0
        """The amount of audio before the buffer."""

    @property
    def end_s(self) -> float:
        """The time at which the buffer ends."""
        return (self._begin_bytes + len(self._pcm)) / PCM_BYTES_PER_S

    def append(self, data: str) -> AudioSamples:
        """Appends audio in base64. Returns its samples.

        Raises ParameterError if it is not base64 or has half a sample, and OverloadedError if the buffer is full.
        """
        pcm = decode_base64(data, param="audio")
        if len(pcm) % 2:
            raise ParameterError("audio", "it has half a sample; send 16-bit PCM", reason="INVALID_MEDIA")
        if len(self._pcm) + len(pcm) > _MAX_BYTES:
            raise OverloadedError(
                f"the input buffer would exceed {_MAX_BYTES:,} bytes; commit or clear it", reason="SESSION_TOO_LARGE"
            )
        self._pcm += pcm
        return AudioSamples(np.frombuffer(pcm, "<i2").astype(np.float32) * _SCALE, PCM_RATE_HZ)

    def forget_silence(self) -> None:
        """Drops old audio, if no speech was found in the buffer."""
        if len(self._pcm) > 2 * _KEPT_SILENCE_BYTES:
            self._drop(len(self._pcm) - _KEPT_SILENCE_BYTES)

    def drop(self, *, until_s: float) -> None:
        """Drops the audio before a time."""
        self.take(until_s=until_s)

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
