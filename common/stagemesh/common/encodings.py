"""The media types in which a stage can encode the tensors that it emits as one file."""

from collections.abc import Sequence

from stagemesh.common.descriptors import Emitted
from stagemesh.common.tensors import TensorSpec

RAW = "application/octet-stream"
"""The media type of a file that contains the bytes of tensors of any type, in order."""
AUDIO_ENCODINGS = ("audio/wav", "audio/flac", "audio/ogg", "audio/mpeg")
VIDEO_ENCODINGS = ("video/mp4", "video/webm")
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
