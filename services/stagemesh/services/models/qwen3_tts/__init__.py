"""Qwen3-TTS: a prompt stage, a talker and a codec decoder. This module contains the descriptors."""

from stagemesh.common.plugins.descriptors import (
    CodecModelDescriptor,
    Emitted,
    FunctionDescriptor,
    OptionSpec,
    Signature,
    TransformDescriptor,
)
from stagemesh.common.wire.tensors import TensorSpec
from stagemesh.services.models.codec_speech import AUDIO, CODES, DEVICE, VOCODER_OPTIONS

MODEL_TYPE = "qwen3_tts"
CODEC_TYPE = "qwen3_tts_tokenizer_12hz"
CODEC_FOLDER = "speech_tokenizer"
"""The folder in a checkpoint that contains the codec."""

_ROWS = {"text_ids": TensorSpec("int32", ("tokens",)), "row_codes": TensorSpec("int32", ("tokens", "groups"))}
_MAX_CHARACTERS = 2000
_REFERENCE = {"reference_codes": TensorSpec("int32", ("frames", "groups"))}

_OPTIONS = {
    "speaker": OptionSpec("", maximum=64, description="Voice of a model with voices by name. Empty: the first voice."),
    "language": OptionSpec("auto", maximum=64, description="Language of the speech, or auto: the talker chooses it."),
    "instruction": OptionSpec(
        "", maximum=_MAX_CHARACTERS, description="Description of the voice, or of how it speaks."
    ),
    "reference_text": OptionSpec(
        "",
        maximum=_MAX_CHARACTERS,
        description="Text of the reference voice. The talker then continues its codes; otherwise it has only the sound "
        "of the voice.",
    ),
    "whole_text": OptionSpec(
        default=False,
        description="Whether the talker reads the whole text before it speaks. Otherwise it reads while it speaks, and "
        "speaks sooner.",
    ),
}
PROMPT = FunctionDescriptor(
    signature=Signature(
        emits={
            **{name: Emitted(spec) for name, spec in (_ROWS | _REFERENCE).items()},
            "states": Emitted(TensorSpec("float32", ("tokens", "hidden"))),
        },
        options=_OPTIONS,
        media=True,
    ),
    factory="stagemesh.services.models.qwen3_tts.prompt:make_prompt_writer",
    stage_options={"device": DEVICE, "media_bytes": OptionSpec(64 << 20, minimum=0)},
)

TALKER = CodecModelDescriptor(
    accepts=_ROWS,
    options={},
    factory="stagemesh.services.models.qwen3_tts.description:Talker",
    architecture="Qwen3TTSTalker",
    model_class="stagemesh.services.models.qwen3_tts.talker:Qwen3TTSTalker",
)

TALKER2CODEC_DECODER = TransformDescriptor(
    takes=CODES, gives=CODES, factory="stagemesh.services.models.qwen3_tts.description:make_talker2codec_decoder"
)

CODEC_DECODER = FunctionDescriptor(
    signature=Signature(accepts=CODES | _REFERENCE, emits=AUDIO, optional=frozenset(CODES | _REFERENCE)),
    factory="stagemesh.services.models.qwen3_tts.codec_decoder:make_clone_vocoder",
    stage_options=VOCODER_OPTIONS,
)
