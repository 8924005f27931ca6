"""A Qwen3-Omni of a few MB with random weights, for tests and demos.

It has every structural feature of the real model: a mixture-of-experts thinker with audio and vision encoder and
deepstack, a talker with shared expert and code predictor, and a code2wav with sliding window.
"""

from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig, Qwen2Tokenizer, Qwen3OmniMoeConfig, Qwen3OmniMoeForConditionalGeneration

from stagemesh.tiny_models.parts import PREPROCESSOR, ROLES, byte_tokenizer, draw_weights, limit_text, write_json

CODEBOOK = 64
CODE_GROUPS = 4
LOUDNESS = 0.02
"""Scale of the last convolution, so that the waveform is not clipped at -1 and 1."""
_NAMED_TOKENS = {
    "eos_token": "<|im_end|>",
    "image_token": "<|image_pad|>",
    "audio_token": "<|audio_pad|>",
    "video_token": "<|video_pad|>",
    "vision_bos_token": "<|vision_start|>",
    "vision_eos_token": "<|vision_end|>",
    "audio_bos_token": "<|audio_start|>",
    "audio_eos_token": "<|audio_end|>",
}
_SPECIAL_TOKENS = ("<|im_start|>", "<tts_pad>", "<tts_text_bos>", "<tts_text_eod>", "<tts_text_bos_single>")


def write(folder: Path, *, seed: int = 0) -> None:
    """Writes the config, the weights (float32), the tokenizer and the processors into `folder`."""
    tokenizer = byte_tokenizer(words=ROLES, special=_SPECIAL_TOKENS, names=_NAMED_TOKENS)
    model = Qwen3OmniMoeForConditionalGeneration(_config(tokenizer))
    draw_weights(model, seed=seed)
    _shape_outputs(model, tokenizer)
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    model.generation_config = GenerationConfig(**ends)  # type: ignore[no-untyped-call]
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    write_json(
        folder / "preprocessor_config.json",
        PREPROCESSOR | {"processor_class": "Qwen3OmniMoeProcessor", "patch_size": 16},
    )


def _shape_outputs(model: Qwen3OmniMoeForConditionalGeneration, tokenizer: Qwen2Tokenizer) -> None:
    """Makes text readable (nearly all tokens are printable, or end the turn) and audio as loud as speech."""
    limit_text(model.get_parameter("thinker.lm_head.weight"), tokenizer)
    with torch.no_grad():
        model.get_parameter(f"code2wav.decoder.{len(_UPSAMPLE_RATES) + 2}.conv.weight").mul_(LOUDNESS)


_THINKER_WIDTH = 128
_ATTENTION = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 4096,
}
_EXPERTS = {"moe_intermediate_size": 64, "num_experts": 4, "num_experts_per_tok": 2}
_ROPE = {"rope_type": "default", "rope_theta": 1e6}
_MROPE = {**_ROPE, "interleaved": True, "mrope_interleaved": True, "mrope_section": [6, 5, 5]}


def _config(tokenizer: Qwen2Tokenizer) -> Qwen3OmniMoeConfig:
    token = tokenizer.get_vocab().__getitem__
    media = {
        "audio_token_id": token("<|audio_pad|>"),
        "image_token_id": token("<|image_pad|>"),
        "video_token_id": token("<|video_pad|>"),
        "audio_start_token_id": token("<|audio_start|>"),
        "audio_end_token_id": token("<|audio_end|>"),
        "vision_start_token_id": token("<|vision_start|>"),
        "vision_end_token_id": token("<|vision_end|>"),
        "position_id_per_seconds": 13,
        "seconds_per_chunk": 2,
    }
    # The table is larger than the tokenizer, as in the real model.
    thinker = {**media, "user_token_id": token("user"), **_thinker(-(-len(tokenizer) // 64) * 64)}
    settings: dict[str, Any] = {
        "dtype": "float32",
        "thinker_config": thinker,
        "talker_config": {**media, **_talker()},
        "code2wav_config": _CODE2WAV,
        "im_start_token_id": token("<|im_start|>"),
        "im_end_token_id": token("<|im_end|>"),
        "tts_pad_token_id": token("<tts_pad>"),
        "tts_bos_token_id": token("<tts_text_bos>"),
        "tts_eos_token_id": token("<tts_text_eod>"),
        **{f"{role}_token_id": token(role) for role in ROLES},
    }
    return Qwen3OmniMoeConfig(**settings)


def _thinker(vocabulary: int) -> dict[str, Any]:
    """Some fields are unknown to transformers. Real checkpoints have them, and vLLM reads them."""
    return {
        "text_config": {
            **_ATTENTION,
            **_EXPERTS,
            "hidden_size": _THINKER_WIDTH,
            "vocab_size": vocabulary,
            "num_hidden_layers": 4,
            "rope_parameters": _MROPE,
            "norm_topk_prob": True,
            "tie_word_embeddings": False,
        },
        "audio_config": {
            "d_model": 64,
            "encoder_layers": 2,
            "encoder_attention_heads": 2,
            "encoder_ffn_dim": 128,
            "downsample_hidden_size": 16,
            "output_dim": _THINKER_WIDTH,
            "n_window": 50,
            "n_window_infer": 200,
        },
        "vision_config": {
            "depth": 4,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_heads": 2,
            "out_hidden_size": _THINKER_WIDTH,
            "image_size": 256,
            "apply_vit_abs_pos_embed": True,
            "num_position_embeddings": 256,
            "deepstack_visual_indexes": [1, 2],
        },
    }


def _talker() -> dict[str, Any]:
    """Codec ids above the codebook are special, as in the real model, whose `generate` suppresses the last 1024."""
    return {
        "text_config": {
            **_ATTENTION,
            **_EXPERTS,
            "shared_expert_intermediate_size": 64,
            "vocab_size": CODEBOOK + 1024,
            "num_hidden_layers": 2,
            "rope_parameters": _MROPE,
            "norm_topk_prob": True,
        },
        "code_predictor_config": {
            **_ATTENTION,
            "vocab_size": CODEBOOK,
            "num_hidden_layers": 2,
            "num_code_groups": CODE_GROUPS,
            "rope_parameters": _ROPE,
        },
        "num_code_groups": CODE_GROUPS,
        "thinker_hidden_size": _THINKER_WIDTH,
        "accept_hidden_layer": 3,
        "spatial_merge_size": 2,
        "codec_pad_id": CODEBOOK + 100,
        "codec_bos_id": CODEBOOK + 101,
        "codec_eos_token_id": CODEBOOK + 102,
        "codec_nothink_id": CODEBOOK + 107,
        "codec_think_bos_id": CODEBOOK + 108,
        "codec_think_eos_id": CODEBOOK + 109,
        "speaker_id": {"chelsie": CODEBOOK + 253, "ethan": CODEBOOK + 254, "aiden": CODEBOOK + 255},
    }


_UPSAMPLE_RATES = [4, 3]
_CODE2WAV = {
    "codebook_size": CODEBOOK,
    "num_quantizers": CODE_GROUPS,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "sliding_window": 8,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    "decoder_dim": 64,
    "upsampling_ratios": [2, 2],
    "upsample_rates": _UPSAMPLE_RATES,
}
