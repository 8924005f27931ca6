"""LoRA adapters of a diffusion stage are loaded and unloaded while it serves requests with different adapters."""

import asyncio
import json
from collections.abc import AsyncGenerator
from contextlib import aclosing
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import pytest_asyncio
import torch
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
from safetensors.torch import save_file

from stagemesh.common import errors
from stagemesh.services.engines.abilities import Adapter
from stagemesh.services.engines.base import Emission, Task
from stagemesh.services.engines.diffusion.engine import DiffusionEngine
from tests.diffusion.stages import image_options, image_task, made_frames, painting
from tests.diffusion.tiny.calls import ImageSpec, classic_image, diffusers, load
from tests.engines.support import controls_of

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


pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(120)]

SPEC = ImageSpec(steps=3)


@pytest.fixture(scope="module")
def adapters(qwen_image: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("adapters")
    write_lora(folder / "first", qwen_image, by="diffusers", seed=1)
    write_lora(folder / "second", qwen_image, by="peft", seed=2)
    write_lora(folder / "large", qwen_image, by="peft", rank=16)
    return folder


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def with_lora(qwen_image: Path) -> AsyncGenerator[DiffusionEngine]:
    async with painting(qwen_image, enable_lora=True, max_loras=2, max_lora_rank=8, max_batch=8) as made:
        yield made


@pytest_asyncio.fixture(loop_scope="module")
async def engine(with_lora: DiffusionEngine) -> AsyncGenerator[DiffusionEngine]:
    """An engine without adapters at the begin of each test."""
    yield with_lora
    for adapter in controls_of(with_lora).adapters.list_adapters():
        await controls_of(with_lora).adapters.unload(adapter.name, drain=True)


def task(adapter: str | None = None, *, name: str = "r", **options: float) -> Task:
    return image_task(SPEC, name, adapter=adapter, options=image_options(SPEC) | options)


async def test_an_adapter_works_as_in_diffusers(engine: DiffusionEngine, qwen_image: Path, adapters: Path) -> None:
    await controls_of(engine).adapters.load("first", str(adapters / "first"))
    for scale in (1.0, 0.5):
        expected = lora_image(qwen_image, adapters / "first", SPEC, scale=scale)
        assert np.allclose(await made_frames(engine, task("first", adapter_scale=scale)), expected, atol=1e-5)


async def test_other_requests_get_the_same_bits(engine: DiffusionEngine, qwen_image: Path, adapters: Path) -> None:
    await controls_of(engine).adapters.load("first", str(adapters / "first"))
    await made_frames(engine, task("first"))
    plain = torch.tensor(await made_frames(engine, task()))
    assert torch.equal(plain, classic_image("qwen-image", load(qwen_image), SPEC))


async def test_requests_with_different_adapters_take_turns(engine: DiffusionEngine, adapters: Path) -> None:
    for name in ("second", "first"):
        folder = str(adapters / name)
        assert await controls_of(engine).adapters.load(name, folder) == Adapter(name, folder, rank=4)
    await controls_of(engine).adapters.pin("first")
    listed = controls_of(engine).adapters.list_adapters()
    assert [(each.name, each.pinned) for each in listed] == [("first", True), ("second", False)]
    with pytest.raises(errors.OverloadedError, match=r"has 2 adapters, its max_loras \(first, second\)"):
        await controls_of(engine).adapters.load("third", str(adapters / "first"))
    tasks = [task("first"), task("second", name="s"), task(name="t"), task("first", name="u", adapter_scale=0.25)]
    tasks += [task("first*0.5+second", name="v"), task("second+first*0.5", name="w", adapter_scale=-1)]
    alone = [await made_frames(engine, each) for each in tasks]
    together = await asyncio.gather(*(made_frames(engine, each) for each in tasks))
    assert all(np.array_equal(*each) for each in zip(alone, together, strict=True))
    assert len({each.tobytes() for each in alone}) == len(tasks)


async def test_unloading_waits_for_running_requests(engine: DiffusionEngine, adapters: Path) -> None:
    await controls_of(engine).adapters.load("first", str(adapters / "first"))
    expected = await made_frames(engine, task("first"))
    async with aclosing(engine.submit(task("first"))) as events:
        await anext(events)
        with pytest.raises(errors.NotReadyError, match="used by 1 requests"):
            await controls_of(engine).adapters.unload("first", drain=False)
        unloading = asyncio.create_task(controls_of(engine).adapters.unload("first", drain=True))
        frames = [event.packet.tensors["frames"] async for event in events if isinstance(event, Emission)]
    await unloading
    assert np.array_equal(frames[-1], expected)
    assert not controls_of(engine).adapters.list_adapters()
    await made_frames(engine, task())


async def test_a_reloaded_adapter_gives_the_same_bits(engine: DiffusionEngine, adapters: Path) -> None:
    await controls_of(engine).adapters.load("first", str(adapters / "first"))
    expected = await made_frames(engine, task("first"))
    await controls_of(engine).adapters.unload("first", drain=False)
    await controls_of(engine).adapters.load("first", str(adapters / "first"))
    assert np.array_equal(await made_frames(engine, task("first")), expected)


async def test_an_unknown_adapter_fails_its_request_alone(engine: DiffusionEngine, adapters: Path) -> None:
    await controls_of(engine).adapters.load("first", str(adapters / "first"))
    expected = await made_frames(engine, task("first"))
    other = asyncio.create_task(made_frames(engine, task("first")))
    with pytest.raises(errors.NotFoundError, match="has no adapter 'missing'; loaded: first"):
        await made_frames(engine, task("missing"))
    assert np.array_equal(await other, expected)


@pytest.mark.parametrize(
    ("names", "kind", "error"),
    [
        (("large", "large"), errors.InvalidRequestError, "rank 16; .* a rank of at most 8, its option max_lora_rank"),
        (("gone", "gone"), errors.InvalidRequestError, "it must be an absolute path of a folder"),
        (("a b", "first"), errors.InvalidRequestError, "an adapter's name is 'a b'"),
        (("known", "second"), errors.ExistsError, "is loaded from"),
    ],
)
async def test_an_adapter_that_cannot_be_loaded_is_rejected(
    engine: DiffusionEngine, adapters: Path, names: tuple[str, str], kind: type[errors.StagemeshError], error: str
) -> None:
    name, folder = names
    await controls_of(engine).adapters.load("known", str(adapters / "first"))
    expected = await made_frames(engine, task("known"))
    with pytest.raises(kind, match=error):
        await controls_of(engine).adapters.load(name, str(adapters / folder))
    assert [each.name for each in controls_of(engine).adapters.list_adapters()] == ["known"]
    assert np.array_equal(await made_frames(engine, task("known")), expected)


TO_Q = "base_model.model.transformer_blocks.{}.attn.to_q"
DIFFUSERS, PEFT = "pytorch_lora_weights.safetensors", "adapter_model.safetensors"
"""The files into which these libraries write weights."""


@pytest.mark.parametrize(
    ("layer", "written", "error"),
    [
        (TO_Q.format(0), {"inputs": 96}, "has 96 inputs and 64 outputs in the adapter but 64 and 64 in the"),
        (TO_Q.format(7), {}, "which the model does not have; it belongs to another"),
        ("text_encoder.layers.0.q_proj", {"file": DIFFUSERS}, "this stage accepts adapters of the transformer only"),
    ],
    ids=["other size", "other layer", "text encoder"],
)
async def test_an_adapter_of_another_model_is_rejected(
    engine: DiffusionEngine, tmp_path: Path, layer: str, written: dict[str, Any], error: str
) -> None:
    write_matrices(tmp_path, layer, **written)
    with pytest.raises(errors.InvalidRequestError, match=error):
        await controls_of(engine).adapters.load("wrong", str(tmp_path))


async def test_a_stage_without_adapter_support_rejects_adapters(qwen_image: Path, adapters: Path) -> None:
    async with painting(qwen_image) as plain:
        with pytest.raises(errors.NotReadyError, match="start it with the option enable_lora"):
            await controls_of(plain).adapters.load("first", str(adapters / "first"))
        with pytest.raises(errors.NotFoundError, match="without the option enable_lora"):
            await made_frames(plain, task("first"))
        with pytest.raises(errors.InvalidRequestError, match="unknown option 'adapter_scale'"):
            await made_frames(plain, task(adapter_scale=1.0))


def write_matrices(folder: Path, layer: str, *, inputs: int = 64, file: str = PEFT) -> None:
    matrices = {"lora_A": torch.zeros(4, inputs), "lora_B": torch.zeros(64, 4)}
    save_file({f"{layer}.{name}.weight": matrix for name, matrix in matrices.items()}, folder / file)
    if file == PEFT:
        (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 4, "target_modules": []}))
