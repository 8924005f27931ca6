"""Several worker processes compute the same images as one."""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import pytest_asyncio

from stagemesh.common.errors import InvalidRequestError, NotReadyError, UnavailableError
from stagemesh.conformance.replicas import until
from stagemesh.services.engines.base import Checkpoint, Paused, Progress, Task
from stagemesh.services.engines.diffusion import STATE
from stagemesh.services.engines.diffusion.engine import DiffusionEngine
from tests.children import commands_of_children
from tests.diffusion.stages import image_task, made_frames, started
from tests.diffusion.tiny.calls import ImageSpec
from tests.engines.support import collect, controls_of, stage_config
from tests.rpc.call_errors import raises

# Each process imports torch and diffusers, which takes up to 15 seconds on a busy machine.
pytestmark = [pytest.mark.timeout(240), pytest.mark.asyncio(loop_scope="module")]

TOLERANCE = 5e-6
"""For float32 images in [0, 1] whose matrices are split differently or aligned differently in memory."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def one(qwen_image: Path) -> AsyncIterator[DiffusionEngine]:
    async with engine(qwen_image, checkpoint_steps=2) as made:
        yield made


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def branches(qwen_image: Path) -> AsyncIterator[DiffusionEngine]:
    """An engine of two processes, each of which computes one guidance branch."""
    async with engine(qwen_image, cfg=2) as made:
        yield made


async def test_parallel_guidance_branches_give_the_same_bits(one: DiffusionEngine, branches: DiffusionEngine) -> None:
    for wanted in TASKS:
        assert np.array_equal(await made_frames(branches, wanted), await made_frames(one, wanted))


async def test_requests_that_share_steps_get_the_same_images(one: DiffusionEngine, branches: DiffusionEngine) -> None:
    images = await asyncio.gather(*(made_frames(branches, wanted) for wanted in TASKS))
    for made, wanted in zip(images, TASKS, strict=True):
        assert np.allclose(made, await made_frames(one, wanted), rtol=0, atol=TOLERANCE)


async def test_a_request_of_one_process_resumes_in_two(one: DiffusionEngine, branches: DiffusionEngine) -> None:
    paused = (await collect(one.submit(task("red", max_steps=2))))[-1]
    assert isinstance(paused, Paused)
    made = await made_frames(branches, task("red", resume_from=paused.checkpoint))
    assert np.array_equal(made, await made_frames(one, task("red")))


async def test_a_bad_request_fails_alone_with_its_reason(branches: DiffusionEngine) -> None:
    with raises(InvalidRequestError, reason="INVALID_CHECKPOINT", match="the checkpoint has no tensor"):
        await made_frames(branches, task("red", resume_from=Checkpoint(1)))
    garbage = Checkpoint(1, tensors={STATE: np.zeros(64, np.uint8)})
    with raises(InvalidRequestError, reason="INVALID_CHECKPOINT", match="cannot be read"):
        await made_frames(branches, task("red", resume_from=garbage))
    await made_frames(branches, task("red"))


async def test_processes_sleep_and_wake_together(one: DiffusionEngine, branches: DiffusionEngine) -> None:
    await controls_of(branches).sleep.sleep(1)
    assert controls_of(branches).sleep.asleep() == ["weights"]
    await controls_of(branches).sleep.wake([])
    assert np.array_equal(await made_frames(branches, task("red")), await made_frames(one, task("red")))


@pytest.mark.parametrize("parallel", [{"ulysses": 2}, pytest.param({"hsdp": 2}, marks=pytest.mark.soak)])
async def test_tokens_and_weights_are_split(one: DiffusionEngine, qwen_image: Path, parallel: dict[str, int]) -> None:
    async with engine(qwen_image, **parallel) as two:
        for _ in range(2):
            for wanted in TASKS:
                made = await made_frames(two, wanted)
                assert np.allclose(made, await made_frames(one, wanted), rtol=0, atol=TOLERANCE)
            await controls_of(two).sleep.sleep(2)
            await controls_of(two).sleep.wake([])


async def test_a_killed_worker_fails_its_requests_with_its_name(qwen_image: Path) -> None:
    async with engine(qwen_image, cfg=2) as two:
        running = asyncio.ensure_future(collect(two.submit(task("long", steps=200))))
        failed = asyncio.ensure_future(two.wait_failed())
        async for event in two.submit(task("short", steps=50)):
            if isinstance(event, Progress):
                break
        os.kill(max(workers()), signal.SIGKILL)
        with pytest.raises(UnavailableError, match=r"rank 1 of 2 has ended with exit status -9 \(SIGKILL\)"):
            await running
        assert "rank 1 of 2" in await failed
        with pytest.raises(UnavailableError, match="rank 1 of 2"):
            await made_frames(two, task("red"))


@pytest.mark.parametrize("parallel", [{}, pytest.param({"hsdp": 2}, marks=pytest.mark.soak)])
async def test_closing_ends_requests_and_processes(qwen_image: Path, parallel: dict[str, int]) -> None:
    async with engine(qwen_image, **parallel) as made:
        running = made.submit(task("long", side=256, steps=200))
        async for event in running:
            if isinstance(event, Progress):
                break
    with pytest.raises(UnavailableError, match=r"closed|ended"):
        await collect(running)


async def test_no_worker_outlives_its_stage_process() -> None:
    parent = await asyncio.create_subprocess_exec(sys.executable, "-c", _PARENT, stdout=asyncio.subprocess.PIPE)
    assert parent.stdout is not None
    worker = psutil.Process(int(await parent.stdout.readline()))
    assert worker.is_running()
    parent.kill()
    await parent.wait()
    await until(lambda: not _lives(worker), timeout_s=10)


@pytest.mark.soak
async def test_a_model_whose_tokens_cannot_be_split_is_rejected(tiny_diffusion: Callable[[str], Path]) -> None:
    with raises(NotReadyError, reason="UNSUPPORTED_MODEL", match="SD3Transformer2DModel cannot be shared by 2 ranks"):
        async with engine(tiny_diffusion("sd3"), ulysses=2):
            pass


def task(prompt: str, *, side: int = 64, steps: int = 4, scale: float = 3.0, **more: object) -> Task:
    return image_task(ImageSpec(prompt, seed=7, height=side, steps=steps, scale=scale), prompt, **more)


TASKS = [task("red"), task("a small blue ball", side=96, steps=5), task("no guidance", scale=1.0, steps=3)]


@asynccontextmanager
async def engine(model: Path, *, checkpoint_steps: int = 0, **parallel: int) -> AsyncIterator[DiffusionEngine]:
    """Starts an engine. Checks at its end that no process remains."""
    before = workers()
    options: dict[str, Any] = {"dtype": "float32", "device": "cpu", "checkpoint_steps": checkpoint_steps}
    config = stage_config("diffusion", model=str(model), options=options | {"parallel": parallel})
    try:
        async with started(config) as made:
            yield made
    finally:
        assert workers() == before


def _lives(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


_PARENT = """
import asyncio
from stagemesh.services.engines.diffusion.executor import start_rank

async def main():
    rank = await start_rank("rank 0 of 1")
    print(rank._process.pid, flush=True)
    await rank.wait_ended()

asyncio.run(main())
"""


def workers() -> set[int]:
    """Returns the process ids of this process's workers. Later workers have higher ids."""
    children = commands_of_children(psutil.Process())
    return {each.pid for each, command in children.items() if "diffusion.rank_main" in command}
