"""Real service processes: exit status, signals, and termination with the parent."""

import select
import signal
import subprocess
import sys
from contextlib import AbstractContextManager

import pytest

from tests.children import killed_at_end

SERVICE = """
import asyncio, sys
from stagemesh.common.errors import InvalidRequestError, NotReadyError
import time
from stagemesh.common.process.lifecycle import end_within, ended_when_stuck, run_service

async def main(stopping):
    match sys.argv[1]:
        case "wait":
            print("up", flush=True)
            await stopping.wait()
        case "port":
            raise NotReadyError("port 1 is in use", reason="PORT_IN_USE")
        case "model":
            raise NotReadyError("no model")
        case "config":
            raise InvalidRequestError("no such stage")
        case "stuck":
            async with ended_when_stuck(3):
                await asyncio.sleep(1.0)
                print("alive", flush=True)
                time.sleep(60)
        case "stays":
            end_within(0.5)
            await asyncio.Event().wait()
        case "bug":
            raise ValueError("a bug")

sys.exit(run_service(main))
"""

FAMILY = """
import os, subprocess, sys, time
from stagemesh.common.process.lifecycle import bind_forks_to_this_process, die_with_parent

how = sys.argv[1]
bind_forks_to_this_process()
if how == "fork":
    if os.fork() == 0:
        os.fork()
        os.write(1, b"%d\\n" % os.getpid())
        time.sleep(60)
else:
    code = f"import sys, time; sys.path[:] = {sys.path!r}; " + (
        "from stagemesh.common.process.lifecycle import die_with_parent; "
        f"die_with_parent({os.getpid()}); print(1, flush=True); time.sleep(60)"
    )
    subprocess.Popen([sys.executable, "-c", code])
time.sleep(60)
"""


@pytest.mark.parametrize(
    ("what", "status", "line"),
    [
        ("port", 6, "port 1 is in use"),
        ("model", 6, "no model"),
        ("config", 2, "no such stage"),
        ("bug", 1, "ValueError: a bug"),
    ],
)
def test_exit_status_shows_the_cause(what: str, status: int, line: str) -> None:
    result = _run(SERVICE, what)
    assert result.returncode == status
    assert line in result.stderr
    assert ("Traceback" in result.stderr) == (what == "bug")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_ends_in_order(number: signal.Signals) -> None:
    with _started(SERVICE, "wait") as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"up\n"
        process.send_signal(number)
        assert process.wait(timeout=10) == 0


@pytest.mark.parametrize(("how", "descendants"), [("fork", 2), ("spawn", 1)])
def test_children_end_with_a_killed_process(how: str, descendants: int) -> None:
    with _started(FAMILY, how) as process:
        assert process.stdout is not None
        for _ in range(descendants):
            assert process.stdout.readline().strip().isdigit()
        process.kill()
        # Every descendant holds the pipe open, so its end proves that all have terminated.
        ready, _, _ = select.select([process.stdout], [], [], 5)
        assert ready, "a descendant outlived its parent"
        assert process.stdout.read() == b""


def test_late_child_of_a_dead_parent_ends_at_once() -> None:
    code = "from stagemesh.common.process.lifecycle import die_with_parent; die_with_parent(1); print('alive')"
    result = _run(code)
    assert (result.returncode, result.stdout) == (1, "")


def test_a_blocked_event_loop_ends_the_process_and_reports_where() -> None:
    result = _run(SERVICE, "stuck")
    assert (result.returncode, result.stdout) == (1, "alive\n")
    assert "Timeout" in result.stderr
    assert "in main" in result.stderr


def test_a_process_that_does_not_end_in_time_is_ended() -> None:
    assert _run(SERVICE, "stays").returncode == 1


def _run(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)


def _started(code: str, argument: str) -> AbstractContextManager[subprocess.Popen[bytes]]:
    return killed_at_end(subprocess.Popen([sys.executable, "-c", code, argument], stdout=subprocess.PIPE))
