import asyncio
import os
import signal
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from stagemesh.cli.launcher import ORCHESTRATOR, Launcher, ProcessState, ProcessStatus, RestartPolicy
from stagemesh.client import AsyncClient
from stagemesh.common.errors import NotReadyError
from stagemesh.pipeline import load_pipeline
from tests.rpc.call_errors import raises

LISTEN = "127.0.0.1:0"


class Events:
    """Records the statuses that a launcher reports."""

    def __init__(self) -> None:
        self._queue: asyncio.Queue[ProcessStatus] = asyncio.Queue()

    def __call__(self, status: ProcessStatus) -> None:
        self._queue.put_nowait(status)

    async def until(self, wanted: Callable[[ProcessStatus], bool]) -> ProcessStatus:
        """Returns the next status that fulfils a condition."""
        while not wanted(status := await self._queue.get()):
            pass
        return status


def _launcher(pipeline: Path, *, events: Events | None = None, listen: str = LISTEN) -> Launcher:
    return Launcher(load_pipeline(str(pipeline)), listen=listen, listener=events)


def _process_ids(launcher: Launcher) -> list[int]:
    return [status.process_id for status in launcher.processes.values() if status.process_id is not None]


def _left_over(pipeline: Path, pattern: str) -> int:
    return len(list(pipeline.parent.glob(f"home/runs/*/{pattern}")))


def _is_alive(process_id: int) -> bool:
    try:
        os.kill(process_id, 0)
    except ProcessLookupError:
        return False
    return True


async def test_a_pipeline_starts_answers_and_leaves_only_its_logs(tiny: Path) -> None:
    stopped: list[str] = []

    def note(status: ProcessStatus) -> None:
        if status.state is ProcessState.STOPPED:
            stopped.append(status.name)

    overrides = {"stages.second.replicas": "2"}
    loaded = load_pipeline(str(tiny), overrides=overrides)
    launcher = Launcher(loaded, listen=LISTEN, overrides=overrides, listener=note)
    async with launcher.running(), AsyncClient(launcher.endpoint) as client:
        await launcher.wait_ready()
        result = await client.generate("hello", seed=1).result()
        endpoints = {status.endpoint for status in launcher.processes.values()}
        process_ids = _process_ids(launcher)
    assert result.text.startswith("Step 0 is ")
    assert [edge.edge for edge in result.finished.edges] == ["first->second"]
    assert set(launcher.processes) == {ORCHESTRATOR, "first-0", "second-0", "second-1"}
    assert len(endpoints) == len(process_ids) == 4
    # The orchestrator stops before the stages that its requests need.
    assert (stopped[0], sorted(stopped[1:])) == (ORCHESTRATOR, ["first-0", "second-0", "second-1"])
    assert not any(_is_alive(process_id) for process_id in process_ids)
    # The fork server has a log, too.
    assert (_left_over(tiny, "*.json"), _left_over(tiny, "*.log")) == (0, 5)


async def test_a_killed_stage_is_restarted_and_serves(tiny: Path) -> None:
    events = Events()
    launcher = _launcher(tiny, events=events)
    async with launcher.running(), AsyncClient(launcher.endpoint) as client:
        await launcher.wait_ready()
        endpoint, victim = launcher.processes["second-0"].endpoint, launcher.processes["second-0"].process_id
        assert victim is not None
        os.kill(victim, signal.SIGKILL)
        await events.until(lambda status: status.state is ProcessState.RESTARTING)
        await events.until(lambda status: (status.name, status.state) == ("second-0", ProcessState.READY))
        assert launcher.processes["second-0"].endpoint == endpoint
        assert (await client.generate("hello", timeout_s=20).result()).text


async def test_an_error_in_the_body_stops_all_processes(tiny: Path) -> None:
    launcher = _launcher(tiny)
    with pytest.raises(ZeroDivisionError):
        async with launcher.running():
            await launcher.wait_ready()
            process_ids = _process_ids(launcher)
            raise ZeroDivisionError
    assert len(process_ids) == 3
    assert not any(_is_alive(process_id) for process_id in process_ids)


async def test_a_port_in_use_is_reported_before_any_process_starts(tiny: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = holder.getsockname()[1]
        launcher = _launcher(tiny, listen=f"127.0.0.1:{port}")
        with raises(NotReadyError, reason="PORT_IN_USE", match=f"{port}.*--port"):
            async with launcher.running():
                pass
    assert _left_over(tiny, "*") == 0


async def test_a_stage_that_cannot_start_ends_the_launcher_with_the_cause(tiny: Path) -> None:
    overrides = {"stages.first.options.memory_bytes": "1000000000000000"}
    policy = RestartPolicy(first_pause_s=0.01, max_pause_s=0.02, quick_failures=2)
    loaded = load_pipeline(str(tiny), overrides=overrides)
    launcher = Launcher(loaded, listen=LISTEN, overrides=overrides, policy=policy)
    with pytest.raises(NotReadyError, match=r"(?s)first-0 .*ended 2 times.*cannot allocate 1000000000000000 bytes"):
        async with launcher.running():
            await launcher.wait_ready()
    assert not any(_is_alive(process_id) for process_id in _process_ids(launcher))
