"""Qwen3-Omni in three stages: thinker, talker and code2wav. This module contains the descriptors."""

from stagemesh.common.plugins.descriptors import (
    CodecModelDescriptor,
    FunctionDescriptor,
    Signature,
    TransformDescriptor,
)
from stagemesh.services.models.codec_speech import AUDIO, CODES, SPEAKER, TALKER_ROWS, VOCODER_OPTIONS, thinker2talker

MODEL_TYPE = "qwen3_omni_moe"

TALKER = CodecModelDescriptor(
    accepts=TALKER_ROWS,
    options=SPEAKER,
    factory="stagemesh.services.models.qwen3_omni.description:Talker",
    architecture="Qwen3OmniTalker",
    model_class="stagemesh.services.models.qwen3_omni.talker:Qwen3OmniTalker",
)

THINKER2TALKER = thinker2talker(
    "stagemesh.services.models.qwen3_omni.transforms:Thinker2Talker", states="hidden_states_accept"
)

TALKER2CODE2WAV = TransformDescriptor(
    takes=CODES, gives=CODES, factory="stagemesh.services.models.qwen3_omni.transforms:Talker2Code2Wav"
)

CODE2WAV = FunctionDescriptor(
    signature=Signature(accepts=CODES, emits=AUDIO),
    factory="stagemesh.services.models.qwen3_omni.code2wav:make_code2wav",
    stage_options=VOCODER_OPTIONS,
)
