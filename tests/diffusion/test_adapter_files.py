"""LoRA and LoKr files in the layouts in which they are published change images as diffusers' own loader does."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from stagemesh.common.errors import InvalidRequestError
from stagemesh.services.engines.diffusion.model.lora_adapters import ModelAdapters
from stagemesh.services.engines.diffusion.options import DiffusionOptions
from stagemesh.services.engines.diffusion.worker import DiffusionRunner
from tests.diffusion.pipeline_runs import inputs_of, run_to_end
from tests.diffusion.test_adapters import write_lora
from tests.diffusion.tiny.calls import ImageSpec, classic_image, load
from tests.diffusion.tiny.pipelines import WRITERS

pytestmark = [
    pytest.mark.timeout(180),
    pytest.mark.filterwarnings("ignore:Already found a `peft_config` attribute:UserWarning"),
]

SPEC, RANK = ImageSpec(steps=2), 4
LORA, KOHYA, XLABS = ("lora_A", "lora_B"), ("lora_down", "lora_up"), ("down", "up")
"""The names of the two matrices of a layer."""
LOKR = ("lokr_w1", "lokr_w2")
QWEN = {f"transformer_blocks.{i}.attn.{name}": "" for i in range(2) for name in ("to_q", "to_out.0")}
_WAN = {f"attn1.to_{name}": f"self_attn.{name}" for name in "qkv"} | {"attn1.to_out.0": "self_attn.o"}
_WAN |= {name.replace("attn1", "attn2"): other.replace("self", "cross") for name, other in _WAN.items()}
_WAN |= {"ffn.net.0.proj": "ffn.0", "ffn.net.2": "ffn.2"}
WAN = {f"blocks.{i}.{name}": f"blocks.{i}.{other}" for i in range(2) for name, other in _WAN.items()}
Z_IMAGE = {f"layers.{i}.attention.{name}": "" for i in range(2) for name in ("to_q", "to_out.0")}
FLUX = {"transformer_blocks.0.attn.to_out.0": "double_blocks.0.img_attn.proj"}
FLUX |= {"single_transformer_blocks.1.proj_out": "single_blocks.1.linear2"}


class Layout(NamedTuple):
    """How a file names the matrices of layers."""

    layers: Mapping[str, str]
    """The layers by their names in diffusers, with other names in the file if they are not empty."""
    prefix: str
    matrices: tuple[str, str] = LORA
    alpha: float | None = None
    flat: bool = False
    """Whether dots of a layer's name are underscores in the file."""


LAYOUTS: Mapping[str, tuple[str, Layout]] = {
    "diffusers Qwen": ("qwen-image", Layout(QWEN, "transformer.")),
    "Lightning Qwen": ("qwen-image", Layout(QWEN, "", KOHYA, alpha=8)),
    "Kohya Qwen": ("qwen-image", Layout(QWEN, "lora_unet_", KOHYA, alpha=1, flat=True)),
    "ai-toolkit Qwen": ("qwen-image", Layout(QWEN, "diffusion_model.")),
    "diffusers Flux": ("flux", Layout(dict.fromkeys(FLUX, ""), "transformer.")),
    "Kohya Flux": ("flux", Layout(FLUX, "lora_unet_", KOHYA, alpha=2, flat=True)),
    "XLabs Flux": ("flux", Layout({next(iter(FLUX)): "double_blocks.0.processor.proj_lora1"}, "", XLABS)),
    "diffusers SD3": ("sd3", Layout({"transformer_blocks.1.attn.to_q": ""}, "transformer.")),
    "original Wan": ("wan", Layout(WAN, "diffusion_model.")),
    "Lightning Wan": ("wan", Layout(WAN, "diffusion_model.", KOHYA, alpha=8)),
    "Kohya Wan": ("wan", Layout(WAN, "lora_unet_", KOHYA, alpha=3, flat=True)),
    "Kohya Z-Image": ("z-image", Layout(Z_IMAGE, "lora_unet_", KOHYA, alpha=2, flat=True)),
    "LoKr Z-Image": ("z-image", Layout(Z_IMAGE, "diffusion_model.", LOKR)),
}


