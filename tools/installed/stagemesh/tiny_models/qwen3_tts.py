"""A Qwen3-TTS of a few MB with random weights, for tests and demos.

It has every structural feature of the real model: a talker with text projection and code predictor, and a folder
`speech_tokenizer` with the encoder and the decoder of a codec of 12.5 frames per second. There are two kinds. The
kind with voices by name has a code predictor of another width than the talker. The kind that clones voices has a
speaker encoder.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file  # pyright: ignore[reportUnknownVariableType]
from torch import Tensor, nn
from transformers import Qwen2Tokenizer, Qwen3Config, Qwen3Model
from transformers.models.qwen3_omni_moe.configuration_qwen3_omni_moe import Qwen3OmniMoeCode2WavConfig
from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import (
    Qwen3OmniMoeCode2Wav,
    Qwen3OmniMoeCode2WavTransformerModel,
)

from stagemesh.services.models.qwen3_tts import CODEC_FOLDER, voice_encoders
from stagemesh.tiny_models.parts import CONFIDENCE, ROLES, byte_tokenizer, draw_weights, write_json

CODEBOOK = 64
CODE_GROUPS = 4
SPEAKERS = {"serena": CODEBOOK + 1018, "ryan": CODEBOOK + 1013, "eric": CODEBOOK + 827, "dylan": CODEBOOK + 830}
LANGUAGES = {
    "english": CODEBOOK + 2,
    "german": CODEBOOK + 5,
    "chinese": CODEBOOK + 7,
    "sichuan_dialect": CODEBOOK + 14,
    "beijing_dialect": CODEBOOK + 26,
}
DIALECTS = {"serena": False, "ryan": False, "eric": "sichuan_dialect", "dylan": "beijing_dialect"}
CODEC_EOS = CODEBOOK + 102
CODEC_ENDING = 0.8
"""Scale of the logit of the code that ends the speech, so that few requests end at once."""
LOUDNESS = 0.05
"""Scale of the last convolution, so that the waveform is not clipped at -1 and 1."""
_RESIDUE = 0.1
"""Scale of the residual branches of the codec's decoder, so that rounding errors stay small."""
_SENSITIVITY = {
    "encoder.encoder.layers.0.conv.weight": 16.0,
    "encoder.quantizer.semantic_residual_vector_quantizer.input_proj.weight": 3.0,
    "encoder.quantizer.acoustic_residual_vector_quantizer.input_proj.weight": 3.0,
}
"""Scales of weights of the codec's encoder, whose codes would hardly depend on the audio otherwise."""
_VOICE = 0.3
"""Scale of the speaker encoder's last weights. The talker adds its vector to embeddings with the deviation 1."""
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
_SPECIAL_TOKENS = ("<|im_start|>", "<tts_pad>", "<tts_text_bos>", "<tts_text_eod>")


def write_custom_voice(folder: Path, *, seed: int = 0) -> None:
    """Writes a checkpoint with voices by name into `folder`: config, float32 weights, tokenizer and codec."""
    talker = _talker_config(predictor_width=48) | {"spk_id": SPEAKERS, "spk_is_dialect": DIALECTS}
    _write(folder, {"tts_model_size": "1b7", "tts_model_type": "custom_voice"}, talker, seed=seed)


def write_base(folder: Path, *, seed: int = 0) -> None:
    """Writes a checkpoint that clones voices into `folder`: config, float32 weights, tokenizer and codec."""
    talker = _talker_config(predictor_width=_TALKER_WIDTH)
    kind = {"tts_model_size": "0b6", "tts_model_type": "base", "speaker_encoder_config": _SPEAKER_ENCODER}
    _write(folder, kind, talker, seed=seed)


