"""Random LoRA adapters for tiny transformers, written by PEFT or diffusers, and reference images with them."""

from pathlib import Path
from typing import Any, Literal

import torch
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict

from tests.diffusion.tiny.calls import ImageSpec, classic_image, diffusers, load

_TARGETS = ["to_q", "to_v", "to_out.0"]


def write_lora(folder: Path, model: Path, *, by: Literal["peft", "diffusers"], seed: int = 0, rank: int = 4) -> Path:
    """Writes an adapter for the tiny Qwen-Image in `model`. Alpha is twice the rank. Returns its folder."""
    transformer = diffusers.QwenImageTransformer2DModel.from_pretrained(model / "transformer")
    config = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=_TARGETS, init_lora_weights=False)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if by == "peft":
            get_peft_model(transformer, config).save_pretrained(str(folder))
            return folder
        transformer.add_adapter(config)
    diffusers.QwenImagePipeline.save_lora_weights(
        folder,
        transformer_lora_layers=get_peft_model_state_dict(transformer),
        transformer_lora_adapter_metadata=transformer.peft_config["default"].to_dict(),
    )
    return folder


def lora_image(model: Path, adapter: Path, spec: ImageSpec, *, scale: float = 1.0) -> Any:
    """Returns the image of the pipeline's own `__call__` with an adapter that diffusers wrote."""
    pipeline = load(model)
    pipeline.load_lora_weights(adapter, adapter_name="one")
    pipeline.set_adapters("one", scale)
    return classic_image("qwen-image", pipeline, spec)
