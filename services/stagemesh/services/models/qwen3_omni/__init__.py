"""Qwen3-Omni in three stages: thinker, talker and code2wav. This module contains the descriptors."""

from stagemesh.common.descriptors import CodecModelDescriptor, OptionSpec, TransformDescriptor
from stagemesh.common.tensors import TensorSpec

_ROWS = {
    "text_ids": TensorSpec("int32", ("tokens",)),
    "codec_slots": TensorSpec("int8", ("tokens",)),
    "positions": TensorSpec("int32", ("tokens", 3)),
}

TALKER = CodecModelDescriptor(
    accepts=_ROWS,
    options={"speaker": OptionSpec(default="", maximum=64, description="Voice of the speech. Empty: the first voice.")},
    factory="stagemesh.services.models.qwen3_omni.description:Talker",
    architecture="Qwen3OmniTalker",
    model_class="stagemesh.services.models.qwen3_omni.talker:Qwen3OmniTalker",
)

THINKER2TALKER = TransformDescriptor(
    takes={"prompt_ids": TensorSpec("int32", ("tokens",)), "token_ids": TensorSpec("int32", ("tokens",))},
    gives=_ROWS,
    factory="stagemesh.services.models.qwen3_omni.thinker2talker:Thinker2Talker",
)
