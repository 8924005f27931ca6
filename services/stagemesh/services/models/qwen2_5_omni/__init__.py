"""Qwen2.5-Omni in three stages: thinker, talker and token2wav. This module contains the descriptors."""

from stagemesh.common.plugins.descriptors import (
    CodecModelDescriptor,
    FunctionDescriptor,
    OptionSpec,
    Signature,
    TransformDescriptor,
)
from stagemesh.services.models.codec_speech import AUDIO, CODES, DEVICE, SPEAKER, TALKER_ROWS, thinker2talker

MODEL_TYPE = "qwen2_5_omni"

TALKER = CodecModelDescriptor(
    accepts=TALKER_ROWS,
    options=SPEAKER,
    factory="stagemesh.services.models.qwen2_5_omni.description:Talker",
    architecture="Qwen2_5OmniTalker",
    model_class="stagemesh.services.models.qwen2_5_omni.talker:Qwen2_5OmniTalker",
)

THINKER2TALKER = thinker2talker(
    "stagemesh.services.models.qwen2_5_omni.transforms:Thinker2Talker", states="hidden_states"
)

TALKER2TOKEN2WAV = TransformDescriptor(
    takes=CODES, gives=CODES, factory="stagemesh.services.models.qwen2_5_omni.transforms:make_talker2token2wav"
)

TOKEN2WAV = FunctionDescriptor(
    signature=Signature(accepts=CODES, emits=AUDIO, options=SPEAKER),
    factory="stagemesh.services.models.qwen2_5_omni.factory:make_token2wav",
    stage_options={
        "device": DEVICE,
        "look_ahead_blocks": OptionSpec(1, minimum=0, maximum=256),
        "steps": OptionSpec(10, minimum=2, maximum=100),
    },
)
