"""Checkpoints of Qwen3-Omni's code2wav with random weights, at full size or tiny."""

import json
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from safetensors import torch as files

FRAME_S = 0.08
"""The duration of the audio of a frame of the full model."""
TINY: Mapping[str, Any] = {
    "codebook_size": 64,
    "decoder_dim": 64,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 2,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "num_quantizers": 4,
    "sliding_window": 8,
}
_DEVIATION = 0.2
"""The deviation of the samples from 0, so that none of them is clipped."""


class Written(NamedTuple):
    """A checkpoint folder, and the sizes of its frames."""

    folder: Path
    groups: int
    codebook: int
    samples: int


def write_code2wav(folder: Path, *, tiny: bool, device: torch.device) -> Written:
    """Writes a model with random weights, which are drawn and scaled on `device`, in bfloat16."""
    from transformers.models.qwen3_omni_moe.configuration_qwen3_omni_moe import Qwen3OmniMoeCode2WavConfig
    from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import Qwen3OmniMoeCode2Wav

    # The defaults of the class are the sizes of the published checkpoint.
    config: Any = Qwen3OmniMoeCode2WavConfig(**(TINY if tiny else {}))
    torch.manual_seed(0)
    with device:
        model: Any = Qwen3OmniMoeCode2Wav(config)
    model.train(False)
    with torch.inference_mode():
        for name, weight in model.named_parameters():
            factor = 0.5 if name.endswith(("norm.weight", "gamma", "scale")) else 0.0
            spread = 0.1 if weight.ndim == 1 else 2.0 if "embedding" in name else weight[0].numel() ** -0.5
            weight.copy_(torch.randn_like(weight) * spread + factor)
        last = cast("torch.nn.Conv1d", model.decoder[-1].conv)
        assert last.bias is not None
        last.weight.mul_(1e-4)
        last.bias.zero_()
        codes = torch.randint(config.codebook_size, (1, config.num_quantizers, 25), device=device)
        samples = model(codes)
        scale = _DEVIATION / samples.std()
        last.weight.mul_(scale)
        last.bias.sub_(samples.mean() * scale)
    folder.mkdir()
    (folder / "config.json").write_text(
        json.dumps({"model_type": "qwen3_omni_moe", "code2wav_config": config.to_dict()})
    )
    # code_offset is a constant, which checkpoints lack.
    weights = {
        f"code2wav.{name}": tensor.to("cpu", torch.bfloat16).contiguous() for name, tensor in model.named_parameters()
    }
    files.save_file(weights, folder / "model.safetensors")
    samples_per_frame = prod((*config.upsampling_ratios, *config.upsample_rates))
    return Written(folder, config.num_quantizers, config.codebook_size, samples_per_frame)
