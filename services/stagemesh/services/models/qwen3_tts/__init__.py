"""Qwen3-TTS: a prompt stage, a talker and a codec decoder. This module contains the descriptors."""

from stagemesh.common.descriptors import Emitted, FunctionDescriptor, Signature
from stagemesh.common.tensors import TensorSpec

MODEL_TYPE = "qwen3_tts"
CODEC_TYPE = "qwen3_tts_tokenizer_12hz"
CODEC_FOLDER = "speech_tokenizer"
"""The folder in a checkpoint that contains the codec."""
SAMPLE_RATE_HZ = 24_000

_CODES = {"codes": TensorSpec("int32", ("frames", "groups"))}

CODEC_DECODER = FunctionDescriptor(
    signature=Signature(
        accepts=_CODES,
        emits={"audio": Emitted(TensorSpec("float32", ("samples",)), kind="audio", sample_rate_hz=SAMPLE_RATE_HZ)},
    ),
    factory="stagemesh.services.models.qwen3_tts.codec_decoder:make_codec_decoder",
)
