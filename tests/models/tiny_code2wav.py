"""A tiny code2wav of transformers with random weights, and checkpoint folders that contain it."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.models.qwen3_omni_moe.configuration_qwen3_omni_moe import Qwen3OmniMoeCode2WavConfig
from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import Qwen3OmniMoeCode2Wav

PREFIX = "code2wav."
GROUPS, CODEBOOK_SIZE = 4, 64
_SIZES: dict[str, Any] = {
    "codebook_size": CODEBOOK_SIZE,
    "decoder_dim": 32,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 2,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "num_quantizers": GROUPS,
    "sliding_window": 8,
    "upsample_rates": [4, 3],
    "upsampling_ratios": [2, 2],
}


def make_reference(**changes: Any) -> Qwen3OmniMoeCode2Wav:
    """Returns transformers' model. Each of its modules changes the samples noticeably, and no sample is clipped."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        model = Qwen3OmniMoeCode2Wav(Qwen3OmniMoeCode2WavConfig(**{**_SIZES, **changes}))
        model.train(False)
        for name, weight in model.named_parameters():
            is_factor = name.endswith(("norm.weight", "gamma", "scale"))
            deviation = 0.1 if weight.ndim == 1 else 2.0 if "embedding" in name else weight[0].numel() ** -0.5
            weight.copy_(torch.randn_like(weight) * deviation + (0.5 if is_factor else 0.0))
        last = cast("torch.nn.Conv1d", model.decoder[-1].conv)
        assert last.bias is not None
        # Without clipping, the samples have the deviation 0.2 and the mean 0.
        last.weight.mul_(1e-4)
        last.bias.zero_()
        samples = model(torch.randint(CODEBOOK_SIZE, (1, GROUPS, 50)))
        factor = 0.2 / samples.std()
        last.weight.mul_(factor)
        last.bias.sub_(samples.mean() * factor)
    return model


def random_codes(frames: int, *, groups: int = GROUPS) -> npt.NDArray[np.int32]:
    """Returns random codec frames, int32[frames, groups]."""
    return np.random.default_rng(1).integers(0, CODEBOOK_SIZE, (frames, groups)).astype(np.int32)


def decode_whole(model: Qwen3OmniMoeCode2Wav, codes: npt.NDArray[np.int32]) -> npt.NDArray[np.float32]:
    """Returns the samples that transformers decodes from all frames at once."""
    with torch.inference_mode():
        samples: Tensor = model(torch.from_numpy(codes.T.astype(np.int64))[None])
    return np.asarray(samples[0, 0], np.float32)


def weights_of(model: Qwen3OmniMoeCode2Wav) -> dict[str, Tensor]:
    """Returns the model's weights by their names in a checkpoint."""
    return {PREFIX + name: tensor.clone() for name, tensor in model.state_dict().items()}


def write_checkpoint(
    folder: Path, model: Qwen3OmniMoeCode2Wav, *, weights: Mapping[str, Tensor] | None = None, **config: Any
) -> Path:
    """Writes the config and the weights, which include a weight of another stage. Returns the folder."""
    folder.mkdir(exist_ok=True)
    content = {"model_type": "qwen3_omni_moe", "code2wav_config": model.config.to_dict()} | config
    (folder / "config.json").write_text(json.dumps(content))
    save_file(dict(weights or weights_of(model)) | {"talker.norm": torch.ones(3)}, folder / "model.safetensors")
    return folder


def shard(folder: Path, names: Sequence[str]) -> None:
    """Moves the weights `names` of a checkpoint to a second file, and all other weights to a first one."""
    weights = load_file(folder / "model.safetensors")
    files = {name: f"model-0000{2 if name in names else 1}-of-00002.safetensors" for name in weights}
    for file in set(files.values()):
        save_file({name: weight for name, weight in weights.items() if files[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    (folder / "model.safetensors").unlink()
