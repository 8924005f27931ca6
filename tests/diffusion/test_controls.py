"""The controls of a diffusion engine: sleep, profiles and the prompt cache."""

import asyncio
import gc
import gzip
import json
import multiprocessing
from collections.abc import Callable, Coroutine
from concurrent.futures import ProcessPoolExecutor
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import psutil
import pytest
import torch
from pydantic import JsonValue

from stagemesh.common.errors import InvalidRequestError, NotReadyError
from stagemesh.common.wire.tensors import Array
from stagemesh.services.engines.abilities import CacheStatistics
from stagemesh.services.engines.diffusion.engine import DiffusionEngine
from stagemesh.services.engines.diffusion.options import DiffusionOptions
from stagemesh.services.engines.diffusion.state import DiffusionInputs
from stagemesh.services.engines.diffusion.worker import PROFILED_STEP, DiffusionWorker
from tests.diffusion.stages import image_task, made_frames
from tests.diffusion.tiny.calls import ImageSpec, diffusers
from tests.diffusion.tiny.pipelines import write_qwen_image
from tests.engines.support import controls_of, stage_config, started
from tests.module_fixtures import made_for_module
from tests.rpc.call_errors import raises

pytestmark = pytest.mark.timeout(180)

T = TypeVar("T")

MIB = 1 << 20
WEIGHTS_BYTES = 200 * MIB
STEPS = 3


model = made_for_module(lambda folder: write_qwen_image(folder / "qwen-image"))


