"""Complete pipelines with a few hundred thousand random weights, made without a model hub and reproducible.

Their VAEs downscale each side by 8 and have 16 channels, like the real ones. Hidden sizes are multiples of 32, so that
a row's result does not depend on its batch in MKL's strict mode.
"""

import json
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen2VLImageProcessorPil

from tests.diffusion.tiny import text_encoders as encoders
from tests.diffusion.tiny.calls import diffusers
from tests.diffusion.tiny.tokenizers import clip_tokenizer, qwen_tokenizer, t5_tokenizer

_LAYERS = 2
_HEADS = 2
_HEAD = 32
_ROPE = (8, 12, 12)
"""Adds up to the head size."""
_CHANNELS = 16
_SIZES = {"num_layers": _LAYERS, "attention_head_dim": _HEAD, "num_attention_heads": _HEADS}
_JOINT = {**_SIZES, "joint_attention_dim": encoders.HIDDEN}


def _make_qwen_image() -> Any:
    """Qwen-Image: true CFG, packed latents, a VAE for videos of one frame."""
    tokenizer = qwen_tokenizer()
    return diffusers.QwenImagePipeline(
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(
            max_shift=0.9, max_image_seq_len=8192, shift_terminal=0.02, use_dynamic_shifting=True
        ),
        vae=diffusers.AutoencoderKLQwenImage(base_dim=8, num_res_blocks=1),
        text_encoder=encoders.qwen_vl(tokenizer),
        tokenizer=tokenizer,
        transformer=diffusers.QwenImageTransformer2DModel(**_JOINT, axes_dims_rope=_ROPE),
    )


def _make_flux() -> Any:
    """Flux.1 dev: guidance is an input of the model."""
    short, long = clip_tokenizer(), t5_tokenizer()
    return diffusers.FluxPipeline(
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=True),
        vae=_image_vae(),
        text_encoder=encoders.clip(short),
        tokenizer=short,
        text_encoder_2=encoders.t5(long),
        tokenizer_2=long,
        transformer=diffusers.FluxTransformer2DModel(
            **_JOINT,
            num_single_layers=_LAYERS,
            pooled_projection_dim=encoders.CLIP_HIDDEN,
            guidance_embeds=True,
            axes_dims_rope=_ROPE,
        ),
    )


def _make_sd3() -> Any:
    """Stable Diffusion 3: three text encoders, a learned position for each patch of up to 512 x 512 pixels."""
    short, long = clip_tokenizer(), t5_tokenizer()
    return diffusers.StableDiffusion3Pipeline(
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0),
        vae=_image_vae(),
        text_encoder=encoders.clip_with_projection(short),
        tokenizer=short,
        text_encoder_2=encoders.clip_with_projection(short),
        tokenizer_2=short,
        text_encoder_3=encoders.t5(long),
        tokenizer_3=long,
        transformer=diffusers.SD3Transformer2DModel(
            sample_size=32,
            pos_embed_max_size=32,
            **_JOINT,
            caption_projection_dim=_HEADS * _HEAD,
            pooled_projection_dim=2 * encoders.CLIP_HIDDEN,
            qk_norm="rms_norm",
        ),
    )


def _make_wan(**more: Any) -> Any:
    """Wan 2.1, text to video, with its multistep solver."""
    tokenizer = t5_tokenizer()
    return diffusers.WanPipeline(
        scheduler=diffusers.UniPCMultistepScheduler(
            prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0
        ),
        vae=diffusers.AutoencoderKLWan(base_dim=8, num_res_blocks=1),
        text_encoder=encoders.umt5(tokenizer),
        tokenizer=tokenizer,
        transformer=_wan_transformer(),
        **more,
    )


def _make_wan_22() -> Any:
    """Wan 2.2: a transformer for the first timesteps, and another one below a boundary."""
    return _make_wan(transformer_2=_wan_transformer(), boundary_ratio=0.875)


def _make_helios() -> Any:
    """Helios: a loop over chunks of a video, each of which is denoised in a loop."""
    tokenizer = t5_tokenizer()
    return diffusers.HeliosPipeline(
        scheduler=diffusers.HeliosScheduler(stages=1),
        vae=diffusers.AutoencoderKLWan(base_dim=8, num_res_blocks=1),
        text_encoder=encoders.umt5(tokenizer),
        tokenizer=tokenizer,
        transformer=diffusers.HeliosTransformer3DModel(
            **_SIZES, text_dim=encoders.HIDDEN, freq_dim=64, ffn_dim=128, rope_dim=_ROPE
        ),
    )


def _wan_transformer() -> Any:
    return diffusers.WanTransformer3DModel(**_SIZES, text_dim=encoders.HIDDEN, freq_dim=64, ffn_dim=128)


def _make_z_image() -> Any:
    """Z-Image: lists of latents and of prompts, padded with learned tokens."""
    tokenizer = qwen_tokenizer()
    transformer = diffusers.ZImageTransformer2DModel(
        dim=_HEADS * _HEAD,
        n_layers=_LAYERS,
        n_refiner_layers=1,
        n_heads=_HEADS,
        n_kv_heads=_HEADS,
        cap_feat_dim=encoders.HIDDEN,
        axes_dims=list(_ROPE),
    )
    # They are zero in a new model, which would hide errors.
    torch.nn.init.normal_(transformer.x_pad_token)
    torch.nn.init.normal_(transformer.cap_pad_token)
    return diffusers.ZImagePipeline(
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0),
        vae=_image_vae(),
        text_encoder=encoders.qwen3(tokenizer),
        tokenizer=tokenizer,
        transformer=transformer,
    )


def _image_vae() -> Any:
    return diffusers.AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        block_out_channels=(8, 16, 32, 32),
        norm_num_groups=8,
        latent_channels=_CHANNELS,
        scaling_factor=0.3611,
        shift_factor=0.1159,
        use_quant_conv=False,
        use_post_quant_conv=False,
    )


def _write(make: Callable[[], Any], folder: Path, dtype: torch.dtype = torch.float32) -> Path:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        pipeline = make()
    if dtype != torch.float32:
        pipeline.to(dtype)
    pipeline.save_pretrained(folder)
    return folder


write_helios = partial(_write, _make_helios)
write_qwen_image = partial(_write, _make_qwen_image)
WRITERS: Mapping[str, Callable[..., Path]] = {
    "qwen-image": write_qwen_image,
    "flux": partial(_write, _make_flux),
    "sd3": partial(_write, _make_sd3),
    "wan": partial(_write, _make_wan),
    "wan-2.2": partial(_write, _make_wan_22),
    "z-image": partial(_write, _make_z_image),
}
"""The functions that write a tiny pipeline into a folder, optionally in another data type."""


def write_qwen_image_edit(folder: Path) -> Path:
    """Qwen-Image-Edit: the same model, which receives an image as latents and as a part of the prompt."""
    write_qwen_image(folder)
    # The processor that a pipeline would save needs a video processor.
    Qwen2VLImageProcessorPil().save_pretrained(folder / "processor")
    index = json.loads((folder / "model_index.json").read_text(encoding="utf-8"))
    index |= {"_class_name": "QwenImageEditPipeline", "processor": ["transformers", "Qwen2VLProcessor"]}
    (folder / "model_index.json").write_text(json.dumps(index, indent=2), encoding="utf-8")
    return folder
