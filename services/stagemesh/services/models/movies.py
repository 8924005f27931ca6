"""Combines the frames of one stage and the sound of another into one video file, while they arrive."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from stagemesh.common.errors import InvalidChunkError, InvalidRequestError
from stagemesh.common.media.encodings import MAX_FRAME_RATE, Buffer, MovieEncoder
from stagemesh.common.plugins.descriptors import Emitted, FunctionDescriptor, OptionSpec, Signature
from stagemesh.common.wire.tensors import TensorSpec, Value
from stagemesh.connectors.packets import Packet
from stagemesh.services.engines.function.base import Call

FRAMES, AUDIO, VIDEO = "frames", "audio", "video"


def _descriptor(media_type: str, factory: str) -> FunctionDescriptor:
    return FunctionDescriptor(
        signature=Signature(
            accepts={
                FRAMES: TensorSpec("float32", ("frames", 3, "height", "width")),
                AUDIO: TensorSpec("float32", ("samples", "channels")),
            },
            emits={VIDEO: Emitted(TensorSpec("uint8", ("bytes",)), kind="media", media_type=media_type)},
            options={
                "frame_rate": OptionSpec(24.0, minimum=1.0, maximum=MAX_FRAME_RATE, description="Frames per second.")
            },
            # A packet contains either of them.
            optional=frozenset({FRAMES, AUDIO}),
        ),
        factory=f"stagemesh.services.models.movies:{factory}",
        stage_options={},
    )


MP4 = _descriptor("video/mp4", "Mp4")
WEBM = _descriptor("video/webm", "WebM")


class Mp4:
    """A `Function` that emits the parts of a video file with sound. The state of a request is its `MovieEncoder`.

    `frames` contains RGB frames with values in [0, 1]. `audio` contains one or two channels at the metadata value
    `sample_rate_hz`. The file does not depend on how the two arrive.
    """

    media_type = "video/mp4"

    def __init__(self, model: Path | None, options: Mapping[str, object]) -> None:
        if model is not None or options:
            raise InvalidRequestError(
                "a function that makes video files accepts neither a model nor options", reason="UNKNOWN_OPTION"
            )

    def open(self, *, seed: int, options: Mapping[str, Value]) -> MovieEncoder:  # noqa: ARG002
        return MovieEncoder(self.media_type, frame_rate=float(options["frame_rate"]))

    def __call__(self, batch: Sequence[Call[MovieEncoder]]) -> Sequence[Sequence[Packet]]:
        for call in batch:
            if call.packet is not None and AUDIO in call.packet.tensors:
                _sample_rate_hz(call.packet)
        return [[_file_part(data) for data in _encoded(call) if data] for call in batch]


class WebM(Mp4):
    """Does the same as `Mp4` for files of the type video/webm."""

    media_type = "video/webm"


def _encoded(call: Call[MovieEncoder]) -> Sequence[Buffer]:
    """Encodes the tensors of a call, or ends the file in the last call. Returns the complete bytes of the file."""
    if (packet := call.packet) is None:
        return [call.state.finish()]
    made: list[Buffer] = []
    if (audio := packet.tensors.get(AUDIO)) is not None:
        made.append(call.state.push_sound(audio, sample_rate_hz=_sample_rate_hz(packet)))
    if (frames := packet.tensors.get(FRAMES)) is not None and not packet.metadata.get("preview"):
        made.append(call.state.push(frames))
    return made


def _sample_rate_hz(packet: Packet) -> int:
    rate_hz = packet.metadata.get("sample_rate_hz")
    if not isinstance(rate_hz, int) or rate_hz <= 0:
        raise InvalidChunkError(f"a packet of audio has the metadata value sample_rate_hz {rate_hz!r}; send its rate")
    return rate_hz


def _file_part(data: Buffer) -> Packet:
    return Packet({VIDEO: np.frombuffer(data, np.uint8)})
