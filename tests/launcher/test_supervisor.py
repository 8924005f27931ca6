import asyncio
import os
import signal
from pathlib import Path

import pytest

from stagemesh.cli.launcher.probes import ProcessState
from stagemesh.common.errors import NotReadyError
from tests.launcher.processes import SLEEPER, Supervised


async def test_a_killed_process_is_restarted(tmp_path: Path) -> None:
    supervised = Supervised(tmp_path, SLEEPER)
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(supervised.supervisor.run())
        first = await supervised.until(ProcessState.READY)
        assert first.process_id is not None
        os.kill(first.process_id, signal.SIGKILL)
        assert "SIGKILL" in (await supervised.until(ProcessState.RESTARTING)).detail
        second = await supervised.until(ProcessState.READY)
        running.cancel()
    assert second.process_id != first.process_id


async def test_cancelling_stops_the_process(tmp_path: Path) -> None:
    supervised = Supervised(tmp_path, SLEEPER)
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(supervised.supervisor.run())
        status = await supervised.until(ProcessState.READY)
        running.cancel()
    assert status.process_id is not None
    with pytest.raises(ProcessLookupError):
        os.kill(status.process_id, 0)
    assert (await supervised.until(ProcessState.STOPPED)).process_id is None


async def test_a_process_that_ended_on_request_is_restarted_at_once(tmp_path: Path) -> None:
    supervised = Supervised(tmp_path, SLEEPER)
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(supervised.supervisor.run())
        first = await supervised.until(ProcessState.READY)
        assert first.process_id is not None
        os.kill(first.process_id, signal.SIGTERM)
        restarting = await supervised.until(ProcessState.RESTARTING)
        await supervised.until(ProcessState.READY)
        running.cancel()
    assert restarting.detail == "ended on request; restarts"


async def test_a_process_that_is_never_ready_is_abandoned_with_the_end_of_its_log(tmp_path: Path) -> None:
    supervised = Supervised(tmp_path, "import sys; sys.stderr.write('no such weights'); sys.exit(1)")
    with pytest.raises(NotReadyError, match=r"(?s)p-0 .*3 times.*exit status 1.*no such weights") as caught:
        await supervised.supervisor.run()
    assert caught.value.reason == "START_FAILED"
