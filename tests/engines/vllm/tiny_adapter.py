"""Random LoRA adapters for the tiny Qwen3, as PEFT writes them, and models with merged weights."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

ALPHA = 8
_SIZES = {
    "self_attn.q_proj": (64, 64),
    "self_attn.v_proj": (64, 32),
    "self_attn.o_proj": (64, 64),
    "mlp.up_proj": (64, 128),
    "mlp.down_proj": (128, 64),
}
"""The numbers of inputs and outputs of the changed layers."""


def write_adapter(folder: Path, *, seed: int = 0, rank: int = 4, layers: int = 2, scale: float = 1.0) -> Path:
    """Writes an adapter that changes the output of the tiny model. With `scale`, its layers have other sizes."""
    folder.mkdir(parents=True, exist_ok=True)
    draw = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}
    for layer in range(layers):
        for name, sizes in _SIZES.items():
            inputs, outputs = (int(size * scale) for size in sizes)
            prefix = f"base_model.model.model.layers.{layer}.{name}"
            tensors[f"{prefix}.lora_A.weight"] = torch.randn(rank, inputs, generator=draw) * 0.1
            tensors[f"{prefix}.lora_B.weight"] = torch.randn(outputs, rank, generator=draw) * 0.5
    save_file(tensors, folder / "adapter_model.safetensors")
    targets = [name.partition(".")[2] for name in _SIZES]
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": ALPHA, "target_modules": targets, "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def set_config(folder: Path, **changes: object) -> None:
    """Changes fields of an adapter's config."""
    path = folder / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def merge(model: Any, adapter: Path) -> Any:
    """Merges an adapter into the weights of a transformers model. Returns the model."""
    tensors = load_file(adapter / "adapter_model.safetensors")
    for name, down in tensors.items():
        if name.endswith(".lora_A.weight"):
            layer = name.removesuffix(".lora_A.weight")
            up = tensors[f"{layer}.lora_B.weight"]
            weight = model.get_submodule(layer.removeprefix("base_model.model.")).weight
            weight.data += up @ down * (ALPHA / down.shape[0])
    return model
