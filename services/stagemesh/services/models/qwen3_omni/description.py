"""The facts about a Qwen3-Omni checkpoint that the talker's stage and the transforms need. Does not import torch."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from stagemesh.common.wire.tensors import Value
from stagemesh.services.models import checkpoint
from stagemesh.services.models.codec_speech.description import choose_speaker
from stagemesh.services.models.qwen3_omni import MODEL_TYPE

_PREFIX = "talker."
Tokens: TypeAlias = npt.NDArray[np.int32]
_SAMPLING = {"temperature": 0.9, "top_k": 50, "top_p": 1.0, "repetition_penalty": 1.05, "max_new_tokens": 4096}


@lru_cache(maxsize=8)
def read_config(model: Path) -> Mapping[str, Any]:
    """Returns the config of a Qwen3-Omni checkpoint.

    Raises NotReadyError (LOAD_FAILED) if the folder has no readable config of a Qwen3-Omni model.
    """
    return checkpoint.read_config(model, model_type=MODEL_TYPE)


@dataclass(frozen=True)
class TextTokens:
    """The ids of special tokens in the thinker's vocabulary."""

    message_start: int
    user: int
    assistant: int
    pad: int
    bos: int
    eos: int
    media: frozenset[int]
    """The placeholders of audio, images and video."""
    answer_ends: frozenset[int]
    """The tokens that end an answer of the thinker."""

    @classmethod
    def of(cls, model: Path) -> "TextTokens":
        """Returns the ids in the configs of the checkpoint folder `model`."""
        config = read_config(model)
        thinker = config["thinker_config"]
        ends: list[int] | int = read_generation_config(model).get("eos_token_id", [])
        return cls(
            config["im_start_token_id"],
            config["user_token_id"],
            config["assistant_token_id"],
            config["tts_pad_token_id"],
            config["tts_bos_token_id"],
            config["tts_eos_token_id"],
            frozenset(thinker[f"{kind}_token_id"] for kind in ("audio", "image", "video")),
            frozenset({config["im_end_token_id"], *(ends if isinstance(ends, list) else [ends])}),
        )


class Talker:
    """The description of the talker: a `CodecModel` of the vllm engine."""

    def __init__(self, model: Path) -> None:
        config = read_config(model)
        talker: Mapping[str, Any] = config["talker_config"]
        self._config, self._speakers = talker, talker["speaker_id"]
        self.groups: int = talker["num_code_groups"]
        self.end_code: int = talker["codec_eos_token_id"]
        self.state_width: int = talker["thinker_hidden_size"]
        self.text_vocabulary: int = config["thinker_config"]["text_config"]["vocab_size"]
        self.hf_overrides = talker_config
        # The transform of the stage's edge needs them. A checkpoint without them is rejected at the start.
        TextTokens.of(model)
        # The weights of a quantized model have further names, which vLLM knows.
        if "quantization_config" not in config:
            found = checkpoint.weight_names(model, _PREFIX)
            checkpoint.check_names(_weight_names(talker), found, f"the talker in {model}")
        self.sampling = {**_SAMPLING, **_talker_sampling(model)}

    def codec_prefix(self, options: Mapping[str, Value]) -> Sequence[int]:
        """Returns the codes that precede the first audio frame.

        Raises InvalidRequestError (INVALID_OPTION) if the model does not have the speaker in `options`.
        """
        speaker = choose_speaker(self._speakers, str(options.get("speaker", "")))
        talker = self._config
        return [
            talker["codec_nothink_id"],
            talker["codec_think_bos_id"],
            talker["codec_think_eos_id"],
            speaker,
            talker["codec_pad_id"],
            talker["codec_bos_id"],
        ]

    def choose_texts(self, text_ids: Tokens, options: Mapping[str, Value]) -> Tokens:  # noqa: ARG002  # none depends on them
        """Returns `text_ids`."""
        return text_ids


def talker_config(config: Any) -> Any:
    """Returns the configuration of the talker from the configuration of the whole model.

    vLLM calls the function as `hf_overrides`, first with a plain configuration of which it needs only the model type.
    """
    talker = getattr(config, "talker_config", None)
    if talker is None or isinstance(talker, dict):
        return config
    talker.architectures = ["Qwen3OmniTalker"]
    talker.dtype = config.dtype
    talker.text_vocab_size = config.thinker_config.text_config.vocab_size
    talker.tts_pad_token_id = config.tts_pad_token_id
    return talker


def read_generation_config(model: Path) -> Mapping[str, Any]:
    """Returns the checkpoint's generation_config.json, or an empty mapping if the file cannot be read."""
    try:
        values: dict[str, Any] = json.loads((model / "generation_config.json").read_text())
    except (OSError, ValueError):
        return {}
    return values


def _talker_sampling(model: Path) -> dict[str, Any]:
    """Returns the talker's sampling parameters in the checkpoint's generation_config.json."""
    values = read_generation_config(model)
    given = {name.removeprefix("talker_"): value for name, value in values.items() if name.startswith("talker_")}
    return {name: value for name, value in given.items() if name in _SAMPLING}


def _weight_names(talker: Mapping[str, Any]) -> set[str]:
    """Returns the names of the talker's weights in a checkpoint. `talker` is the talker's part of the config."""
    text, predictor = talker["text_config"], talker["code_predictor_config"]
    experts = text.get("num_experts", text.get("num_local_experts", 0))
    sparse = ["mlp.gate.weight", "mlp.shared_expert_gate.weight", *_mlp("mlp.shared_expert")]
    sparse += [name for expert in range(experts) for name in _mlp(f"mlp.experts.{expert}")]
    names = [
        "codec_head.weight",
        "model.codec_embedding.weight",
        "model.norm.weight",
        "code_predictor.model.norm.weight",
    ]
    names += _layers("model", text["num_hidden_layers"], sparse)
    names += _layers("code_predictor.model", predictor["num_hidden_layers"], _mlp("mlp"))
    for group in range(talker["num_code_groups"] - 1):
        names += [f"code_predictor.lm_head.{group}.weight", f"code_predictor.model.codec_embedding.{group}.weight"]
    for projection in ("text_projection", "hidden_projection"):
        names += [f"{projection}.linear_fc{part}.{kind}" for part in (1, 2) for kind in ("weight", "bias")]
    return {_PREFIX + name for name in names}


def _layers(model: str, count: int, mlp: Sequence[str]) -> list[str]:
    parts = [f"self_attn.{name}.weight" for name in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")]
    parts += ["input_layernorm.weight", "post_attention_layernorm.weight", *mlp]
    return [f"{model}.layers.{layer}.{part}" for layer in range(count) for part in parts]


def _mlp(name: str) -> list[str]:
    return [f"{name}.{part}_proj.weight" for part in ("gate", "up", "down")]
