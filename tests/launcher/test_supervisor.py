import asyncio
import os
import signal
from pathlib import Path

import pytest

from stagemesh.common.errors import NotReadyError
from stagemesh.orchestrator.launcher.process_states import ProcessState
from tests.launcher.processes import SLEEPER, Watched


async def test_a_killed_process_is_started_again(tmp_path: Path) -> None:
    watched = Watched(tmp_path, SLEEPER)
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(watched.supervisor.run())
        first = await watched.until(ProcessState.READY)
        assert first.process_id is not None
        os.kill(first.process_id, signal.SIGKILL)
        assert "SIGKILL" in (await watched.until(ProcessState.RESTARTING)).detail
        second = await watched.until(ProcessState.READY)
        running.cancel()
    assert second.process_id != first.process_id


async def test_cancelling_stops_the_process(tmp_path: Path) -> None:
    watched = Watched(tmp_path, SLEEPER)
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(watched.supervisor.run())
        status = await watched.until(ProcessState.READY)
        running.cancel()
    assert status.process_id is not None
    with pytest.raises(ProcessLookupError):
        os.kill(status.process_id, 0)
    assert (await watched.until(ProcessState.STOPPED)).process_id is None


async def test_what_ended_as_it_was_asked_to_is_started_again_at_once(tmp_path: Path) -> None:
    watched = Watched(tmp_path, SLEEPER)
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(watched.supervisor.run())
        first = await watched.until(ProcessState.READY)
        assert first.process_id is not None
        os.kill(first.process_id, signal.SIGTERM)
        restarting = await watched.until(ProcessState.RESTARTING)
        await watched.until(ProcessState.READY)
        running.cancel()
    assert restarting.detail == "ended as it was asked to; starts again"


async def test_what_never_comes_up_is_given_up_with_its_last_words(tmp_path: Path) -> None:
    watched = Watched(tmp_path, "import sys; sys.stderr.write('no such weights'); sys.exit(1)")
    with pytest.raises(NotReadyError, match=r"(?s)p-0 .*3 times.*exit status 1.*no such weights") as caught:
        await watched.supervisor.run()
    assert caught.value.reason == "START_FAILED"
