"""Stage processes that are forks of one process, which has imported the libraries of their engines."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import psutil
import pytest

from stagemesh.cli.launcher.supervisor import ForkedProcess, ForkServer, end_process
from stagemesh.common.process.config import dump_config
from stagemesh.common.process.stage_process import StageConfig
from tests.launcher.processes import ended

HOLDER = """
import asyncio, sys
from pathlib import Path
from stagemesh.cli.launcher.supervisor import ForkServer

async def main(config, log):
    async with ForkServer.running("", log=log) as server:
        print((await server.fork(config, log=log)).pid, flush=True)
        await asyncio.Event().wait()

asyncio.run(main(*map(Path, sys.argv[1:])))
"""
PRELOAD = "tests.launcher.test_fork_server:preload"


def preload() -> Callable[[], None]:
    """Imports nothing. The server calls it in its own process."""
    print("imported", flush=True)
    return lambda: None


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[ForkServer]:
    async with ForkServer.running(PRELOAD, log=tmp_path / "server.log") as running:
        yield running


def _config(folder: Path, *, name: str = "a-0") -> Path:
    file = folder / f"{name}.json"
    file.write_bytes(dump_config(StageConfig("p", "g", "a", name, "fake", "127.0.0.1:0", function="source")))
    return file


async def _start(server: ForkServer, folder: Path, *, name: str = "a-0") -> tuple[ForkedProcess, psutil.Process]:
    """Returns a child that the server has forked, and the child's process, when the child is ready."""
    log = folder / f"{name}.log"
    forked = await server.fork(_config(folder, name=name), log=log)
    assert forked is not None
    while "ready\n" not in log.read_text():
        await asyncio.sleep(0.01)
    return forked, psutil.Process(forked.pid)


def _parent(process: psutil.Process) -> psutil.Process:
    parent = process.parent()
    assert parent is not None
    return parent


def _descriptors(process: psutil.Process) -> set[str]:
    """Returns the pipes and sockets that a process has open."""
    links = [str(path.readlink()) for path in Path(f"/proc/{process.pid}/fd").iterdir()]
    return {link for link in links if link.startswith(("pipe:", "socket:"))}


async def test_a_forked_stage_serves_until_it_is_stopped(server: ForkServer, tmp_path: Path) -> None:
    child, process = await _start(server, tmp_path)
    assert os.getpgid(process.pid) == process.pid
    await end_process(child)
    assert await child.wait() == 0
    assert (tmp_path / "server.log").read_text() == "imported\n"


async def test_the_signal_that_killed_a_forked_stage_is_reported(server: ForkServer, tmp_path: Path) -> None:
    child, process = await _start(server, tmp_path)
    process.kill()
    assert await child.wait() == -signal.SIGKILL


async def test_a_forked_stage_has_no_descriptors_of_the_server(server: ForkServer, tmp_path: Path) -> None:
    first, one = await _start(server, tmp_path)
    second, other = await _start(server, tmp_path, name="a-1")
    assert not _descriptors(_parent(one)) & (_descriptors(one) | _descriptors(other))
    assert not _descriptors(one) & _descriptors(other)
    await asyncio.gather(end_process(first), end_process(second))


async def test_a_cancelled_start_leaves_no_process(server: ForkServer, tmp_path: Path) -> None:
    starting = asyncio.create_task(server.fork(_config(tmp_path), log=tmp_path / "a-0.log"))
    await asyncio.sleep(0.01)
    starting.cancel()
    child, process = await _start(server, tmp_path, name="a-1")
    assert _parent(process).children() == [process]
    await end_process(child)


async def test_forked_stages_end_with_the_server(server: ForkServer, tmp_path: Path) -> None:
    child, process = await _start(server, tmp_path)
    _parent(process).kill()
    assert await child.wait() == -signal.SIGKILL
    assert await asyncio.to_thread(ended, process.pid)


async def test_a_process_is_started_directly_when_the_server_has_ended(server: ForkServer, tmp_path: Path) -> None:
    _, process = await _start(server, tmp_path)
    parent = _parent(process)
    parent.kill()
    await asyncio.to_thread(ended, parent.pid)
    assert await server.fork(_config(tmp_path), log=tmp_path / "a-0.log") is None


def test_the_server_and_its_stages_end_with_a_killed_launcher(tmp_path: Path) -> None:
    command = [sys.executable, "-c", HOLDER, str(_config(tmp_path)), str(tmp_path / "log")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as launcher:
        assert launcher.stdout is not None
        stage = psutil.Process(int(launcher.stdout.readline()))
        server = _parent(stage)
        launcher.kill()
        assert ended(server.pid)
        assert ended(stage.pid)
