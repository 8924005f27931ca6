"""The facts about a Qwen3-TTS checkpoint that the stages of the prompt and the talker need, and the transform
between talker and codec_decoder. Does not import torch.
"""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from stagemesh.services.engines.vllm.codec.base import CodecModel
from stagemesh.services.models import checkpoint
from stagemesh.services.models.codec_speech import description as speech
from stagemesh.services.models.qwen3_tts import MODEL_TYPE

ARCHITECTURE = "Qwen3TTSTalker"
_MIN_FRAMES = 2


read_config = partial(checkpoint.read_config, model_type=MODEL_TYPE)
"""Returns the config in the folder of a Qwen3-TTS checkpoint.

Raises NotReadyError (LOAD_FAILED) if the folder has no readable config of a Qwen3-TTS model."""


class Talker(CodecModel):
    """The description of the talker. Its rows consist of text tokens, codes and states of the talker's own width."""

    def __init__(self, model: Path) -> None:
        config = read_config(model)
        talker: Mapping[str, Any] = config["talker_config"]
        residuals = [talker["code_predictor_config"]["vocab_size"]] * (talker["num_code_groups"] - 1)
        self.groups: int = talker["num_code_groups"]
        self.end_code: int = talker["codec_eos_token_id"]
        self.state_width: int = talker["hidden_size"]
        self.text_vocabulary: int = talker["text_vocab_size"]
        self.code_vocabularies = [talker["vocab_size"], *residuals]
        self.hf_overrides = talker_config
        speech.check_talker_weights(model, config, _weight_names(talker))
        given = checkpoint.read_generation_config(model)
        self.sampling = {name: given.get(name, value) for name, value in speech.DEFAULT_SAMPLING.items()}
        self.sampling["min_new_tokens"] = _MIN_FRAMES
        _register_config()


def talker_config(config: Any) -> Any:
    """Returns the configuration of the talker from the configuration of the whole model.

    vLLM calls the function as `hf_overrides`, first with a plain configuration of which it needs only the model type.
    """
    from transformers import Qwen3Config

    if getattr(config, "talker_config", None) is None:
        return config
    fields = {"head_dim": config.talker_config["hidden_size"] // config.talker_config["num_attention_heads"]}
    fields |= _plain_rope(config.talker_config)
    predictor = Qwen3Config(**_plain_rope(fields.pop("code_predictor_config")))
    talker = Qwen3Config(**fields, architectures=[ARCHITECTURE], dtype=config.dtype)
    talker.code_predictor_config = predictor
    talker.tts_pad_token_id = config.tts_pad_token_id
    return talker


def _plain_rope(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Returns fields with plain RoPE instead of M-RoPE. Both are the same, because the talker has no media.

    transformers rejects unknown model types within a configuration, so that they are left out, too.
    """
    return {name: value for name, value in fields.items() if name not in ("rope_scaling", "model_type")}


def _register_config() -> None:
    """Makes transformers, and so vLLM, read the configuration of Qwen3-TTS, which transformers does not know."""
    from transformers import AutoConfig

    from stagemesh.services.models.qwen3_tts.config import Qwen3TTSConfig

    AutoConfig.register(MODEL_TYPE, Qwen3TTSConfig, exist_ok=True)


def _weight_names(talker: Mapping[str, Any]) -> list[str]:
    """Returns the names of the talker's weights. `talker` is the talker's part of the config."""
    projections = ["text_projection.linear_fc1", "text_projection.linear_fc2"]
    if talker["code_predictor_config"]["hidden_size"] != talker["hidden_size"]:
        projections.append("code_predictor.small_to_mtp_projection")
    return [
        "codec_head.weight",
        *(f"model.{part}.weight" for part in ("codec_embedding", "text_embedding", "norm")),
        *speech.decoder_weights("model", talker["num_hidden_layers"], speech.mlp_weights("mlp")),
        *speech.code_predictor_weights(talker),
        *speech.linear_weights(*projections),
    ]


def make_talker2codec_decoder(model: Path | None) -> speech.SpokenFrames:
    """Returns the transform that removes frames that are not audio.

    `model` is the folder of the stage that applies it. Raises InvalidRequestError if it is None.
    """
    folder = checkpoint.require_folder(
        model, "transform qwen3_tts.talker2codec_decoder", setting="`model` of the edge's stages"
    )
    predictor = read_config(folder)["talker_config"]["code_predictor_config"]
    return speech.SpokenFrames(codebook_size=predictor["vocab_size"])
