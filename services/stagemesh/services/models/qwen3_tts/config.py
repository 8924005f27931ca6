"""The configuration of Qwen3-TTS for transformers."""

from transformers import PreTrainedConfig

from stagemesh.services.models.qwen3_tts import MODEL_TYPE


class Qwen3TTSConfig(PreTrainedConfig):  # type: ignore[no-untyped-call]
    """The whole configuration. Its parts, such as `talker_config`, are dicts."""

    model_type = MODEL_TYPE
