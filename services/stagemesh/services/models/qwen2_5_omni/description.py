"""The facts about a Qwen2.5-Omni checkpoint that the talker's stage and the transforms need, including its speakers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import numpy as np
import torch
from torch import Tensor

from stagemesh.common.wire.tensors import Value
from stagemesh.services.models import checkpoint
from stagemesh.services.models.checkpoint import load_error
from stagemesh.services.models.codec_speech.description import Tokens, choose_speaker, talker_section
from stagemesh.services.models.qwen2_5_omni import MODEL_TYPE

SPEAKERS_FILE = "spk_dict.pt"


@dataclass(frozen=True)
class Speaker:
    """The properties of a speaker."""

    begin_token: int
    """The text token before the answer, which selects the speaker in the talker."""
    vector: Tensor
    """Represents the voice, float32[size]."""
    reference: Tensor
    """A mel spectrogram of the voice, float32[frames, mel size]."""


def load_speakers(folder: Path) -> dict[str, Speaker]:
    """Returns the speakers in the checkpoint's spk_dict.pt by name.

    Reads only tensors and plain values from the file, no other objects. Raises NotReadyError (LOAD_FAILED) if the file
    is missing or has other content.
    """
    try:
        content: Any = torch.load(folder / SPEAKERS_FILE, map_location="cpu", weights_only=True)
        speakers = {str(name): _read_speaker(entry) for name, entry in content.items()}
    except OSError as exc:
        raise load_error(folder, f"its {SPEAKERS_FILE} cannot be read: {exc.strerror or exc}") from exc
    except (UnpicklingError, RuntimeError, EOFError, AttributeError, LookupError, TypeError, ValueError) as exc:
        raise load_error(folder, f"its {SPEAKERS_FILE} does not contain speakers ({exc}); copy it again") from exc
    if not speakers:
        raise load_error(folder, f"its {SPEAKERS_FILE} contains no speakers")
    return speakers


def _read_speaker(entry: Any) -> Speaker:
    reference: Tensor = entry["ref_mel"].float()
    return Speaker(int(entry["bos_token"]), entry["cond"].float().flatten(), reference.flatten(0, -2))


_SAMPLING = {"temperature": 0.9, "top_k": 40, "top_p": 0.8, "repetition_penalty": 1.05, "max_new_tokens": 4096}


read_config = partial(checkpoint.read_config, model_type=MODEL_TYPE)
"""Returns the config in the folder of a Qwen2.5-Omni checkpoint.

Raises NotReadyError (LOAD_FAILED) if the folder has no readable config of a Qwen2.5-Omni model."""


@dataclass(frozen=True)
class TextTokens:
    """The ids of special tokens in the thinker's vocabulary."""

    begin: int
    """Represents the token that begins the answer. The talker replaces it by the token of the speaker."""
    end: int
    media: frozenset[int]
    """The placeholders of audio, images and video."""

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> "TextTokens":
        """Returns the ids in a checkpoint's config."""
        thinker, talker = config["thinker_config"], config["talker_config"]
        media = frozenset(thinker[f"{kind}_token_index"] for kind in ("audio", "image", "video"))
        return cls(talker["tts_text_start_token_id"], talker["tts_text_end_token_id"], media)


class Talker:
    """The description of the talker: a `CodecModel` of the vllm engine."""

    groups = 1

    def __init__(self, model: Path) -> None:
        config = read_config(model)
        talker: Mapping[str, Any] = config["talker_config"]
        self._prefix = [talker["tts_codec_pad_token_id"], talker["tts_codec_start_token_id"]]
        self._begin = TextTokens.of(config).begin
        self._speakers = {name: speaker.begin_token for name, speaker in load_speakers(model).items()}
        self.end_code: int = talker["tts_codec_end_token_id"]
        self.state_width: int = talker["embedding_size"]
        self.text_vocabulary: int = config["thinker_config"]["text_config"]["vocab_size"]
        self.hf_overrides = talker_config
        self.sampling = _SAMPLING

    def codec_prefix(self, options: Mapping[str, Value]) -> Sequence[int]:  # noqa: ARG002  # the same for all speakers
        """Returns the codes that precede the first audio frame."""
        return self._prefix

    def choose_texts(self, text_ids: Tokens, options: Mapping[str, Value]) -> Tokens:
        """Returns the text tokens of rows, in which the token of the speaker replaces the one that begins an answer.

        Raises InvalidRequestError (INVALID_OPTION) if the model does not have the speaker in `options`.
        """
        token = choose_speaker(self._speakers, str(options.get("speaker", "")))
        return np.where(text_ids == self._begin, np.int32(token), text_ids)


def talker_config(config: Any) -> Any:
    """Returns the configuration of the talker from the configuration of the whole model.

    vLLM calls the function as `hf_overrides`.
    """
    talker = talker_section(config, architecture="Qwen2_5OmniTalker")
    if talker is None:
        return config
    # vLLM's decoder has biases of queries, keys and values only if the configuration says so.
    talker.qkv_bias = True
    return talker
