"""The untrained pipeline: diffusers' own Qwen-Image classes, at a ten-thousandth of Qwen-Image's size."""

import re
from collections.abc import Iterable
from typing import Any, TypeAlias

import torch
import transformers
from diffusers.models.autoencoders.autoencoder_kl_qwenimage import AutoencoderKLQwenImage
from diffusers.models.transformers.transformer_qwenimage import QwenImageTransformer2DModel
from diffusers.modular_pipelines.qwenimage.prompt_templates import QWENIMAGE_PROMPT_TEMPLATE
from diffusers.pipelines.qwenimage.pipeline_qwenimage import QwenImagePipeline
from diffusers.schedulers.scheduling_flow_match_euler_discrete import FlowMatchEulerDiscreteScheduler
from tokenizers import pre_tokenizers
from transformers import Qwen2_5_VLConfig, Qwen2Tokenizer

# diffusers and transformers annotate their classes only in part.
Autoencoder: TypeAlias = Any
Pipeline: TypeAlias = Any
TextEncoder: TypeAlias = Any
Scheduler: TypeAlias = Any
Transformer: TypeAlias = Any

_LATENT_CHANNELS = 16
_TEXT_WIDTH = 64
_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>")


def blank_pipeline(prompts: Iterable[str], *, seed: int) -> Pipeline:
    """Returns a pipeline with random weights, whose tokenizer has each word of the prompts as one token.

    The random text encoder needs no training: it distinguishes words and positions, and the transformer learns to
    interpret it.
    """
    torch.manual_seed(seed)
    tokenizer = _tokenizer(prompts)
    return QwenImagePipeline(
        scheduler=_scheduler(),
        vae=AutoencoderKLQwenImage(base_dim=8, z_dim=_LATENT_CHANNELS),
        text_encoder=_text_encoder(tokenizer),
        tokenizer=tokenizer,
        transformer=_transformer(),
    )


def _tokenizer(prompts: Iterable[str]) -> Qwen2Tokenizer:
    """Returns a byte-level tokenizer, so that any text has tokens. Words are merged from the left: s+e, se+v, sev+e."""
    split = Qwen2Tokenizer().backend_tokenizer.pre_tokenizer
    assert split is not None
    # The pipeline drops the embeddings of the template's first 34 tokens. As in Qwen's tokenizer, each of the
    # template's words must therefore be one token.
    texts = [*re.split(r"<\|\w+\|>", QWENIMAGE_PROMPT_TEMPLATE.format("")), *prompts]
    words = dict.fromkeys(word for text in texts for word, _ in split.pre_tokenize_str(text))
    merges = list(dict.fromkeys((word[:end], word[end]) for word in words for end in range(1, len(word))))
    pieces = [*_SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet()), *(left + right for left, right in merges)]
    vocabulary: Any = {token: number for number, token in enumerate(dict.fromkeys(pieces))}
    as_given: Any = merges
    return Qwen2Tokenizer(vocabulary, as_given, extra_special_tokens=list(_SPECIAL[1:]))


def _text_encoder(tokenizer: Qwen2Tokenizer) -> TextEncoder:
    token: Any = {name: tokenizer.convert_tokens_to_ids(name) for name in _SPECIAL}
    config = Qwen2_5_VLConfig(
        text_config={
            "vocab_size": len(tokenizer),
            "hidden_size": _TEXT_WIDTH,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "max_position_embeddings": 2048,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [4, 6, 6]},
            "bos_token_id": None,
            "eos_token_id": token["<|im_end|>"],
            "pad_token_id": token["<|endoftext|>"],
        },
        vision_config={
            "depth": 1,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_heads": 2,
            "out_hidden_size": _TEXT_WIDTH,
            "fullatt_block_indexes": [0],
        },
        image_token_id=token["<|image_pad|>"],
        video_token_id=token["<|image_pad|>"],
        vision_start_token_id=token["<|vision_start|>"],
        vision_end_token_id=token["<|vision_end|>"],
        tie_word_embeddings=True,
    )
    make: Any = transformers.Qwen2_5_VLForConditionalGeneration
    return make(config).eval()


def _transformer() -> Transformer:
    return QwenImageTransformer2DModel(
        patch_size=2,
        in_channels=_LATENT_CHANNELS * 4,
        out_channels=_LATENT_CHANNELS,
        num_layers=3,
        num_attention_heads=2,
        attention_head_dim=32,
        joint_attention_dim=_TEXT_WIDTH,
        axes_dims_rope=(8, 12, 12),
    )


def _scheduler() -> Scheduler:
    """Returns a scheduler with the settings of Qwen-Image."""
    return FlowMatchEulerDiscreteScheduler(
        use_dynamic_shifting=True,
        base_shift=0.5,
        max_shift=0.9,
        base_image_seq_len=256,
        max_image_seq_len=8192,
        shift_terminal=0.02,
    )
