"""Offloading and quantization of weights: their effect on results, and the options that they reject."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from stagemesh.common.errors import InvalidRequestError, NotReadyError
from stagemesh.services.engines.diffusion.options import stage_options
from stagemesh.services.engines.diffusion.state import DiffusionInputs
from stagemesh.services.engines.diffusion.worker import DiffusionWorker
from tests.diffusion.tiny.pipelines import WRITERS

pytestmark = pytest.mark.timeout(120)

DISK_TOLERANCE = 2e-6
"""A tensor's alignment in memory follows the file, and the matrix library's order of sums depends on alignment."""
MODELS = ("qwen-image", "flux", "sd3", "wan", "z-image")
FP8_TOLERANCE = 0.1
"""For images in [0, 1] of random weights, with a mantissa of 3 bits instead of 23."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return WRITERS["qwen-image"](tmp_path_factory.mktemp("model"))


def made(folder: Path, *, frames: int = 1, **load: Any) -> NDArray[Any]:
    worker = DiffusionWorker(folder, stage_options({"dtype": "float32", "device": "cpu", "load": load}))
    worker.load()
    inputs = DiffusionInputs(
        1, "a cat", "blur", height=64, width=64, num_inference_steps=3, guidance_scale=3.0, num_frames=frames
    )
    worker.runner.begin("r", inputs)
    for _ in range(3):
        assert worker.step(["r"]) == [None]
    image = np.array(worker.runner.decode("r"))
    worker.shutdown()
    return image


@pytest.mark.parametrize("name", MODELS)
def test_group_offload_gives_the_same_bits(name: str, tmp_path: Path) -> None:
    folder, frames = WRITERS[name](tmp_path / "model"), 5 if name == "wan" else 1
    expected = made(folder, frames=frames)
    assert np.array_equal(made(folder, frames=frames, offload="group"), expected)
    from_disk = made(folder, frames=frames, offload="disk", offload_dir=str(tmp_path))
    assert np.abs(from_disk - expected).max() < DISK_TOLERANCE


def test_offload_groups_may_be_blocks(model: Path, tmp_path: Path) -> None:
    expected = made(model)
    assert np.array_equal(made(model, offload="group", offload_by="block"), expected)
    from_disk = made(model, offload="disk", offload_by="block", offload_dir=str(tmp_path))
    assert np.abs(from_disk - expected).max() < DISK_TOLERANCE


def test_shutdown_removes_offloaded_files(model: Path, tmp_path: Path) -> None:
    worker = DiffusionWorker(
        model, stage_options({"dtype": "float32", "load": {"offload": "disk", "offload_dir": str(tmp_path)}})
    )
    worker.load()
    assert list(tmp_path.rglob("*.safetensors"))
    worker.shutdown()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2"])
def test_layerwise_casting_changes_results_little(model: Path, dtype: str) -> None:
    expected, cast = made(model), made(model, layerwise_casting=dtype)
    assert 0 < np.abs(cast - expected).max() < FP8_TOLERANCE


@pytest.mark.soak
@pytest.mark.timeout(300)
def test_a_compiled_transformer_changes_results_little(tmp_path: Path) -> None:
    folder = WRITERS["flux"](tmp_path)
    assert np.allclose(made(folder, compile=True), made(folder), atol=1e-4)


def test_model_offload_needs_a_gpu(model: Path) -> None:
    with pytest.raises(NotReadyError, match="offload model needs a GPU; omit it"):
        made(model, offload="model")


def test_a_missing_offload_folder_is_rejected(model: Path, tmp_path: Path) -> None:
    with pytest.raises(NotReadyError, match="gone cannot be used"):
        made(model, offload="disk", offload_dir=str(tmp_path / "gone"))


@pytest.mark.skipif(find_spec("bitsandbytes") is not None, reason="it is installed")
def test_the_error_names_a_missing_library(model: Path) -> None:
    with pytest.raises(NotReadyError, match="needs the module bitsandbytes; install it"):
        made(model, quantization={"backend": "bitsandbytes_4bit"})


def test_quantized_weights_change_results_little(model: Path) -> None:
    wanted = {"backend": "torchao", "parameters": {"quant_type": "Int8WeightOnlyConfig"}}
    expected, quantized = made(model), made(model, quantization=wanted)
    assert 0 < np.abs(quantized - expected).max() < FP8_TOLERANCE


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"load": {"offload": "cloud"}}, "load.offload is 'cloud'"),
        ({"load": {"quantization": {"backend": "torchao"}, "offload": "disk"}}, "excludes load.offload disk"),
        ({"load": {"offload": "group"}, "enable_lora": True}, "enable_lora and parallel need a transformer"),
        ({"load": {"quick": True}}, "load.quick"),
    ],
)
def test_conflicting_load_options_are_rejected(options: dict[str, Any], error: str) -> None:
    with pytest.raises(InvalidRequestError, match=error):
        stage_options(options)