def tensors_of(transformer: Any, layout: Layout, *, seed: int = 0, rank: int = RANK) -> dict[str, torch.Tensor]:
    """Returns the matrices of an adapter with random numbers, as a file of this layout names them."""
    numbers, tensors = torch.Generator().manual_seed(seed), dict[str, torch.Tensor]()
    for layer, named in layout.layers.items():
        outputs, inputs = transformer.get_submodule(layer).weight.shape
        shapes = ((4, 4), (outputs // 4, inputs // 4)) if layout.matrices is LOKR else ((rank, inputs), (outputs, rank))
        name = layout.prefix + (named or layer).replace(".", "_" if layout.flat else ".")
        for matrix, shape in zip(layout.matrices, shapes, strict=True):
            suffix = "" if layout.matrices is LOKR else ".weight"
            tensors[f"{name}.{matrix}{suffix}"] = 0.1 * torch.randn(shape, generator=numbers)
        if layout.alpha is not None:
            tensors[f"{name}.alpha"] = torch.tensor(layout.alpha)
    return tensors


def runner_of(folder: Path) -> DiffusionRunner:
    options = DiffusionOptions(dtype="float32", enable_lora=True, max_lora_rank=64, max_frames=9)
    return DiffusionRunner(folder, options, torch.device("cpu"))


@pytest.mark.parametrize("case", LAYOUTS)
def test_published_adapters_work_as_in_diffusers(
    case: str, tmp_path: Path, tiny_diffusion: Callable[[str], Path]
) -> None:
    model, layout = LAYOUTS[case]
    folder = tiny_diffusion(model)
    expected, runner = load(folder), runner_of(folder)
    plain = run_to_end(runner, inputs_of(model, SPEC))
    for seed, name in enumerate(("one", "two")):
        file = tmp_path / f"{name}.safetensors"
        save_file(tensors_of(expected.transformer, layout, seed=seed), file)
        expected.load_lora_weights(str(file), adapter_name=name)
        assert runner.adapters.load(name, str(file)) == (1 if layout.matrices is LOKR else RANK)
    for selection, names, scales in (("one", "one", 1.0), ("two*0.5+one*-0.25", ["two", "one"], [0.5, -0.25])):
        expected.set_adapters(names, scales)
        made = run_to_end(runner, replace(inputs_of(model, SPEC), adapter=selection))
        wanted = classic_image(model, expected, SPEC)
        assert np.array_equal(made, wanted.reshape(-1, *wanted.shape[-3:]).numpy())
        assert not np.allclose(made, plain, atol=1e-4)
    assert np.array_equal(run_to_end(runner, inputs_of(model, SPEC)), plain)


def test_each_transformer_of_wan_22_has_its_own_file(tmp_path: Path) -> None:
    folder = WRITERS["wan-2.2"](tmp_path / "model")
    expected, pipeline = load(folder), load(folder)
    for seed, noise in enumerate(("high", "low")):
        file = tmp_path / "lightning" / f"{noise}_noise_model.safetensors"
        file.parent.mkdir(exist_ok=True)
        save_file(tensors_of(expected.transformer, LAYOUTS["Lightning Wan"][1], seed=seed), file)
        expected.load_lora_weights(str(file), adapter_name=noise, load_into_transformer_2=noise == "low")
    adapters = ModelAdapters(pipeline, 64)
    for name, path in (("both", file.parent), ("low", file)):
        assert adapters.load(name, str(path)) == RANK
    for selection, names in (("both", ["high", "low"]), ("low", ["low"])):
        expected.set_adapters(names)
        adapters.select(selection, 1.0)
        assert torch.equal(classic_image("wan", pipeline, SPEC), classic_image("wan", expected, SPEC))
    adapters.unload("both")
    adapters.unload("low")
    assert torch.equal(classic_image("wan", pipeline, SPEC), classic_image("wan", load(folder), SPEC))


def test_a_folder_of_peft_equals_the_file_of_diffusers(tmp_path: Path, qwen_image: Path) -> None:
    runner, images = runner_of(qwen_image), list[Any]()
    for by in ("peft", "diffusers"):
        runner.adapters.load(by, str(write_lora(tmp_path / by, qwen_image, by=by)))
        images.append(run_to_end(runner, replace(inputs_of("qwen-image", SPEC), adapter=by)))
    assert np.array_equal(*images)


def _qwen(change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Any, Path], object]:
    """Returns a function that writes the diffusers layout with a change."""

    def write(transformer: Any, folder: Path) -> None:
        tensors = tensors_of(transformer, LAYOUTS["diffusers Qwen"][1])
        change(tensors)
        save_file(tensors, folder / "lora.safetensors")

    return write


def _written(name: str, data: bytes) -> Callable[[Any, Path], object]:
    return lambda _, folder: (folder / name).write_bytes(data)


def _truncated(transformer: Any, folder: Path) -> None:
    _qwen(lambda tensors: None)(transformer, folder)
    file = folder / "lora.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


Q = "transformer.transformer_blocks.0.attn.to_q"
BAD: Mapping[str, tuple[Callable[[Any, Path], object], str]] = {
    "NaN": (_qwen(lambda each: each[f"{Q}.lora_A.weight"].fill_(torch.nan)), r"to_q\.lora_A\.weight contains NaN"),
    "other size": (
        _qwen(lambda each: each.update({f"{Q}.lora_A.weight": torch.zeros(RANK, 96)})),
        "to_q has 96 inputs and 64 outputs in the adapter but 64 and 64 in the model",
    ),
    "two ranks": (
        _qwen(lambda each: each.update({f"{Q}.lora_A.weight": torch.zeros(5, 64)})),
        r"the two matrices of .*to_q do not fit: \[5, 64\] and \[64, 4\]",
    ),
    "one matrix": (_qwen(lambda each: each.pop(f"{Q}.lora_B.weight")), "to_q are not complete: 'lora_B.weight'"),
    "high rank": (
        lambda model, folder: save_file(
            tensors_of(model, LAYOUTS["Kohya Qwen"][1], rank=65), folder / "lora.safetensors"
        ),
        "has rank 65; the stage accepts a rank of at most 64",
    ),
    "other model": (
        lambda _, folder: save_file(
            {f"diffusion_model.blocks.0.self_attn.q.{name}.weight": torch.zeros(4, 4) for name in LORA},
            folder / "lora.safetensors",
        ),
        r"it changes blocks\.0\.self_attn\.q, which the model does not have; it belongs to another model",
    ),
    "text encoder": (
        _qwen(lambda each: each.update({f"text_encoder.q.{name}.weight": torch.zeros(4, 4) for name in LORA})),
        "it changes text_encoder.q.lora_A.weight; this stage accepts adapters of the transformer only",
    ),
    "DoRA": (_qwen(lambda each: each.update({f"{Q}.dora_scale": torch.ones(64)})), "it is a DoRA adapter"),
    "whole weights": (
        _qwen(lambda each: each.update({f"{Q}.weight": torch.ones(64, 64)})),
        "to_q.weight, which is not a matrix of a LoRA or LoKr",
    ),
    "LoRA and LoKr": (
        _qwen(lambda each: each.update({f"{Q.replace('to_q', 'to_k')}.{name}": torch.ones(8, 8) for name in LOKR})),
        "it contains LoRA and LoKr matrices",
    ),
    "difference": (
        _qwen(lambda each: each.update({"diffusion_model.norm.diff": torch.ones(2)})),
        "diffusers cannot convert it for QwenImage.*ValueError: .*norm.diff",
    ),
    "truncated": (_truncated, "diffusers cannot convert it .*SafetensorError"),
    "no safetensors": (_written("lora.safetensors", b"\x08"), "is not a safetensors file"),
    "pickle": (_written("pytorch_lora_weights.bin", b"\x80"), "pytorch_lora_weights.bin is a pickle, which may run"),
    "no file": (_written("README.md", b""), "it must contain one .safetensors file; it contains none"),
    "two files": (
        lambda _, folder: [save_file({"x": torch.ones(1)}, folder / f"{name}.safetensors") for name in "ab"],
        "it contains a.safetensors, b.safetensors; use the path of a file",
    ),
}


@pytest.fixture(scope="module")
def qwen_runner(qwen_image: Path) -> DiffusionRunner:
    return runner_of(qwen_image)


@pytest.mark.parametrize("case", BAD)
def test_a_bad_file_is_rejected_before_anything_changes(
    case: str, tmp_path: Path, qwen_runner: DiffusionRunner
) -> None:
    write, error = BAD[case]
    transformer = qwen_runner.pipeline.components.transformer
    write(transformer, tmp_path)
    with pytest.raises(InvalidRequestError, match=error):
        qwen_runner.adapters.load("bad", str(tmp_path))
    assert not hasattr(transformer, "peft_config")
