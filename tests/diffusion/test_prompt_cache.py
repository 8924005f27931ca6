"""Operators' statistics and clearing of the prompt cache."""

from collections.abc import AsyncGenerator
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio
from pydantic import JsonValue

from stagemesh.services.engines.abilities import CacheStatistics
from stagemesh.services.engines.base import Task
from stagemesh.services.engines.diffusion.engine import DiffusionEngine
from tests.diffusion.tiny.pipelines import WRITERS
from tests.engines.support import collect, controls_of, packets, stage_config

pytestmark = pytest.mark.timeout(180)

LIMIT_BYTES = 1 << 20


@pytest_asyncio.fixture
async def engine(tmp_path: Path) -> AsyncGenerator[DiffusionEngine]:
    options: dict[str, JsonValue] = {
        "dtype": "float32",
        "device": "cpu",
        "height": 64,
        "width": 64,
        "num_inference_steps": 2,
    }
    options["prompt_cache_bytes"] = LIMIT_BYTES
    model = str(WRITERS["qwen-image"](tmp_path))
    made = DiffusionEngine(stage_config("diffusion", model=model, options=options))
    await made.start(lambda _: None)
    yield made
    await made.close()


def task(prompt: str) -> Task:
    return Task("r", 1, prompt=prompt)


async def test_repeated_prompts_are_hits(engine: DiffusionEngine) -> None:
    assert controls_of(engine).caches.cache_statistics() == CacheStatistics(limit_bytes=LIMIT_BYTES)
    made = [packets(await collect(engine.submit(task(prompt))))[-1] for prompt in ("a cat", "a dog", "a cat")]
    assert np.array_equal(made[0].tensors["frames"], made[2].tensors["frames"])
    figures = controls_of(engine).caches.cache_statistics()
    assert (figures.entries, figures.hits, figures.misses) == (2, 1, 2)
    assert 0 < figures.size_bytes <= figures.limit_bytes == LIMIT_BYTES


async def test_a_cleared_cache_is_empty_and_keeps_its_counters(engine: DiffusionEngine) -> None:
    await collect(engine.submit(task("a cat")))
    await controls_of(engine).caches.clear_caches(preempt=False)
    assert controls_of(engine).caches.cache_statistics() == CacheStatistics(limit_bytes=LIMIT_BYTES, misses=1)
    await collect(engine.submit(task("a cat")))
    assert controls_of(engine).caches.cache_statistics().misses == 2
