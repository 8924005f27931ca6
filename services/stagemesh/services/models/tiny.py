"""Parts of tiny models: random weights that keep outputs varied, and a tokenizer with one token for each byte."""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from tokenizers import pre_tokenizers
from torch import nn
from transformers import Qwen2Tokenizer

PRINTABLE = [chr(byte) if byte > 0x20 else "Ġ" for byte in range(0x20, 0x7F)]
"""The tokens of the ASCII characters that can be printed."""


def draw_weights(model: nn.Module, *, seed: int) -> None:
    """Replaces each parameter of `model` by random numbers that keep activations near 1.

    The default initialization of transformers is so small that each position of a sequence gives the same output.
    Scales of norms are near 1, scales of residual branches near 0.5, offsets near 0. Attention is sharper, because
    the output would repeat itself otherwise. The same seed gives the same weights.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for path, weight in model.named_parameters():
            parent, _, name = path.rpartition(".")
            noise = torch.randn(weight.shape, generator=generator)
            if weight.ndim == 1:
                center = SHARPNESS if parent.endswith(".q_norm") else _CENTERS[name]
                weight.copy_(center + 0.1 * noise)
            else:
                weight.copy_(noise / math.sqrt(_fan_in(model.get_submodule(parent), weight)))


SHARPNESS = 3.0
_CENTERS = {"weight": 1.0, "bias": 0.0, "alpha": 0.0, "beta": 0.0, "gamma": 0.5, "scale": 0.5}


def _fan_in(module: nn.Module, weight: torch.Tensor) -> float:
    match module:
        case nn.Embedding():
            return 1
        case nn.ConvTranspose1d():
            return module.in_channels * module.kernel_size[0] / module.stride[0]
        case nn.Conv1d() | nn.Conv2d() | nn.Conv3d():
            return math.prod(weight.shape[1:])
        case _:
            return weight.shape[-1]


def byte_tokenizer(
    *, words: Sequence[str], special: Sequence[str], names: Mapping[str, str], chat_template: str
) -> Qwen2Tokenizer:
    """Makes a tokenizer of Qwen's class with a token for each byte, for each of `words`, and for each special token.

    `names` maps attributes of the tokenizer, such as `eos_token`, to special tokens.
    """
    merges = list(dict.fromkeys((word[:end], word[end]) for word in words for end in range(1, len(word))))
    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *(left + right for left, right in merges)]
    tokenizer = Qwen2Tokenizer(
        vocab={token: number for number, token in enumerate(tokens)},
        merges=merges,  # type: ignore[arg-type]  # annotated as strings, which it rejects
        extra_special_tokens=list(special),
        model_specific_special_tokens=dict(names),
    )
    tokenizer.chat_template = chat_template
    return tokenizer


def write_json(path: Path, content: Mapping[str, object]) -> None:
    """Writes a JSON file in the style of model folders."""
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
