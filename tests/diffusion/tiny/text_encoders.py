"""Text encoders of the real classes with random weights, for the tiny tokenizers."""

from typing import Any

import transformers

from tests.diffusion.tiny.tokenizers import QWEN_SPECIAL

HIDDEN = 64
"""Hidden size of all text encoders except CLIP."""
CLIP_HIDDEN = 32
_HEAD = 32
_LAYERS = 2


def qwen_vl(tokenizer: transformers.Qwen2Tokenizer) -> transformers.Qwen2_5_VLForConditionalGeneration:
    """Text encoder of Qwen-Image, a vision-language model."""
    rope = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [4, 6, 6]}
    vision = {
        "depth": 1,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_heads": 1,
        "out_hidden_size": HIDDEN,
        "fullatt_block_indexes": [0],
    }
    ids = QWEN_SPECIAL.index
    config = transformers.Qwen2_5_VLConfig(
        text_config={**_decoder(tokenizer), "rope_parameters": rope},
        vision_config=vision,
        image_token_id=ids("<|image_pad|>"),
        video_token_id=ids("<|video_pad|>"),
        vision_start_token_id=ids("<|vision_start|>"),
        vision_end_token_id=ids("<|vision_end|>"),
        tie_word_embeddings=True,
    )
    return transformers.Qwen2_5_VLForConditionalGeneration(config)  # type: ignore[no-untyped-call]


def qwen3(tokenizer: transformers.Qwen2Tokenizer) -> transformers.Qwen3Model:
    """Text encoder of Z-Image."""
    return transformers.Qwen3Model(
        transformers.Qwen3Config(**_decoder(tokenizer), head_dim=_HEAD, tie_word_embeddings=True)
    )


def clip(tokenizer: transformers.CLIPTokenizer) -> transformers.CLIPTextModel:
    """Text encoder of Flux whose pooled output is used."""
    return transformers.CLIPTextModel(_clip_config(tokenizer))


def clip_with_projection(tokenizer: transformers.CLIPTokenizer) -> transformers.CLIPTextModelWithProjection:
    """Each of the two CLIP text encoders of Stable Diffusion 3."""
    return transformers.CLIPTextModelWithProjection(_clip_config(tokenizer))


def t5(tokenizer: transformers.T5Tokenizer) -> transformers.T5EncoderModel:
    """T5 text encoder of Flux and Stable Diffusion 3."""
    return transformers.T5EncoderModel(transformers.T5Config(**_t5_sizes(tokenizer)))


def umt5(tokenizer: transformers.T5Tokenizer) -> transformers.UMT5EncoderModel:
    """Text encoder of Wan."""
    return transformers.UMT5EncoderModel(transformers.UMT5Config(**_t5_sizes(tokenizer)))  # type: ignore[no-untyped-call]


def _decoder(tokenizer: transformers.Qwen2Tokenizer) -> dict[str, Any]:
    return {
        "vocab_size": len(tokenizer),
        "hidden_size": HIDDEN,
        "intermediate_size": 2 * HIDDEN,
        "num_hidden_layers": _LAYERS,
        "num_attention_heads": HIDDEN // _HEAD,
        "num_key_value_heads": 1,
        "max_position_embeddings": 2048,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "pad_token_id": 0,
    }


def _clip_config(tokenizer: transformers.CLIPTokenizer) -> transformers.CLIPTextConfig:
    return transformers.CLIPTextConfig(
        vocab_size=len(tokenizer),
        hidden_size=CLIP_HIDDEN,
        intermediate_size=2 * CLIP_HIDDEN,
        projection_dim=CLIP_HIDDEN,
        num_hidden_layers=_LAYERS,
        num_attention_heads=1,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )


def _t5_sizes(tokenizer: transformers.T5Tokenizer) -> dict[str, Any]:
    return {
        "vocab_size": len(tokenizer),
        "d_model": HIDDEN,
        "d_kv": _HEAD,
        "d_ff": 2 * HIDDEN,
        "num_layers": _LAYERS,
        "num_heads": HIDDEN // _HEAD,
        "feed_forward_proj": "gated-gelu",
    }