@pytest.fixture(scope="module")
def large_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny pipeline whose transformer is larger than WEIGHTS_BYTES."""
    folder = write_qwen_image(tmp_path_factory.mktemp("large") / "qwen-image")
    config = json.loads((folder / "transformer" / "config.json").read_text())
    config["num_attention_heads"], config["num_layers"] = 16, 6
    transformer = diffusers.QwenImageTransformer2DModel.from_config(config)
    assert 4 * transformer.num_parameters() > WEIGHTS_BYTES
    transformer.save_pretrained(folder / "transformer")
    return folder


@pytest.mark.parametrize("level", [1, 2])
def test_sleep_frees_the_weights_memory_and_wake_restores_the_bits(large_model: Path, level: int) -> None:
    awake, asleep, woken = in_new_process(measure_sleep, large_model, level)
    assert asleep.bytes < awake.bytes - 0.9 * WEIGHTS_BYTES
    assert woken.bytes < awake.bytes + 0.1 * WEIGHTS_BYTES
    assert np.array_equal(woken.image, awake.image)


def test_repeated_sleep_leaks_no_memory(large_model: Path) -> None:
    before, after = in_new_process(measure_repeated_sleep, large_model)
    # Leaked weights would remain completely.
    assert after < before + 0.5 * WEIGHTS_BYTES


@pytest.mark.parametrize(("level", "hits"), [(1, 1), (2, 0)])
def test_sleep_level_1_keeps_the_prompt_cache_and_level_2_clears_it(model: Path, level: int, hits: int) -> None:
    worker = DiffusionWorker(model, DiffusionOptions(dtype="float32", device="cpu"))
    worker.load()
    inputs = DiffusionInputs(seed=0, prompt="red", height=64, width=64, num_inference_steps=2)
    worker.runner.begin("before", inputs)
    worker.sleep(level)
    assert worker.prompt_cache.statistics.entries == hits
    worker.wake()
    worker.runner.begin("after", inputs)
    assert worker.prompt_cache.statistics.hits == hits


async def test_a_sleeping_engine_lists_its_tags_and_rejects_tasks(model: Path) -> None:
    async with engine(model) as tested:
        await controls_of(tested).sleep.sleep(2)
        assert controls_of(tested).sleep.asleep() == ["buffers", "weights"]
        with pytest.raises(NotReadyError, match=r"is asleep \(buffers, weights\); wake it first"):
            await image(tested)
        await controls_of(tested).sleep.wake(["weights"])
        assert controls_of(tested).sleep.asleep() == ["buffers"]
        with pytest.raises(NotReadyError, match=r"is asleep \(buffers\)"):
            await image(tested)
        await controls_of(tested).sleep.wake(["buffers"])
        assert controls_of(tested).sleep.asleep() == []
        await image(tested)


async def test_an_unknown_level_or_tag_is_rejected(model: Path) -> None:
    async with engine(model) as tested:
        with pytest.raises(InvalidRequestError, match="level is 3; it must be 1"):
            controls_of(tested).sleep.check_sleep(3)
        await controls_of(tested).sleep.sleep(1)
        assert controls_of(tested).sleep.asleep() == ["weights"]
        with raises(InvalidRequestError, reason="UNKNOWN_TAG", match="kv_cache is not asleep; asleep: weights"):
            await controls_of(tested).sleep.wake(["kv_cache"])
        with pytest.raises(NotReadyError, match="is asleep"):
            await controls_of(tested).sleep.sleep(1)


async def test_wake_fails_if_the_weights_files_are_missing(model: Path) -> None:
    weights = next((model / "transformer").glob("*.safetensors"))
    async with engine(model) as tested:
        expected = await image(tested)
        await controls_of(tested).sleep.sleep(1)
        weights.rename(weights.with_suffix(".gone"))
        try:
            with pytest.raises(NotReadyError, match=r"the transformer of .* cannot be loaded"):
                await controls_of(tested).sleep.wake([])
            assert controls_of(tested).sleep.asleep() == ["weights"]
        finally:
            weights.with_suffix(".gone").rename(weights)
        await controls_of(tested).sleep.wake([])
        assert np.array_equal(await image(tested), expected)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
@pytest.mark.parametrize("level", [1, 2])
async def test_a_sleeping_engine_frees_gpu_memory(large_model: Path, level: int) -> None:
    async with engine(large_model, device="cuda") as tested:
        expected = await image(tested)
        await controls_of(tested).sleep.sleep(level)
        # torch keeps cuBLAS's workspace, which has 32 MiB on a Hopper GPU.
        assert torch.cuda.memory_reserved() < 0.1 * WEIGHTS_BYTES + 32 * MIB
        await controls_of(tested).sleep.wake([])
        assert np.array_equal(await image(tested), expected)


# -- profiles


@pytest.mark.parametrize(("max_steps", "steps"), [(None, STEPS), (2, 2)])
async def test_a_profile_is_written_to_the_requested_folder(
    model: Path, tmp_path: Path, max_steps: int | None, steps: int
) -> None:
    async with engine(model, profile_dir=str(tmp_path)) as tested:
        folder = await controls_of(tested).profiles.start("night/one", max_steps=max_steps)
        await image(tested)
        (file,) = await controls_of(tested).profiles.stop()
    assert Path(file).parent == Path(folder) == tmp_path / "night" / "one"
    assert steps_in(file) == steps
    assert names_in(tmp_path) == ["night"]


async def test_profiles_are_rejected_without_a_profile_folder(model: Path) -> None:
    async with engine(model) as tested:
        with pytest.raises(NotReadyError, match="profile_dir"):
            await controls_of(tested).profiles.start("x", max_steps=None)


# -- the prompt cache


async def test_repeated_prompts_are_hits(model: Path) -> None:
    async with engine(model, prompt_cache_bytes=MIB) as tested:
        assert controls_of(tested).caches.cache_statistics() == CacheStatistics(limit_bytes=MIB)
        made = [await image(tested, prompt) for prompt in ("a cat", "a dog", "a cat")]
        assert np.array_equal(made[0], made[2])
        figures = controls_of(tested).caches.cache_statistics()
    assert (figures.entries, figures.hits, figures.misses) == (2, 1, 2)
    assert 0 < figures.size_bytes <= figures.limit_bytes == MIB


async def test_a_cleared_cache_is_empty_and_keeps_its_counters(model: Path) -> None:
    async with engine(model, prompt_cache_bytes=MIB) as tested:
        await image(tested)
        await controls_of(tested).caches.clear_caches(preempt=False)
        assert controls_of(tested).caches.cache_statistics() == CacheStatistics(limit_bytes=MIB, misses=1)
        await image(tested)
        assert controls_of(tested).caches.cache_statistics().misses == 2


def engine(model: Path, **options: JsonValue) -> AbstractAsyncContextManager[DiffusionEngine]:
    given = {"dtype": "float32", "device": "cpu"} | options
    return started(DiffusionEngine(stage_config("diffusion", model=str(model), options=given)))


async def image(engine: DiffusionEngine, prompt: str = "red") -> Array:
    return await made_frames(engine, image_task(ImageSpec(prompt=prompt, negative_prompt="blur", seed=7, steps=STEPS)))


@dataclass
class Measured:
    """Memory in bytes, and the image that the engine then generated, which is empty while it sleeps."""

    bytes: int
    image: Array


async def measure_sleep(model: Path, level: int) -> list[Measured]:
    """Measures an engine awake, asleep and awake again."""
    async with engine(model) as tested:
        # A stage process freezes loaded objects as well.
        gc.collect()
        gc.freeze()
        first = await image(tested)
        measured = [Measured(used_bytes(), first)]
        await controls_of(tested).sleep.sleep(level)
        measured.append(Measured(used_bytes(), np.empty(0)))
        await controls_of(tested).sleep.wake([])
        again = await image(tested)
        return [*measured, Measured(used_bytes(), again)]


async def measure_repeated_sleep(model: Path) -> tuple[int, int]:
    """Measures an engine before and after it slept three times."""
    async with engine(model) as tested:
        await image(tested)
        before = used_bytes()
        for _ in range(3):
            await controls_of(tested).sleep.sleep(2)
            await controls_of(tested).sleep.wake([])
        await image(tested)
        return before, used_bytes()


def in_new_process(measure: Callable[..., Coroutine[Any, Any, T]], *args: Any) -> T:
    """Runs a coroutine in a new process, where no memory is left over from other tests."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as process:
        return process.submit(run_measurement, measure, args).result()


def run_measurement(measure: Callable[..., Coroutine[Any, Any, T]], args: tuple[Any, ...]) -> T:
    """Runs a coroutine. For another process, which cannot receive a coroutine."""
    return asyncio.run(measure(*args))


def used_bytes() -> int:
    """Returns this process's proportional set size without libraries, whose share grows when other processes end."""
    return sum(region.pss for region in psutil.Process().memory_maps() if ".so" not in region.path)


def names_in(folder: Path) -> list[str]:
    return [each.name for each in folder.iterdir()]


def steps_in(file: str) -> int:
    with gzip.open(file) as trace:
        names = [event.get("name") for event in json.load(trace)["traceEvents"]]
    assert "aten::scaled_dot_product_attention" in names
    return names.count(PROFILED_STEP)
