"""Supervised processes: how they start, stop and restart."""

import asyncio
import os
import signal
import sys
import time
from pathlib import Path

import pytest

from stagemesh.cli.launcher.probes import ProcessState, ProcessStatus
from stagemesh.cli.launcher.supervisor import Process, RestartPolicy, RestartSchedule, end_process, start_process
from stagemesh.common.errors import ExitCode, NotReadyError
from tests.launcher.processes import SLEEPER, STUBBORN, Supervised, ended
from tests.rpc.call_errors import raises


def _kill(status: ProcessStatus, number: signal.Signals) -> None:
    assert status.process_id is not None
    os.kill(status.process_id, number)


async def test_a_killed_process_is_restarted(tmp_path: Path) -> None:
    supervised = Supervised(tmp_path, SLEEPER)
    async with supervised.running() as first:
        _kill(first, signal.SIGKILL)
        assert "SIGKILL" in (await supervised.until(ProcessState.RESTARTING)).detail
        assert (await supervised.until(ProcessState.READY)).process_id != first.process_id


async def test_cancelling_stops_the_process(tmp_path: Path) -> None:
    supervised = Supervised(tmp_path, SLEEPER)
    async with supervised.running() as status:
        pass
    with pytest.raises(ProcessLookupError):
        _kill(status, signal.SIGTERM)
    assert (await supervised.until(ProcessState.STOPPED)).process_id is None


async def test_a_process_that_ended_on_request_is_restarted_at_once(tmp_path: Path) -> None:
    supervised = Supervised(tmp_path, SLEEPER)
    async with supervised.running() as first:
        _kill(first, signal.SIGTERM)
        assert (await supervised.until(ProcessState.RESTARTING)).detail == "ended on request; restarts"
        await supervised.until(ProcessState.READY)


async def test_a_process_that_is_never_ready_is_abandoned_with_the_end_of_its_log(tmp_path: Path) -> None:
    supervised = Supervised(tmp_path, "import sys; sys.stderr.write('no such weights'); sys.exit(1)")
    with raises(NotReadyError, reason="START_FAILED", match=r"(?s)p-0 .*3 times.*exit status 1.*no such weights"):
        await supervised.supervisor.run()


def _live(
    schedule: RestartSchedule, *, start_s: float, end_s: float, ready_s: float | None = None, status: int = 1
) -> float | None:
    schedule.started(start_s)
    if ready_s is not None:
        schedule.ready(ready_s)
    return schedule.ended(end_s, status=status)


@pytest.fixture
def schedule() -> RestartSchedule:
    return RestartSchedule(RestartPolicy())


def test_pauses_double_up_to_five_seconds(schedule: RestartSchedule) -> None:
    pauses = [_live(schedule, start_s=t, ready_s=t, end_s=t + 1) for t in range(8)]
    assert pauses == [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0]


def test_ten_seconds_of_health_reset_the_pause(schedule: RestartSchedule) -> None:
    _live(schedule, start_s=0, ready_s=0, end_s=1)
    _live(schedule, start_s=1, ready_s=1, end_s=2)
    assert _live(schedule, start_s=2, ready_s=3, end_s=13) == 0.1


def test_a_process_that_was_never_ready_is_abandoned(schedule: RestartSchedule) -> None:
    pauses = [_live(schedule, start_s=t, end_s=t + 1) for t in range(5)]
    assert [pause is None for pause in pauses] == [False, False, False, False, True]


@pytest.mark.parametrize("status", [ExitCode.USAGE, ExitCode.NOT_FOUND])
def test_a_process_that_cannot_start_is_not_restarted(schedule: RestartSchedule, status: int) -> None:
    assert _live(schedule, start_s=0, end_s=1, status=status) is None


def test_a_process_that_was_ready_is_always_restarted(schedule: RestartSchedule) -> None:
    assert _live(schedule, start_s=0, ready_s=0, end_s=1, status=ExitCode.USAGE) is not None


def test_slow_failures_are_abandoned_after_fewer_restarts(schedule: RestartSchedule) -> None:
    pauses = [_live(schedule, start_s=t, end_s=t + 20) for t in (0, 30, 60)]
    assert [pause is None for pause in pauses] == [False, False, True]


def test_a_process_that_was_ready_once_is_never_abandoned(schedule: RestartSchedule) -> None:
    _live(schedule, start_s=0, ready_s=0, end_s=1)
    assert all(_live(schedule, start_s=t, end_s=t + 1) is not None for t in range(20))


SPAWNER = "import subprocess; print(subprocess.Popen(['sleep', '60']).pid, flush=True); "


async def _start(program: str, *, log: Path) -> tuple[Process, str]:
    """Returns a child that has written its first line, and the line."""
    child = await start_process((sys.executable, "-c", program), log=log)
    return child, await asyncio.to_thread(_first_line, log)


def _first_line(log: Path) -> str:
    while not (text := log.read_text()).endswith("\n"):
        time.sleep(0.01)
    return text.splitlines()[0]


async def test_sigterm_ends_a_well_behaved_process(tmp_path: Path) -> None:
    child, _ = await _start(SLEEPER, log=tmp_path / "log")
    await end_process(child)
    assert await child.wait() == 0


async def test_a_stubborn_process_is_killed(tmp_path: Path) -> None:
    child, _ = await _start(STUBBORN, log=tmp_path / "log")
    await end_process(child, terminate_s=0.1)
    assert await child.wait() == -9


@pytest.mark.parametrize("ending", ["raise SystemExit(3)", "import time; time.sleep(60)"])
async def test_descendants_never_outlive_the_process(tmp_path: Path, ending: str) -> None:
    child, descendant = await _start(SPAWNER + ending, log=tmp_path / "log")
    if "sleep" not in ending:
        await child.wait()
    await end_process(child)
    assert await asyncio.to_thread(ended, int(descendant))


async def test_a_child_leads_a_process_group(tmp_path: Path) -> None:
    child, _ = await _start(SLEEPER, log=tmp_path / "log")
    assert os.getpgid(child.pid) == child.pid
    await end_process(child)
