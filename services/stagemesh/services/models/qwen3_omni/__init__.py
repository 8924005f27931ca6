"""Qwen3-Omni in three stages: thinker, talker and code2wav. This module contains the descriptors."""

from collections.abc import Sequence

from stagemesh.common.descriptors import (
    CodecModelDescriptor,
    Emitted,
    FunctionDescriptor,
    OptionSpec,
    Signature,
    TransformDescriptor,
)
from stagemesh.common.tensors import FLOAT, TensorSpec
from stagemesh.common.verification import DeployedStage, ReferenceDescriptor, VerifiedStage
from stagemesh.services.models.verification import AUDIO, CODES, has_architecture, samples_text, text_outputs

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
    factory="stagemesh.services.models.qwen3_omni.thinker2talker:Thinker2Talker",
)

TALKER2CODE2WAV = TransformDescriptor(
    takes=_CODES, gives=_CODES, factory="stagemesh.services.models.qwen3_omni.talker2code2wav:Talker2Code2Wav"
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


def _find_stages(stages: Sequence[DeployedStage]) -> Sequence[Sequence[VerifiedStage]]:
    """Returns the group of each thinker: the thinker, and talker and code2wav of the same checkpoint."""
    thinkers = [stage for stage in stages if samples_text(stage) and has_architecture(stage, _ARCHITECTURE)]
    return [
        [
            VerifiedStage("thinker", thinker, text_outputs(thinker), "tokens"),
            *(
                VerifiedStage("talker", stage, (CODES,), "frames")
                for stage in stages
                if stage.engine == "vllm" and stage.emits >= {CODES} and stage.model == thinker.model
            ),
            *(
                VerifiedStage("code2wav", stage, (AUDIO,))
                for stage in stages
                if stage.function == "qwen3_omni.code2wav" and stage.model == thinker.model
            ),
        ]
        for thinker in thinkers
    ]


_ARCHITECTURE = "Qwen3OmniMoeForConditionalGeneration"
REFERENCE = ReferenceDescriptor(
    description="thinker, talker and code2wav of Qwen3-Omni (transformers)",
    find=_find_stages,
    factory="stagemesh.services.models.qwen3_omni.verification:Qwen3OmniReference",
    media=frozenset({"image", "audio"}),
)
