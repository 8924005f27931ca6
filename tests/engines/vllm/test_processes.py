"""The processes of the vllm engine: their death is reported, and none outlives its stage."""

import asyncio
import multiprocessing
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, cast

import psutil
import pytest

from stagemesh.common.errors import UnavailableError
from stagemesh.services.engines.base import SamplingOptions, Task
from stagemesh.services.engines.vllm.engine import VllmEngine
from tests.children import commands_of_children, killed_at_end
from tests.engines.support import collect, stage_config
from tests.engines.vllm.tiny_model import OPTIONS, write_tiny_model
from tests.module_fixtures import made_for_module

pytestmark = pytest.mark.timeout(180)

LONG = Task("r", 3, "hi", sampling=SamplingOptions(max_tokens=240))


model = made_for_module(write_tiny_model)


async def test_dead_core_is_reported(model: Path) -> None:
    engine = VllmEngine(stage_config("vllm", model=str(model), options=OPTIONS))
    before = {child.pid for child in multiprocessing.active_children()}
    await engine.start(lambda _: None)
    (core,) = [psutil.Process(child.pid) for child in multiprocessing.active_children() if child.pid not in before]
    # Long enough that the process is killed first.
    core.suspend()
    running = asyncio.create_task(collect(engine.submit(LONG)))
    async with asyncio.timeout(10):
        while not engine.load().running:
            await asyncio.sleep(0.01)
        core.kill()
        with pytest.raises(UnavailableError, match="vLLM failed"):
            await running
        assert "died" in await engine.wait_failed()
    await engine.close()


async def test_a_core_that_ends_while_it_is_killed_leaves_nothing(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.engine import utils

    def end_at_the_last_moment(cores: Sequence[BaseProcess], *, timeout: float | None) -> None:
        for core in cores:
            core.kill()
            core.join(timeout)
        raise psutil.NoSuchProcess(0)

    engine = VllmEngine(stage_config("vllm", model=str(model), options=OPTIONS))
    before = set(multiprocessing.active_children())
    await engine.start(lambda _: None)
    resources = cast("Any", engine.control.llm.engine_core).resources
    assert not resources.output_socket.closed
    monkeypatch.setattr(utils, "shutdown", end_at_the_last_moment)
    await engine.close()
    async with asyncio.timeout(10):
        while not (resources.output_socket.closed and resources.input_socket.closed):
            await asyncio.sleep(0.01)
        await asyncio.wait([resources.output_queue_task])
    assert resources.output_socket.closed
    assert resources.input_socket.closed
    assert set(multiprocessing.active_children()) <= before


def cores(process: psutil.Process) -> list[psutil.Process]:
    """Returns the live child processes of the engine, without Python's resource tracker."""
    return [child for child, command in commands_of_children(process).items() if "resource_tracker" not in command]


def _command(model: Path, start: str, load_format: str) -> list[str]:
    return [sys.executable, "-m", "tests.engines.vllm.engine_process", str(model), start, load_format]


@contextmanager
def host(model: Path, *, start: str) -> Iterator[psutil.Process]:
    """Starts a process with a running engine. `start` is "spawned" or "forked", the way its engine core starts."""
    command = _command(model, start, "dummy")
    with killed_at_end(subprocess.Popen(command, stdout=subprocess.PIPE, text=True)) as process:
        assert process.stdout is not None
        assert "ready\n" in iter(process.stdout.readline, "")
        yield psutil.Process(process.pid)


@pytest.mark.parametrize("start", ["spawned", "forked"])
def test_no_process_outlives_a_killed_stage(model: Path, start: str) -> None:
    before = set(Path("/dev/shm").iterdir())
    with host(model, start=start) as process:
        children = process.children(recursive=True)
        assert children
        process.kill()
        _, alive = psutil.wait_procs(children, timeout=3)
    assert alive == []
    assert set(Path("/dev/shm").iterdir()) <= before


def test_a_dead_forked_core_ends_its_stage(model: Path) -> None:
    with host(model, start="forked") as process:
        # A spawned core would have a resource tracker as its sibling.
        (core,) = process.children()
        core.kill()
        assert process.wait(timeout=20) == 1


def test_a_forked_core_tells_its_stage_why_it_cannot_load(model: Path) -> None:
    ran = subprocess.run(_command(model, "forked", "auto"), stderr=subprocess.PIPE, text=True, check=False)
    assert ran.returncode == 1
    last = ran.stderr.splitlines()[-1]
    assert "NotReadyError: stage tested: vLLM cannot load" in last
    assert "RuntimeError: Cannot find any model weights" in last
