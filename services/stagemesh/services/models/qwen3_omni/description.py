"""The facts about a Qwen3-Omni checkpoint that the talker's stage and the transforms need. Does not import torch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from stagemesh.common.wire.tensors import Value
from stagemesh.services.engines.vllm.codec.base import CodecModel
from stagemesh.services.models import checkpoint
from stagemesh.services.models.codec_speech import description as speech
from stagemesh.services.models.qwen3_omni import MODEL_TYPE

read_config = partial(checkpoint.read_config, model_type=MODEL_TYPE)
"""Returns the config in the folder of a Qwen3-Omni checkpoint.

Raises NotReadyError (LOAD_FAILED) if the folder has no readable config of a Qwen3-Omni model."""


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
        ends: list[int] | int = checkpoint.read_generation_config(model).get("eos_token_id", [])
        names = ("im_start", "user", "assistant", "tts_pad", "tts_bos", "tts_eos")
        start, user, assistant, pad, bos, eos = (config[f"{name}_token_id"] for name in names)
        media = frozenset(thinker[f"{kind}_token_id"] for kind in ("audio", "image", "video"))
        answer_ends = frozenset({config["im_end_token_id"], *(ends if isinstance(ends, list) else [ends])})
        return cls(start, user, assistant, pad, bos, eos, media, answer_ends)


class Talker(CodecModel):
    """The description of the talker."""

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
        speech.check_talker_weights(model, config, _weight_names(talker))
        given = checkpoint.read_generation_config(model)
        self.sampling = {name: given.get(f"talker_{name}", value) for name, value in speech.DEFAULT_SAMPLING.items()}

    def codec_prefix(self, options: Mapping[str, Value]) -> Sequence[int]:
        """Returns the codes that precede the first audio frame.

        Raises InvalidRequestError (INVALID_OPTION) if the model does not have the speaker in `options`.
        """
        speaker = speech.choose_speaker(self._speakers, str(options.get("speaker", "")))
        talker = self._config
        think = [talker[f"codec_{name}_id"] for name in ("nothink", "think_bos", "think_eos")]
        return [*think, speaker, talker["codec_pad_id"], talker["codec_bos_id"]]


def talker_config(config: Any) -> Any:
    """Returns the configuration of the talker from the configuration of the whole model.

    vLLM calls the function as `hf_overrides`.
    """
    talker = speech.talker_section(config, architecture="Qwen3OmniTalker")
    if talker is None:
        return config
    talker.tts_pad_token_id = config.tts_pad_token_id
    return talker


def _weight_names(talker: Mapping[str, Any]) -> list[str]:
    """Returns the names of the talker's weights. `talker` is the talker's part of the config."""
    text = talker["text_config"]
    experts = text.get("num_experts", text.get("num_local_experts", 0))
    sparse = ["mlp.gate.weight", "mlp.shared_expert_gate.weight", *speech.mlp_weights("mlp.shared_expert")]
    sparse += [name for expert in range(experts) for name in speech.mlp_weights(f"mlp.experts.{expert}")]
    projections = [f"{part}_projection.linear_fc{layer}" for part in ("text", "hidden") for layer in (1, 2)]
    return [
        "codec_head.weight",
        "model.codec_embedding.weight",
        "model.norm.weight",
        *speech.decoder_weights("model", text["num_hidden_layers"], sparse),
        *speech.code_predictor_weights(talker),
        *speech.linear_weights(*projections),
    ]
