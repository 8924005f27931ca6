"""Qwen3-Omni: text, images, audio and video to text and speech, in the stages thinker, talker and code2wav.

A codec frame represents 80 ms of speech.
"""

from stagemesh.common.descriptors import Emitted, FunctionDescriptor, Signature, TransformDescriptor
from stagemesh.common.tensors import TensorSpec

MODEL_TYPE = "qwen3_omni_moe"
SAMPLE_RATE_HZ = 24_000

_CODES = {"codes": TensorSpec("int32", ("frames", "groups"))}

CODE2WAV = FunctionDescriptor(
    signature=Signature(
        accepts=_CODES,
        emits={"audio": Emitted(TensorSpec("float32", ("samples",)), kind="audio", sample_rate_hz=SAMPLE_RATE_HZ)},
    ),
    factory="stagemesh.services.models.qwen3_omni.code2wav:make_code2wav",
)

TALKER2CODE2WAV = TransformDescriptor(
    takes=_CODES, gives=_CODES, factory="stagemesh.services.models.qwen3_omni.transforms:Talker2Code2Wav"
)
