"""Offloading and quantization of weights: their effect on results, and the options that they reject."""

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from stagemesh.common.errors import NotReadyError
from stagemesh.services.engines.diffusion.options import stage_options
from stagemesh.services.engines.diffusion.worker import DiffusionWorker
from tests.diffusion.pipeline_runs import inputs_of, run_to_end
from tests.diffusion.tiny.calls import ImageSpec
from tests.diffusion.tiny.pipelines import WRITERS

pytestmark = pytest.mark.timeout(120)

DISK_TOLERANCE = 2e-6
"""A tensor's alignment in memory follows the file, and the matrix library's order of sums depends on alignment."""
FP8_TOLERANCE = 0.1
"""For images in [0, 1] of random weights, with a mantissa of 3 bits instead of 23."""


def loaded(folder: Path, **load: Any) -> DiffusionWorker:
    worker = DiffusionWorker(folder, stage_options({"dtype": "float32", "device": "cpu", "load": load}))
    worker.load()
    return worker


def made(folder: Path, model: str = "qwen-image", **load: Any) -> NDArray[Any]:
    worker = loaded(folder, **load)
    image = np.array(run_to_end(worker.runner, inputs_of(model, ImageSpec("a cat", seed=1, steps=3))))
    worker.shutdown()
    return image


@pytest.mark.parametrize(
    ("name", "groups"), [*((name, {}) for name in WRITERS), ("qwen-image", {"offload_by": "block"})], ids=str
)
def test_group_offload_gives_the_same_bits(
    name: str, groups: dict[str, str], tiny_diffusion: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = tiny_diffusion(name)
    expected = made(folder, name)
    assert np.array_equal(made(folder, name, offload="group", **groups), expected)
    from_disk = made(folder, name, offload="disk", offload_dir=str(tmp_path), **groups)
    assert np.abs(from_disk - expected).max() < DISK_TOLERANCE


def test_shutdown_removes_offloaded_files(qwen_image: Path, tmp_path: Path) -> None:
    worker = loaded(qwen_image, offload="disk", offload_dir=str(tmp_path))
    assert list(tmp_path.rglob("*.safetensors"))
    worker.shutdown()
    assert not list(tmp_path.iterdir())


INT8 = {"backend": "torchao", "parameters": {"quant_type": "Int8WeightOnlyConfig"}}
LITTLE = ({"layerwise_casting": "float8_e4m3fn"}, {"layerwise_casting": "float8_e5m2"}, {"quantization": INT8})


@pytest.mark.parametrize("options", LITTLE, ids=str)
def test_smaller_weights_change_results_little(qwen_image: Path, options: dict[str, Any]) -> None:
    assert 0 < np.abs(made(qwen_image, **options) - made(qwen_image)).max() < FP8_TOLERANCE


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"offload": "model"}, "offload model needs a GPU; omit it"),
        ({"offload": "disk", "offload_dir": "/nowhere/gone"}, "gone cannot be used"),
    ],
)
def test_an_impossible_offload_is_rejected(qwen_image: Path, options: dict[str, Any], said: str) -> None:
    with pytest.raises(NotReadyError, match=said):
        made(qwen_image, **options)


@pytest.mark.soak
@pytest.mark.timeout(300)
def test_a_compiled_transformer_changes_results_little(tiny_diffusion: Callable[[str], Path]) -> None:
    folder = tiny_diffusion("flux")
    assert np.allclose(made(folder, compile=True), made(folder), atol=1e-4)


@pytest.mark.skipif(find_spec("bitsandbytes") is not None, reason="it is installed")
def test_the_error_names_a_missing_library(qwen_image: Path) -> None:
    with pytest.raises(NotReadyError, match="needs the module bitsandbytes; install it"):
        made(qwen_image, quantization={"backend": "bitsandbytes_4bit"})
