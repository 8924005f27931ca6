import asyncio
import os
import signal
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from stagemesh.cli.launcher import ORCHESTRATOR, Launcher, ProcessState, ProcessStatus
from stagemesh.cli.launcher.supervisor import RestartPolicy
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

    async def until(self, name: str, state: ProcessState) -> ProcessStatus:
        """Returns the next status of a process with this state."""
        while (status := await self._queue.get()).name != name or status.state is not state:
            pass
        return status

    async def kill(self, victim: ProcessStatus) -> ProcessStatus:
        """Kills a process. Returns the status of the process that replaces it when that is ready."""
        assert victim.process_id is not None
        os.kill(victim.process_id, signal.SIGKILL)
        await self.until(victim.name, ProcessState.RESTARTING)
        return await self.until(victim.name, ProcessState.READY)


def make_launcher(
    pipeline: Path, *, listen: str = LISTEN, overrides: Mapping[str, str] | None = None, **options: Any
) -> Launcher:
    """Returns a launcher for a pipeline file. `options` are further arguments of Launcher."""
    loaded = load_pipeline(str(pipeline), overrides=overrides)
    return Launcher(loaded, listen=listen, overrides=overrides, **options)


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

    launcher = make_launcher(tiny, overrides={"stages.second.replicas": "2"}, listener=note)
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
    launcher = make_launcher(tiny, listener=events)
    async with launcher.running(), AsyncClient(launcher.endpoint) as client:
        await launcher.wait_ready()
        endpoint = launcher.processes["second-0"].endpoint
        await events.kill(launcher.processes["second-0"])
        assert launcher.processes["second-0"].endpoint == endpoint
        assert (await client.generate("hello", timeout_s=20).result()).text


async def test_an_error_in_the_body_stops_all_processes(tiny: Path) -> None:
    launcher = make_launcher(tiny)
    with pytest.raises(ZeroDivisionError):
        async with launcher.running():
            await launcher.wait_ready()
            process_ids = _process_ids(launcher)
            raise ZeroDivisionError
    assert len(process_ids) == 3
    assert not any(_is_alive(process_id) for process_id in process_ids)


@pytest.mark.parametrize(("address", "option"), [("listen", "--port"), ("gateway_listen", "--gateway")])
async def test_a_port_in_use_is_reported_before_any_process_starts(tiny: Path, address: str, option: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = holder.getsockname()[1]
        addresses: dict[str, Any] = {address: f"127.0.0.1:{port}"}
        launcher = make_launcher(tiny, **addresses)
        with raises(NotReadyError, reason="PORT_IN_USE", match=f"{port}.*{option}"):
            async with launcher.running():
                pass
    assert (_left_over(tiny, "*"), launcher.processes) == (0, {})


async def test_a_stage_that_cannot_start_ends_the_launcher_with_the_cause(tiny: Path) -> None:
    overrides = {"stages.first.options.memory_bytes": "1000000000000000"}
    launcher = make_launcher(tiny, overrides=overrides)
    launcher._policy = RestartPolicy(first_pause_s=0.01, max_pause_s=0.02, quick_failures=2)
    with pytest.raises(NotReadyError, match=r"(?s)first-0 .*ended 2 times.*cannot allocate 1000000000000000 bytes"):
        async with launcher.running():
            await launcher.wait_ready()
    assert not any(_is_alive(process_id) for process_id in _process_ids(launcher))
