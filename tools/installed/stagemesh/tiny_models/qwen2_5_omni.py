"""A Qwen2.5-Omni of a few MB with random weights, for tests and demos.

It has every structural feature of the real model: a thinker with audio and vision encoder, a talker with other ids for
padding and end, speakers, and a token2wav of diffusion transformer and BigVGAN.
"""

from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig, Qwen2_5OmniConfig, Qwen2_5OmniForConditionalGeneration, Qwen2Tokenizer

from stagemesh.tiny_models.parts import (
    CONFIDENCE,
    PREPROCESSOR,
    ROLES,
    byte_tokenizer,
    draw_weights,
    limit_text,
    write_json,
)

CODEBOOK = 64
CODEC_PAD, CODEC_BOS, CODEC_EOS, CODEC_MASK = (CODEBOOK + offset for offset in (100, 101, 102, 104))
SPEAKERS = ("Chelsie", "Ethan")
LOUDNESS = 0.03
"""Scale of the last convolution, so that the waveform is not clipped at -1 and 1."""
SHARPNESS = 3.0
"""Scale of the queries of thinker and talker, whose outputs would repeat themselves otherwise."""
CODEC_ENDING = 0.7
"""Scale of the logit of the code that ends the speech, so that few answers end at once."""
_NAMED_TOKENS = {
    "eos_token": "<|im_end|>",
    "image_token": "<|IMAGE|>",
    "audio_token": "<|AUDIO|>",
    "video_token": "<|VIDEO|>",
    "vision_bos_token": "<|vision_bos|>",
    "vision_eos_token": "<|vision_eos|>",
    "audio_bos_token": "<|audio_bos|>",
    "audio_eos_token": "<|audio_eos|>",
}
_SPEECH_TOKENS = ("<tts_pad>", "<tts_text_bos>", "<tts_text_eod>", "<tts_text_bos_single>")


def write(folder: Path, *, seed: int = 0) -> None:
    """Writes the config, the weights (float32), the speakers, the tokenizer and the processors into `folder`."""
    tokenizer = byte_tokenizer(words=ROLES, special=("<|im_start|>", *_SPEECH_TOKENS), names=_NAMED_TOKENS)
    model = Qwen2_5OmniForConditionalGeneration(_config(tokenizer))  # type: ignore[no-untyped-call]
    draw_weights(model, seed=seed)
    _shape_outputs(model, tokenizer)
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    model.generation_config = GenerationConfig(**ends)  # type: ignore[no-untyped-call]
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    write_json(
        folder / "preprocessor_config.json",
        PREPROCESSOR | {"processor_class": "Qwen2_5OmniProcessor", "patch_size": 14},
    )
    torch.save(_speakers(tokenizer, seed=seed), folder / "spk_dict.pt")


def _shape_outputs(model: Qwen2_5OmniForConditionalGeneration, tokenizer: Qwen2Tokenizer) -> None:
    """Makes text readable and audio as loud as speech. Nearly all codes are in the codebook, or end the speech."""
    limit_text(model.get_parameter("thinker.lm_head.weight"), tokenizer)
    with torch.no_grad():
        head = model.get_parameter("talker.codec_head.weight").mul_(CONFIDENCE)
        end = CODEC_ENDING * head[CODEC_EOS]
        head[CODEBOOK:] = 0
        head[CODEC_EOS] = end
        for name, weight in model.named_parameters():
            if name.endswith("q_proj.weight"):
                weight.mul_(SHARPNESS)
        model.get_parameter("token2wav.code2wav_bigvgan_model.conv_post.weight").mul_(LOUDNESS)


def _speakers(tokenizer: Qwen2Tokenizer, *, seed: int) -> dict[str, dict[str, Any]]:
    """Makes the content of spk_dict.pt: each speaker's begin token, conditioning vector and reference."""
    generator, tokens = torch.Generator().manual_seed(seed), ("<tts_text_bos>", "<tts_text_bos_single>")
    return {
        name: {
            "bos_token": tokenizer.get_vocab()[token],
            "cond": torch.randn(1, _VOICE_SIZE, generator=generator),
            "ref_mel": torch.randn(1, 30, _MEL_SIZE, generator=generator),
        }
        for name, token in zip(SPEAKERS, tokens, strict=True)
    }


