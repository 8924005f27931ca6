"""Qwen2.5-Omni in three stages: thinker, talker and token2wav. This module contains the descriptors."""

from stagemesh.common.plugins.descriptors import (
    CodecModelDescriptor,
    Emitted,
    FunctionDescriptor,
    OptionSpec,
    Signature,
    TransformDescriptor,
)
from stagemesh.common.wire.tensors import FLOAT, TensorSpec

MODEL_TYPE = "qwen2_5_omni"
SAMPLE_RATE_HZ = 24_000

_ROWS = {
    "text_ids": TensorSpec("int32", ("tokens",)),
    "codec_slots": TensorSpec("int8", ("tokens",)),
    "positions": TensorSpec("int32", ("tokens", 3)),
}
_CODES = {"codes": TensorSpec("int32", ("frames", "groups"))}
_SPEAKER = {"speaker": OptionSpec(default="", maximum=64, description="Voice of the speech. Empty: the first voice.")}

TALKER = CodecModelDescriptor(
    accepts=_ROWS,
    options=_SPEAKER,
    factory="stagemesh.services.models.qwen2_5_omni.description:Talker",
    architecture="Qwen2_5OmniTalker",
    model_class="stagemesh.services.models.qwen2_5_omni.talker:Qwen2_5OmniTalker",
)

THINKER2TALKER = TransformDescriptor(
    takes={
        "prompt_ids": TensorSpec("int32", ("tokens",)),
        "token_ids": TensorSpec("int32", ("tokens",)),
        "hidden_states": TensorSpec(FLOAT, ("tokens", "hidden")),
        "positions": TensorSpec("int32", ("tokens", 3)),
    },
    gives={**_ROWS, "states": TensorSpec(FLOAT, ("tokens", "hidden"))},
    factory="stagemesh.services.models.qwen2_5_omni.transforms:Thinker2Talker",
)

TALKER2TOKEN2WAV = TransformDescriptor(
    takes=_CODES, gives=_CODES, factory="stagemesh.services.models.qwen2_5_omni.transforms:make_talker2token2wav"
)

TOKEN2WAV = FunctionDescriptor(
    signature=Signature(
        accepts=_CODES,
        emits={"audio": Emitted(TensorSpec("float32", ("samples",)), kind="audio", sample_rate_hz=SAMPLE_RATE_HZ)},
        options=_SPEAKER,
    ),
    factory="stagemesh.services.models.qwen2_5_omni.factory:make_token2wav",
    stage_options={
        "device": OptionSpec("auto", allowed_texts=("auto", "cpu", "cuda")),
        "look_ahead_blocks": OptionSpec(1, minimum=0, maximum=256),
        "steps": OptionSpec(10, minimum=2, maximum=100),
    },
)
