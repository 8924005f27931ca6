"""The tiny models: a seed determines their weights, and they are small."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from stagemesh.tiny_models import qwen2_5_omni, qwen3_omni, qwen3_tts

MB = 1 << 20
MODELS: dict[str, tuple[Callable[..., object], int]] = {
    "tiny_qwen2_5_omni": (qwen2_5_omni.write, 10 * MB),
    "tiny_qwen3_omni": (qwen3_omni.write, 10 * MB),
    "tiny_qwen3_tts": (qwen3_tts.write_custom_voice, 5 * MB),
    "tiny_qwen3_tts_base": (qwen3_tts.write_base, 5 * MB),
}
"""The function that writes a model, and the model's maximum size in bytes, by the name of its fixture."""


@pytest.mark.parametrize("name", MODELS)
def test_a_seed_determines_the_weights(name: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    kept: Path = request.getfixturevalue(name)
    for seed in (0, 1):
        MODELS[name][0](tmp_path / str(seed), seed=seed)
    for file in kept.rglob("*.safetensors"):
        first, second, third = (
            load_file(folder / file.relative_to(kept)) for folder in (tmp_path / "0", tmp_path / "1", kept)
        )
        assert all(np.array_equal(first[weight], third[weight]) for weight in third)
        assert not any(
            np.array_equal(first[weight], second[weight]) for weight in third if not weight.endswith("initialized")
        )


@pytest.mark.parametrize("name", MODELS)
def test_a_checkpoint_is_small(name: str, request: pytest.FixtureRequest) -> None:
    folder: Path = request.getfixturevalue(name)
    assert sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) < MODELS[name][1]