_THINKER_WIDTH = 128
_DECODER = {
    "hidden_size": _THINKER_WIDTH,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "use_sliding_window": False,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [6, 5, 5]},
}


def _config(tokenizer: Qwen2Tokenizer) -> Qwen2_5OmniConfig:
    token = tokenizer.get_vocab().__getitem__
    media = {
        "audio_token_index": token("<|AUDIO|>"),
        "image_token_index": token("<|IMAGE|>"),
        "video_token_index": token("<|VIDEO|>"),
        "audio_start_token_id": token("<|audio_bos|>"),
        "audio_end_token_id": token("<|audio_eos|>"),
        "vision_start_token_id": token("<|vision_bos|>"),
        "vision_end_token_id": token("<|vision_eos|>"),
        "position_id_per_seconds": 25,
        "seconds_per_chunk": 2,
    }
    speech = {
        "tts_text_pad_token_id": token("<tts_pad>"),
        "tts_text_start_token_id": token("<tts_text_bos>"),
        "tts_text_end_token_id": token("<tts_text_eod>"),
    }
    # The table is larger than the tokenizer, as in the real model.
    thinker = {**media, "user_token_id": token("user"), **_thinker(-(-len(tokenizer) // 64) * 64)}
    settings: dict[str, Any] = {
        "dtype": "float32",
        "thinker_config": thinker,
        "talker_config": {**media, **speech, **_TALKER},
        "token2wav_config": {"dit_config": _DIT, "bigvgan_config": _BIGVGAN},
    }
    return Qwen2_5OmniConfig(**settings)


def _thinker(vocabulary: int) -> dict[str, Any]:
    return {
        "text_config": {**_DECODER, "vocab_size": vocabulary, "num_hidden_layers": 3, "tie_word_embeddings": False},
        "audio_config": {
            "d_model": 64,
            "encoder_layers": 2,
            "encoder_attention_heads": 2,
            "encoder_ffn_dim": 128,
            "output_dim": _THINKER_WIDTH,
        },
        "vision_config": {
            "depth": 4,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_heads": 2,
            "out_hidden_size": _THINKER_WIDTH,
            "fullatt_block_indexes": [1, 3],
        },
        "tie_word_embeddings": False,
    }


_TALKER = {
    **_DECODER,
    "embedding_size": _THINKER_WIDTH,
    "hidden_size": 64,
    "head_dim": 32,
    "num_hidden_layers": 2,
    "vocab_size": CODEBOOK + 256,
    "tts_codec_pad_token_id": CODEC_PAD,
    "tts_codec_start_token_id": CODEC_BOS,
    "tts_codec_end_token_id": CODEC_EOS,
    "tts_codec_mask_token_id": CODEC_MASK,
    "spatial_merge_size": 2,
}
_VOICE_SIZE, _MEL_SIZE = 24, 16
_DIT = {
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "head_dim": 32,
    "emb_dim": 32,
    "block_size": 8,
    "look_ahead_layers": [1],
    "look_backward_layers": [0, 3],
    "repeats": 2,
    "num_embeds": CODEBOOK + 1,
    "mel_dim": _MEL_SIZE,
    "dropout": 0.0,
    "enc_emb_dim": _VOICE_SIZE,
    "enc_dim": 16,
    "enc_channels": [32, 32, 32, 64],
    "enc_kernel_sizes": [5, 3, 3, 1],
    "enc_dilations": [1, 2, 3, 1],
    "enc_attention_channels": 16,
    "enc_res2net_scale": 2,
    "enc_se_channels": 16,
}
_BIGVGAN = {
    "mel_dim": _MEL_SIZE,
    "upsample_initial_channel": 32,
    "upsample_rates": [4, 3],
    "upsample_kernel_sizes": [8, 7],
    "resblock_kernel_sizes": [3, 5],
    "resblock_dilation_sizes": [[1, 3, 5], [1, 3, 5]],
}
