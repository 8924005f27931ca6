"""Operators' statistics and clearing of the prompt cache."""

from collections.abc import AsyncGenerator
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio

from stagemesh.services.engines.abilities import CacheStatistics
from stagemesh.services.engines.base import Task
from stagemesh.services.engines.diffusion.engine import DiffusionEngine
from tests.diffusion.stages import diffusion_config, made_frames, started
from tests.engines.support import collect, controls_of

pytestmark = pytest.mark.timeout(180)

LIMIT_BYTES = 1 << 20


@pytest_asyncio.fixture
async def engine(qwen_image: Path) -> AsyncGenerator[DiffusionEngine]:
    options = {"num_inference_steps": 2, "prompt_cache_bytes": LIMIT_BYTES}
    async with started(diffusion_config("qwen-image", qwen_image, **options)) as made:
        yield made


def task(prompt: str) -> Task:
    return Task("r", 1, prompt=prompt)


async def test_repeated_prompts_are_hits(engine: DiffusionEngine) -> None:
    assert controls_of(engine).caches.cache_statistics() == CacheStatistics(limit_bytes=LIMIT_BYTES)
    made = [await made_frames(engine, task(prompt)) for prompt in ("a cat", "a dog", "a cat")]
    assert np.array_equal(made[0], made[2])
    figures = controls_of(engine).caches.cache_statistics()
    assert (figures.entries, figures.hits, figures.misses) == (2, 1, 2)
    assert 0 < figures.size_bytes <= figures.limit_bytes == LIMIT_BYTES


async def test_a_cleared_cache_is_empty_and_keeps_its_counters(engine: DiffusionEngine) -> None:
    await collect(engine.submit(task("a cat")))
    await controls_of(engine).caches.clear_caches(preempt=False)
    assert controls_of(engine).caches.cache_statistics() == CacheStatistics(limit_bytes=LIMIT_BYTES, misses=1)
    await collect(engine.submit(task("a cat")))
    assert controls_of(engine).caches.cache_statistics().misses == 2
