"""Parts of tiny models: random weights that keep outputs varied, and a tokenizer with one token for each byte."""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from string import Template

import torch
from tokenizers import pre_tokenizers
from torch import nn
from transformers import Qwen2Tokenizer

PRINTABLE = [chr(byte) if byte > 0x20 else "Ġ" for byte in range(0x20, 0x7F)]
"""The tokens of the ASCII characters that can be printed."""
CONFIDENCE = 4.0
"""Scale of the logits of allowed tokens. Others have the logit 0, so that sampling chooses them rarely."""
ENDING = 0.85
"""Scale of the logit of the last token of a turn, so that few texts end at once."""
ROLES = ("system", "user", "assistant")
# vLLM gives a template the parts of a message only if the template has a plain loop over `message.content`.
_CHAT_TEMPLATE = """
{%- if tools %}
    {{- '<|im_start|>system\\n' + (tools | tojson) + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.content is string %}
        {{- message.content }}
    {%- elif message.content %}
        {%- for part in message.content %}
            {%- if part.type == 'image' or 'image' in part or 'image_url' in part %}
                {{- '$vision_bos_token$image_token$vision_eos_token' }}
            {%- elif part.type == 'audio' or 'audio' in part or 'audio_url' in part %}
                {{- '$audio_bos_token$audio_token$audio_eos_token' }}
            {%- elif part.type == 'video' or 'video' in part %}
                {{- '$vision_bos_token$video_token$vision_eos_token' }}
            {%- elif 'text' in part %}
                {{- part.text }}
            {%- endif %}
        {%- endfor %}
    {%- endif %}
    {%- for call in message.tool_calls or [] %}
        {{- '<tool_call>' + (call.function | tojson) + '</tool_call>' }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
""".strip()
PREPROCESSOR = {
    "feature_extractor_type": "WhisperFeatureExtractor",
    "feature_size": 128,
    "sampling_rate": 16000,
    "hop_length": 160,
    "n_fft": 400,
    "n_samples": 4800000,
    "nb_max_frames": 30000,
    "dither": 0.0,
    "padding_side": "right",
    "padding_value": 0.0,
    "return_attention_mask": True,
    "image_processor_type": "Qwen2VLImageProcessor",
    "video_processor_type": "Qwen2VLVideoProcessor",
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "min_pixels": 3136,
    "max_pixels": 12845056,
    "merge_size": 2,
    "temporal_patch_size": 2,
}
"""The settings of the processors of audio and images that the models have in common."""


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


def byte_tokenizer(*, words: Sequence[str], special: Sequence[str], names: Mapping[str, str]) -> Qwen2Tokenizer:
    """Makes a tokenizer of Qwen's class with a token for each byte, for each of `words`, and for each special token.

    `names` maps attributes of the tokenizer, such as `eos_token`, to special tokens. The chat template puts the tokens
    of media between those of their begin and end.
    """
    merges = list(dict.fromkeys((word[:end], word[end]) for word in words for end in range(1, len(word))))
    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *(left + right for left, right in merges)]
    tokenizer = Qwen2Tokenizer(
        vocab={token: number for number, token in enumerate(tokens)},
        merges=merges,  # type: ignore[arg-type]  # annotated as strings, which it rejects
        extra_special_tokens=list(special),
        model_specific_special_tokens=dict(names),
    )
    tokenizer.chat_template = Template(_CHAT_TEMPLATE).substitute(names)
    return tokenizer


def limit_text(head: torch.Tensor, tokenizer: Qwen2Tokenizer) -> None:
    """Changes the weights of a language model's head so that nearly all tokens are printable, or end the turn."""
    vocabulary = tokenizer.get_vocab()
    end = vocabulary[str(tokenizer.eos_token)]
    allowed = [*(vocabulary[token] for token in PRINTABLE), end]
    with torch.no_grad():
        rows = CONFIDENCE * head[allowed]
        head.zero_()
        head[allowed] = rows
        head[end] *= ENDING


def write_json(path: Path, content: Mapping[str, object]) -> None:
    """Writes a JSON file in the style of model folders."""
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
