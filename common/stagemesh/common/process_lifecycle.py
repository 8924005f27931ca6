"""The life of a service process: its loop, its signals, its exit status, and its end with its parent."""

import asyncio
import contextlib
import ctypes
import faulthandler
import logging
import os
import signal
import sys
from collections.abc import AsyncGenerator, Awaitable, Callable

import uvloop

from stagemesh.common.errors import StagemeshError
from stagemesh.common.logs import configure_logging

_log = logging.getLogger(__name__)

EXIT_FAILED = 1
EXIT_CANNOT_LISTEN = 3
_CANNOT_LISTEN = frozenset({"PORT_IN_USE", "CANNOT_LISTEN"})
_PR_SET_PDEATHSIG = 1
_REARMS = 4

Main = Callable[[asyncio.Event], Awaitable[None]]


def run_service(main: Main, *, parent_pid: int | None = None) -> int:
    """Runs `main` to its end and returns the process's exit status.

    SIGTERM and SIGINT set the event that `main` is given. With `parent_pid` the process is killed when that one ends.
    """
    configure_logging()
    if parent_pid is not None:
        die_with_parent(parent_pid)
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_until_stopped(main))
    except StagemeshError as exc:
        # The message says it all; a traceback would bury it.
        _log.error("%s", exc.message)
        return EXIT_CANNOT_LISTEN if exc.reason in _CANNOT_LISTEN else EXIT_FAILED
    except Exception:  # noqa: BLE001
        _log.exception("the service ends because of an unexpected error")
        return EXIT_FAILED
    return 0


async def _until_stopped(main: Main) -> None:
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping.set)
    await main(stopping)


@contextlib.asynccontextmanager
async def ended_when_stuck(stuck_s: float) -> AsyncGenerator[None]:
    """Ends the process (status 1) when its event loop stands still for so long; stderr gets the stacks of its threads.

    Once a process. A thread that no lock of the interpreter holds up sees to it.
    """

    async def rearm() -> None:
        while True:
            end_within(stuck_s)
            await asyncio.sleep(stuck_s / _REARMS)

    rearming = asyncio.create_task(rearm(), name="show that the loop runs")
    try:
        yield
    finally:
        rearming.cancel()
        faulthandler.cancel_dump_traceback_later()


def end_within(limit_s: float) -> None:
    """Ends the process (status 1) unless it has ended, or said this again, within so many seconds."""
    faulthandler.dump_traceback_later(limit_s, exit=True, file=sys.__stderr__ or 2)


def die_with_parent(expected_parent_pid: int) -> None:
    """Has the kernel kill this process (SIGKILL) when its parent ends; ends at once if that has happened already.

    The kernel watches the parent's thread that made this process: make it from a thread that lives as long as the
    process. Does nothing where the system is not Linux.
    """
    if not sys.platform.startswith("linux"):
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    if os.getppid() != expected_parent_pid:
        os._exit(EXIT_FAILED)


class _ForkGuard:
    """Knows, in a child just forked, which process made it."""

    def __init__(self) -> None:
        self._pid = os.getpid()

    def in_child(self) -> None:
        parent_pid, self._pid = self._pid, os.getpid()
        die_with_parent(parent_pid)


def bind_forks_to_this_process() -> None:
    """Has every process forked from here on, and those that they fork, end with its parent. Once a process.

    Processes that are spawned (a fresh interpreter) call `die_with_parent` themselves, first thing.
    """
    os.register_at_fork(after_in_child=_ForkGuard().in_child)
