import asyncio
import os
import sys
import time
from pathlib import Path

import pytest

from stagemesh.cli.launcher.supervisor import Child
from tests.launcher.processes import SLEEPER, STUBBORN, ended

SPAWNER = "import subprocess; print(subprocess.Popen(['sleep', '60']).pid, flush=True); "


async def _start(program: str, *, log: Path) -> tuple[Child, str]:
    """Returns a child that has written its first line, and the line."""
    child = await Child.start((sys.executable, "-c", program), log=log)
    return child, await asyncio.to_thread(_first_line, log)


def _first_line(log: Path) -> str:
    while not (text := log.read_text()).endswith("\n"):
        time.sleep(0.01)
    return text.splitlines()[0]


async def test_sigterm_ends_a_well_behaved_process(tmp_path: Path) -> None:
    child, _ = await _start(SLEEPER, log=tmp_path / "log")
    await child.stop()
    assert await child.wait() == 0


async def test_a_stubborn_process_is_killed(tmp_path: Path) -> None:
    child, _ = await _start(STUBBORN, log=tmp_path / "log")
    await child.stop(terminate_s=0.1)
    assert await child.wait() == -9


@pytest.mark.parametrize("ending", ["raise SystemExit(3)", "import time; time.sleep(60)"])
async def test_descendants_never_outlive_the_process(tmp_path: Path, ending: str) -> None:
    child, descendant = await _start(SPAWNER + ending, log=tmp_path / "log")
    await child.stop() if "sleep" in ending else await child.wait()
    assert await asyncio.to_thread(ended, int(descendant))


async def test_a_child_leads_a_process_group(tmp_path: Path) -> None:
    child, _ = await _start(SLEEPER, log=tmp_path / "log")
    assert os.getpgid(child.process_id) == child.process_id
    await child.stop()