def _write(folder: Path, kind: Mapping[str, Any], talker: Mapping[str, Any], *, seed: int) -> None:
    (folder / CODEC_FOLDER).mkdir(parents=True, exist_ok=True)
    tokenizer = byte_tokenizer(words=ROLES, special=_SPECIAL_TOKENS, names=_NAMED_TOKENS)
    # The table is larger than the tokenizer, as in the real model.
    talker = {**talker, "text_vocab_size": -(-len(tokenizer) // 64) * 64}
    model = nn.ModuleDict({"talker": _make_talker(talker)})
    if "speaker_encoder_config" in kind:
        settings = voice_encoders.SpeakerEncoderConfig(**_SPEAKER_ENCODER)
        model["speaker_encoder"] = voice_encoders.make_network(settings)
    draw_weights(model, seed=seed)
    _shape_outputs(model)
    write_json(folder / "config.json", {**_ids(tokenizer), **kind, "talker_config": talker})
    write_json(folder / "generation_config.json", _GENERATION)
    write_json(folder / "preprocessor_config.json", {"processor_class": "Qwen3TTSProcessor", "padding_side": "left"})
    _save(model.state_dict(), folder)
    tokenizer.save_pretrained(folder)
    _write_codec(folder / CODEC_FOLDER, seed=seed)


def _ids(tokenizer: Qwen2Tokenizer) -> dict[str, Any]:
    token = tokenizer.get_vocab().__getitem__
    return {
        "architectures": ["Qwen3TTSForConditionalGeneration"],
        "model_type": "qwen3_tts",
        "dtype": "float32",
        "tokenizer_type": "qwen3_tts_tokenizer_12hz",
        "im_start_token_id": token("<|im_start|>"),
        "im_end_token_id": token("<|im_end|>"),
        "assistant_token_id": token("assistant"),
        "tts_pad_token_id": token("<tts_pad>"),
        "tts_bos_token_id": token("<tts_text_bos>"),
        "tts_eos_token_id": token("<tts_text_eod>"),
    }


def _shape_outputs(model: nn.Module) -> None:
    """Makes codes confident, and the code that ends the speech rare. Limits the vectors of voices."""
    with torch.no_grad():
        head = model.get_parameter("talker.codec_head.weight").mul_(CONFIDENCE)
        head[CODEC_EOS] *= CODEC_ENDING
        for name, weight in model.named_parameters():
            if name == "speaker_encoder.fc.weight":
                weight.mul_(_VOICE)


def _save(weights: Mapping[str, Tensor], folder: Path) -> None:
    save_file({name: weight.contiguous() for name, weight in weights.items()}, folder / "model.safetensors", _FORMAT)


_FORMAT = {"format": "pt"}
_TALKER_WIDTH, _TEXT_WIDTH = 64, 80
_ATTENTION = {
    "intermediate_size": 128,
    "num_key_value_heads": 2,
    "num_attention_heads": 4,
    "head_dim": 32,
    "hidden_act": "silu",
    "num_hidden_layers": 2,
    "rms_norm_eps": 1e-6,
    "attention_bias": False,
    "max_position_embeddings": 4096,
    "rope_theta": 1e6,
    "use_sliding_window": False,
}


def _talker_config(*, predictor_width: int) -> dict[str, Any]:
    """Codec ids above the codebook are special, as in the real model, whose `generate` suppresses the last 1024."""
    return {
        **_ATTENTION,
        "model_type": "qwen3_tts_talker",
        "hidden_size": _TALKER_WIDTH,
        "vocab_size": CODEBOOK + 1024,
        "text_hidden_size": _TEXT_WIDTH,
        "num_code_groups": CODE_GROUPS,
        "position_id_per_seconds": 13,
        "rope_scaling": {"interleaved": True, "mrope_section": [6, 5, 5], "rope_type": "default", "type": "default"},
        "codec_pad_id": CODEBOOK + 100,
        "codec_bos_id": CODEBOOK + 101,
        "codec_eos_token_id": CODEC_EOS,
        "codec_think_id": CODEBOOK + 106,
        "codec_nothink_id": CODEBOOK + 107,
        "codec_think_bos_id": CODEBOOK + 108,
        "codec_think_eos_id": CODEBOOK + 109,
        "codec_language_id": LANGUAGES,
        "spk_id": {},
        "spk_is_dialect": {},
        "code_predictor_config": {
            **_ATTENTION,
            "model_type": "qwen3_tts_talker_code_predictor",
            "hidden_size": predictor_width,
            "vocab_size": CODEBOOK,
            "num_code_groups": CODE_GROUPS,
            "rope_scaling": None,
        },
    }


def _make_talker(config: Mapping[str, Any]) -> nn.Module:
    predictor = config["code_predictor_config"]
    width, inner = config["hidden_size"], predictor["hidden_size"]
    model, codes = _make_transformer(config), _make_transformer(predictor)
    model.add_module("codec_embedding", nn.Embedding(config["vocab_size"], width))
    model.add_module("text_embedding", nn.Embedding(config["text_vocab_size"], config["text_hidden_size"]))
    groups, size = config["num_code_groups"] - 1, predictor["vocab_size"]
    codes.add_module("codec_embedding", nn.ModuleList(nn.Embedding(size, width) for _ in range(groups)))
    heads = nn.ModuleList(nn.Linear(inner, size, bias=False) for _ in range(groups))
    code_predictor = nn.ModuleDict({"model": codes, "lm_head": heads})
    if inner != width:
        code_predictor["small_to_mtp_projection"] = nn.Linear(width, inner)
    text = config["text_hidden_size"]
    projection = nn.ModuleDict({"linear_fc1": nn.Linear(text, text), "linear_fc2": nn.Linear(text, width)})
    head = nn.Linear(width, config["vocab_size"], bias=False)
    parts = {"model": model, "text_projection": projection, "codec_head": head, "code_predictor": code_predictor}
    return nn.ModuleDict(parts)


def _make_transformer(config: Mapping[str, Any]) -> nn.Module:
    """Returns a transformer without table of embeddings."""
    names = {*_ATTENTION, "hidden_size"} - {"rope_theta"}
    model = Qwen3Model(Qwen3Config(vocab_size=1, **{name: config[name] for name in names}))
    del model.embed_tokens
    return model


_GENERATION = {
    "do_sample": True,
    "temperature": 0.9,
    "top_k": 50,
    "top_p": 1.0,
    "repetition_penalty": 1.05,
    "subtalker_dosample": True,
    "subtalker_temperature": 0.9,
    "subtalker_top_k": 50,
    "subtalker_top_p": 1.0,
    "max_new_tokens": 8192,
}
_SPEAKER_ENCODER: dict[str, Any] = {
    "mel_dim": 128,
    "enc_dim": _TALKER_WIDTH,
    "enc_channels": [32, 32, 32, 64],
    "enc_kernel_sizes": [5, 3, 3, 1],
    "enc_dilations": [1, 2, 3, 1],
    "enc_attention_channels": 16,
    "enc_res2net_scale": 4,
    "enc_se_channels": 16,
}


def _write_codec(folder: Path, *, seed: int) -> None:
    model = nn.ModuleDict({"encoder": voice_encoders.make_model(_CODEC["encoder_config"]), "decoder": _make_decoder()})
    draw_weights(model, seed=seed)
    with torch.no_grad():
        model.get_parameter(f"decoder.decoder.{len(_UPSAMPLE_RATES) + 2}.conv.weight").mul_(LOUDNESS)
        for name, scale in _SENSITIVITY.items():
            model.get_parameter(name).mul_(scale)
        for name, weight in model.named_parameters():
            if name.startswith("decoder.decoder.") and name.endswith(".conv2.conv.weight"):
                weight.mul_(_RESIDUE)
        _draw_codebooks(model, seed=seed)
    write_json(folder / "config.json", _CODEC)
    extractor = {"feature_extractor_type": "EncodecFeatureExtractor", "sampling_rate": 24_000, "feature_size": 1}
    write_json(folder / "preprocessor_config.json", extractor | {"padding_side": "right", "padding_value": 0.0})
    _save(model.state_dict(), folder)


def _make_decoder() -> nn.Module:
    """Returns the modules of Qwen3-Omni's code2wav, with a quantizer, a convolution and two projections added."""
    config = _CODEC["decoder_config"]
    width, latent, codes = config["hidden_size"], config["latent_dim"], config["codebook_dim"]
    settings = {name: value for name, value in config.items() if name != "rope_theta"}
    transformer = Qwen3OmniMoeCode2WavTransformerModel(Qwen3OmniMoeCode2WavConfig(**settings))
    transformer.add_module("input_proj", nn.Linear(latent, width))
    transformer.add_module("output_proj", nn.Linear(width, latent))
    waves = Qwen3OmniMoeCode2Wav(Qwen3OmniMoeCode2WavConfig(**{**settings, "hidden_size": latent}))
    quantizers = {"rvq_first": _make_quantizer(1, codes), "rvq_rest": _make_quantizer(CODE_GROUPS - 1, codes)}
    return nn.ModuleDict(
        {
            "quantizer": nn.ModuleDict(quantizers),
            "pre_conv": nn.ModuleDict({"conv": nn.Conv1d(codes, latent, 3)}),
            "pre_transformer": transformer,
            "upsample": waves.upsample,
            "decoder": waves.decoder,
        }
    )


def _make_quantizer(groups: int, width: int) -> nn.Module:
    inner = width // 2
    layers = nn.ModuleList(nn.ModuleDict({"_codebook": _make_codebook(inner)}) for _ in range(groups))
    return nn.ModuleDict(
        {
            "input_proj": nn.Conv1d(width, inner, 1, bias=False),
            "output_proj": nn.Conv1d(inner, width, 1, bias=False),
            "vq": nn.ModuleDict({"layers": layers}),
        }
    )


def _make_codebook(width: int) -> nn.Module:
    codebook = nn.Module()
    codebook.register_buffer("cluster_usage", torch.ones(CODEBOOK))
    codebook.register_buffer("embedding_sum", torch.zeros(CODEBOOK, width))
    return codebook


def _draw_codebooks(model: nn.Module, *, seed: int) -> None:
    """Replaces the codebooks by random ones. They are stored as the sum of a cluster's vectors, and their number."""
    generator = torch.Generator().manual_seed(seed + 1)
    for name, usage in model.named_buffers():
        if name.endswith("cluster_usage"):
            usage.copy_(torch.rand(usage.shape, generator=generator) * 8 + 1)
            kind = "embedding_sum" if name.startswith("decoder") else "embed_sum"
            total = model.get_buffer(name.replace("cluster_usage", kind))
            total.copy_(torch.randn(total.shape, generator=generator) * usage[:, None])


_UPSAMPLE_RATES = [8, 5, 4, 3]
_SAMPLES_PER_FRAME = 1920
_CODEC: dict[str, Any] = {
    "architectures": ["Qwen3TTSTokenizerV2Model"],
    "model_type": "qwen3_tts_tokenizer_12hz",
    "dtype": "float32",
    "encoder_valid_num_quantizers": CODE_GROUPS,
    "input_sample_rate": 24_000,
    "output_sample_rate": 24_000,
    "encode_downsample_rate": _SAMPLES_PER_FRAME,
    "decode_upsample_rate": _SAMPLES_PER_FRAME,
    "encoder_config": {
        "model_type": "mimi",
        "_frame_rate": 12.5,
        "hidden_size": 32,
        "num_filters": 4,
        "upsampling_ratios": [8, 6, 5, 4],
        "codebook_size": CODEBOOK,
        "codebook_dim": 16,
        "vector_quantization_hidden_dimension": 16,
        # More than the talker has groups, as in the real model.
        "num_quantizers": CODE_GROUPS + 2,
        "num_semantic_quantizers": 1,
        "num_hidden_layers": 2,
        "intermediate_size": 64,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "sliding_window": 12,
        "rope_theta": 10_000.0,
        "upsample_groups": 32,
        "use_cache": False,
    },
    "decoder_config": {
        "codebook_size": CODEBOOK,
        "codebook_dim": 32,
        "latent_dim": 40,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "num_hidden_layers": 2,
        "num_quantizers": CODE_GROUPS,
        "num_semantic_quantizers": 1,
        "sliding_window": 8,
        "rope_theta": 10_000,
        "rms_norm_eps": 1e-5,
        "decoder_dim": 32,
        "upsampling_ratios": [2, 2],
        "upsample_rates": _UPSAMPLE_RATES,
    },
}
