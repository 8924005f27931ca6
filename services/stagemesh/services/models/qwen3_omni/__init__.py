"""Qwen3-Omni in three stages: thinker, talker and code2wav. This module contains the descriptors."""

from stagemesh.common.plugins.descriptors import (
    CodecModelDescriptor,
    Emitted,
    FunctionDescriptor,
    OptionSpec,
    Signature,
    TransformDescriptor,
)
from stagemesh.common.wire.tensors import FLOAT, TensorSpec

MODEL_TYPE = "qwen3_omni_moe"
SAMPLE_RATE_HZ = 24_000

_ROWS = {
    "text_ids": TensorSpec("int32", ("tokens",)),
    "codec_slots": TensorSpec("int8", ("tokens",)),
    "positions": TensorSpec("int32", ("tokens", 3)),
}
_CODES = {"codes": TensorSpec("int32", ("frames", "groups"))}

TALKER = CodecModelDescriptor(
    accepts=_ROWS,
    options={"speaker": OptionSpec(default="", maximum=64, description="Voice of the speech. Empty: the first voice.")},
    factory="stagemesh.services.models.qwen3_omni.description:Talker",
    architecture="Qwen3OmniTalker",
    model_class="stagemesh.services.models.qwen3_omni.talker:Qwen3OmniTalker",
)

THINKER2TALKER = TransformDescriptor(
    takes={
        "prompt_ids": TensorSpec("int32", ("tokens",)),
        "token_ids": TensorSpec("int32", ("tokens",)),
        "hidden_states_accept": TensorSpec(FLOAT, ("tokens", "hidden")),
        "positions": TensorSpec("int32", ("tokens", 3)),
    },
    gives={**_ROWS, "states": TensorSpec(FLOAT, ("tokens", "hidden"))},
    factory="stagemesh.services.models.qwen3_omni.transforms:Thinker2Talker",
)

TALKER2CODE2WAV = TransformDescriptor(
    takes=_CODES, gives=_CODES, factory="stagemesh.services.models.qwen3_omni.transforms:Talker2Code2Wav"
)

CODE2WAV = FunctionDescriptor(
    signature=Signature(
        accepts=_CODES,
        emits={"audio": Emitted(TensorSpec("float32", ("samples",)), kind="audio", sample_rate_hz=SAMPLE_RATE_HZ)},
    ),
    factory="stagemesh.services.models.qwen3_omni.code2wav:make_code2wav",
    stage_options={
        "device": OptionSpec("auto", allowed_texts=("auto", "cpu", "cuda")),
        "dtype": OptionSpec("auto", allowed_texts=("auto", "float32", "bfloat16")),
    },
)
