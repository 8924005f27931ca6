"""Qwen2.5-Omni in three stages: thinker, talker and token2wav. This module contains the descriptors."""

from stagemesh.common.descriptors import Emitted, FunctionDescriptor, OptionSpec, Signature
from stagemesh.common.tensors import TensorSpec

MODEL_TYPE = "qwen2_5_omni"
SAMPLE_RATE_HZ = 24_000

_CODES = {"codes": TensorSpec("int32", ("frames", "groups"))}
_SPEAKER = {"speaker": OptionSpec(default="", maximum=64, description="Voice of the speech. Empty: the first voice.")}

TOKEN2WAV = FunctionDescriptor(
    signature=Signature(
        accepts=_CODES,
        emits={"audio": Emitted(TensorSpec("float32", ("samples",)), kind="audio", sample_rate_hz=SAMPLE_RATE_HZ)},
        options=_SPEAKER,
    ),
    factory="stagemesh.services.models.qwen2_5_omni.token2wav:make_token2wav",
)
