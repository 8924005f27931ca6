"""Parts of the descriptions and transforms of codec speech models: the talker's configuration, weights and input rows,
the choice of a speaker, and the frames that a vocoder decodes. Does not import torch.
"""

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from stagemesh.common.errors import InvalidRequestError
from stagemesh.common.wire.tensors import Array
from stagemesh.connectors.packets import Packet
from stagemesh.services.models import checkpoint

TALKER = "talker."
"""The prefix of the names of the talker's weights in a checkpoint."""
Properties = TypeVar("Properties")
Tokens: TypeAlias = npt.NDArray[np.int32]
DEFAULT_SAMPLING = {"temperature": 0.9, "top_k": 50, "top_p": 1.0, "repetition_penalty": 1.05, "max_new_tokens": 4096}
"""The values of a talker's sampling that its config does not have."""
_AXES = 3
_NO_SLOT, _NO_TEXT = -1, -1


def talker_section(config: Any, *, architecture: str) -> Any | None:
    """Returns the talker's part of an omni model's configuration, completed for vLLM. None if it has no such part.

    vLLM first passes a plain configuration, of which it needs only the model type.
    """
    talker = getattr(config, "talker_config", None)
    if talker is None or isinstance(talker, dict):
        return None
    talker.architectures = [architecture]
    talker.dtype = config.dtype
    talker.text_vocab_size = config.thinker_config.text_config.vocab_size
    return talker


def check_talker_weights(model: Path, config: Mapping[str, Any], names: Sequence[str]) -> None:
    """Raises NotReadyError (LOAD_FAILED) if the talker's weights in a checkpoint are not those in `names`.

    The weights of a quantized model have further names, which vLLM knows. They are not checked.
    """
    if "quantization_config" not in config:
        found = checkpoint.weight_names(model, TALKER)
        checkpoint.check_names({TALKER + name for name in names}, found, f"the talker in {model}")


def code_predictor_weights(talker: Mapping[str, Any]) -> list[str]:
    """Returns the names of the code predictor's weights. `talker` is the talker's part of a checkpoint's config."""
    layers = talker["code_predictor_config"]["num_hidden_layers"]
    names = ["code_predictor.model.norm.weight", *decoder_weights("code_predictor.model", layers, mlp_weights("mlp"))]
    for group in range(talker["num_code_groups"] - 1):
        names += [f"code_predictor.lm_head.{group}.weight", f"code_predictor.model.codec_embedding.{group}.weight"]
    return names


def decoder_weights(model: str, layers: int, mlp: Sequence[str]) -> list[str]:
    """Returns the names of the weights of a decoder's layers. `mlp` contains those of a layer's feed-forward part."""
    parts = [f"self_attn.{name}.weight" for name in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")]
    parts += ["input_layernorm.weight", "post_attention_layernorm.weight", *mlp]
    return [f"{model}.layers.{layer}.{part}" for layer in range(layers) for part in parts]


def mlp_weights(name: str) -> list[str]:
    """Returns the names of the weights of a feed-forward part with a gate."""
    return [f"{name}.{part}_proj.weight" for part in ("gate", "up", "down")]


def linear_weights(*names: str) -> list[str]:
    """Returns the names of the weights of linear layers with a bias."""
    return [f"{name}.{kind}" for name in names for kind in ("weight", "bias")]


def choose_speaker(speakers: Mapping[str, Properties], name: str) -> Properties:
    """Returns the properties of the speaker `name`, or of the first speaker if `name` is empty. Ignores case.

    Raises InvalidRequestError (INVALID_OPTION) if the model does not have the speaker.
    """
    known = {each.lower(): properties for each, properties in speakers.items()}
    chosen = name.lower() or next(iter(known))
    if chosen not in known:
        raise InvalidRequestError(
            f"the model has no speaker {name!r}; choose one of: {', '.join(sorted(known))}",
            reason="INVALID_OPTION",
            metadata={"option": "speaker"},
        )
    return known[chosen]


class TalkerRows:
    """Numbers the input rows of a talker with positions for M-RoPE, and writes them as packets.

    The codec prefix is added to the last rows of the prompt.
    """

    def __init__(self, *, codec_slots: int, media: Collection[int]) -> None:
        """`codec_slots` is the length of the codec prefix, and `media` the tokens that stand for media."""
        self._codec_slots, self._media = codec_slots, list(media)
        self.prompt_rows = 0
        """The number of rows of the prompt. Must be set before the first row is written."""
        self.next_position = 0
        """The position after the largest one so far."""
        self._next_row = 0

    def has_media(self, ids: Tokens) -> bool:
        return bool(np.isin(ids, self._media).any())

    def without_media(self, ids: Tokens) -> Tokens:
        """Returns the text tokens of rows: a row of an image, audio or video has none."""
        return np.where(np.isin(ids, self._media), np.int32(_NO_TEXT), ids)

    def write_text(self, text_ids: Tokens) -> Packet:
        """Returns rows of text at the next positions."""
        positions = self.next_position + np.arange(len(text_ids), dtype=np.int32)
        return self.write(text_ids, np.repeat(positions[:, None], _AXES, 1))

    def write(self, text_ids: Tokens, positions: Tokens, states: Array | None = None) -> Packet:
        """Returns the next rows. `positions` is int32[rows, 3], and `states` [rows, width]."""
        start, end = self._next_row, self._next_row + len(text_ids)
        self._next_row, self.next_position = end, max(self.next_position, int(positions.max()) + 1)
        slots = np.arange(start, end) - (self.prompt_rows - self._codec_slots)
        tensors: dict[str, Array] = {
            "text_ids": text_ids.astype(np.int32),
            "codec_slots": np.where((slots >= 0) & (slots < self._codec_slots), slots, _NO_SLOT).astype(np.int8),
            "positions": positions,
        }
        if states is not None:
            tensors["states"] = states
        return Packet(tensors, {"token_start": start, "prompt_tokens": self.prompt_rows})


class SpokenFrames:
    """A `Transform` that removes frames whose first code is not in the codebook, for example the end of the speech."""

    def __init__(self, *, codebook_size: int) -> None:
        self._codebook_size = codebook_size

    def push(self, packet: Packet) -> Sequence[Packet]:
        codes = packet.tensors["codes"].astype(np.int32, copy=False)
        kept = codes[:, 0] < self._codebook_size
        if kept.all():
            return [packet] if len(codes) else []
        return [Packet({"codes": codes[kept]}, packet.metadata)] if kept.any() else []

    def finish(self) -> Sequence[Packet]:
        return []
