"""Parts that all codec speech models share. This module contains the tensors and options of their descriptors."""

from stagemesh.common.plugins.descriptors import Emitted, OptionSpec, TransformDescriptor
from stagemesh.common.wire.tensors import FLOAT, TensorSpec

SAMPLE_RATE_HZ = 24_000
CODES = {"codes": TensorSpec("int32", ("frames", "groups"))}
AUDIO = {"audio": Emitted(TensorSpec("float32", ("samples",)), kind="audio", sample_rate_hz=SAMPLE_RATE_HZ)}
TALKER_ROWS = {
    "text_ids": TensorSpec("int32", ("tokens",)),
    "codec_slots": TensorSpec("int8", ("tokens",)),
    "positions": TensorSpec("int32", ("tokens", 3)),
}
"""The input rows of a talker that follows a thinker."""
SPEAKER = {"speaker": OptionSpec(default="", maximum=64, description="Voice of the speech. Empty: the first voice.")}
DEVICE = OptionSpec("auto", allowed_texts=("auto", "cpu", "cuda"))
VOCODER_OPTIONS = {"device": DEVICE, "dtype": OptionSpec("auto", allowed_texts=("auto", "float32", "bfloat16"))}


def thinker2talker(factory: str, *, states: str) -> TransformDescriptor:
    """Describes a transform from a thinker's tokens and states to a talker's rows.

    `states` is the name of the tensor with the thinker's states.
    """
    return TransformDescriptor(
        takes={
            "prompt_ids": TensorSpec("int32", ("tokens",)),
            "token_ids": TensorSpec("int32", ("tokens",)),
            states: TensorSpec(FLOAT, ("tokens", "hidden")),
            "positions": TALKER_ROWS["positions"],
        },
        gives={**TALKER_ROWS, "states": TensorSpec(FLOAT, ("tokens", "hidden"))},
        factory=factory,
    )
