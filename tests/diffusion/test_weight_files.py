"""Weights from single files and in fewer bits: the same image as diffusers makes with them."""

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file  # pyright: ignore[reportUnknownVariableType]
from torch._dynamo.utils import counters  # pyright: ignore[reportPrivateImportUsage]

from stagemesh.common.errors import NotReadyError
from tests.diffusion.pipeline_runs import inputs_of, run_to_end
from tests.diffusion.test_offload import INT8, loaded, made
from tests.diffusion.tiny.calls import ImageSpec, classic_image, diffusers, load

pytestmark = pytest.mark.timeout(120)

SPEC = ImageSpec("a cat", seed=1, steps=3)


def _weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "transformer" / "diffusion_pytorch_model.safetensors")


def _write_gguf(folder: Path, file: Path) -> Path:
    """Writes the transformer's matrices in 8 bits, and its other weights in 32 bits."""
    writer = gguf.GGUFWriter(file, "flux")
    for name, tensor in _weights(folder).items():
        is_matrix = tensor.ndim == 2 and tensor.shape[-1] % 32 == 0
        kind = gguf.GGMLQuantizationType.Q8_0 if is_matrix else gguf.GGMLQuantizationType.F32
        writer.add_tensor(name, gguf.quants.quantize(tensor.numpy(), kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def _read_by_diffusers(folder: Path, file: Path) -> Any:
    quantized = {}
    if file.suffix == ".gguf":
        quantized["quantization_config"] = diffusers.GGUFQuantizationConfig(compute_dtype=torch.float32)
    return diffusers.FluxTransformer2DModel.from_single_file(
        str(file), config=str(folder / "transformer"), dtype=torch.float32, local_files_only=True, **quantized
    )


@pytest.mark.parametrize("suffix", [".safetensors", ".gguf"])
def test_a_single_file_gives_the_image_that_diffusers_makes(
    suffix: str, tiny_diffusion: Callable[[str], Path], tmp_path: Path
) -> None:
    folder, file = tiny_diffusion("flux"), tmp_path / f"other{suffix}"
    if suffix == ".gguf":
        _write_gguf(folder, file)
    else:
        save_file({name: tensor * 0.5 for name, tensor in _weights(folder).items()}, file)
    pipeline = load(folder, transformer=_read_by_diffusers(folder, file))
    image = made(folder, "flux", weights={"transformer": str(file)})
    assert np.array_equal(image, classic_image("flux", pipeline, SPEC).numpy())
    assert np.abs(image - made(folder, "flux")).max() > 0


def test_torchao_gives_the_image_that_diffusers_makes(tiny_diffusion: Callable[[str], Path]) -> None:
    quantization: Any = import_module("torchao.quantization")
    folder = tiny_diffusion("flux")
    config = diffusers.TorchAoConfig(quant_type=quantization.Int8WeightOnlyConfig())
    transformer = diffusers.FluxTransformer2DModel.from_pretrained(
        folder / "transformer", dtype=torch.float32, quantization_config=config
    )
    expected = classic_image("flux", load(folder, transformer=transformer), SPEC)
    assert np.array_equal(made(folder, "flux", quantization=INT8), expected.numpy())


def test_options_of_the_vae_and_of_attention_are_those_of_diffusers(tiny_diffusion: Callable[[str], Path]) -> None:
    folder = tiny_diffusion("flux")
    options = {"vae_tiling": True, "vae_slicing": True, "channels_last": True, "attention_backend": "native"}
    components = loaded(folder, **options).runner.pipeline.components
    assert components.vae.use_tiling
    assert components.vae.use_slicing
    convolution = next(layer for layer in components.vae.modules() if isinstance(layer, torch.nn.Conv2d))
    assert convolution.weight.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"weights": {"unet": "/gone.gguf"}}, "names the component 'unet'; the stage has"),
        ({"weights": {"tokenizer": "/gone.gguf"}}, "diffusers reads no single file for CLIPTokenizer"),
        ({"weights": {"transformer": "/gone.gguf"}}, "gone.gguf cannot be loaded as FluxTransformer2DModel"),
        ({"attention_backend": "fast"}, "load.attention_backend fast cannot be used"),
        ({"attention_backend": "flash"}, "load.attention_backend flash cannot be used"),
        ({"warmup_sizes": [[1, 1]]}, "1 by 1 pixels, which the model cannot make"),
    ],
    ids=str,
)
def test_what_does_not_fit_the_model_is_rejected(
    options: dict[str, Any], said: str, tiny_diffusion: Callable[[str], Path]
) -> None:
    with pytest.raises(NotReadyError, match=said):
        loaded(tiny_diffusion("flux"), **options)


@pytest.mark.timeout(400)
def test_a_compiled_transformer_is_warm_before_the_stage_is_ready(tiny_diffusion: Callable[[str], Path]) -> None:
    worker = loaded(tiny_diffusion("flux"), compile=True, warmup_sizes=[[64, 64]])
    graphs = counters["stats"]["unique_graphs"]
    run_to_end(worker.runner, inputs_of("flux", SPEC))
    assert counters["stats"]["unique_graphs"] == graphs > 0
