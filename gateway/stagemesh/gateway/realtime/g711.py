"""G.711, the audio of telephones: logarithmic samples of 8 bits, 8,000 of them a second."""

from typing import Any, Literal, TypeAlias

import numpy as np
from av import AudioCodecContext, AudioFrame, AudioResampler, CodecContext, Packet

from stagemesh.gateway.audio import PCM_RATE_HZ

G711_RATE_HZ = 8_000
AudioFormatName: TypeAlias = Literal["audio/pcm", "audio/pcmu", "audio/pcma"]
_CODECS = {"audio/pcmu": "pcm_mulaw", "audio/pcma": "pcm_alaw"}
_LAYOUT, _SAMPLES = "mono", "s16"


class G711:
    """Converts one stream of audio between G.711 and 16-bit PCM at 24,000 Hz, part by part.

    Up to 3 ms of audio are converted with the next part. Use an object for one direction.
    """

    def __init__(self, audio_format: AudioFormatName, direction: Literal["decode", "encode"]) -> None:
        """`audio_format` is the format of the G.711. It is not PCM."""
        codec = CodecContext.create(_CODECS[audio_format], "r" if direction == "decode" else "w")
        assert isinstance(codec, AudioCodecContext), "G.711 is a codec of audio"
        codec.sample_rate, codec.layout = G711_RATE_HZ, _LAYOUT
        rate_hz = PCM_RATE_HZ
        if direction == "encode":
            codec.format, rate_hz = _SAMPLES, G711_RATE_HZ
        self._resampler = AudioResampler(format=_SAMPLES, layout=_LAYOUT, rate=rate_hz)
        self._codec: Any = codec

    def decode(self, data: bytes) -> bytes:
        """Returns the PCM of G.711."""
        frames: list[AudioFrame] = self._codec.decode(Packet(data)) if data else []
        return b"".join(each.to_ndarray().tobytes() for frame in frames for each in self._resampler.resample(frame))

    def encode(self, pcm: bytes) -> bytes:
        """Returns the G.711 of PCM."""
        if not pcm:
            return b""
        frame = AudioFrame.from_ndarray(np.frombuffer(pcm, "<i2")[None], format=_SAMPLES, layout=_LAYOUT)
        frame.sample_rate = PCM_RATE_HZ
        return b"".join(bytes(part) for each in self._resampler.resample(frame) for part in self._codec.encode(each))
