"""The lifecycle of a service process: config, event loop, signals, exit status, and termination with its parent."""

import argparse
import asyncio
import contextlib
import ctypes
import faulthandler
import logging
import os
import resource
import signal
import sys
from collections.abc import AsyncGenerator, Awaitable, Callable
from functools import partial
from pathlib import Path

import uvloop

from stagemesh.common.errors import ENGINE_DIED, ExitCode, InvalidRequestError, StagemeshError, exit_code
from stagemesh.common.process.config import STDIN, ConfigT, load_config
from stagemesh.common.process.logs import configure_logging

_log = logging.getLogger(__name__)
_PR_SET_PDEATHSIG = 1
_REARMS = 4

Main = Callable[[asyncio.Event], Awaitable[None]]


def run_service(main: Main, *, parent_pid: int | None = None) -> int:
    """Runs `main` to completion in an event loop. Returns the exit status for the process.

    The argument of `main` is an event that is set by SIGTERM and SIGINT. If `parent_pid` is not None, the kernel kills
    this process when the process `parent_pid` terminates.
    """
    if parent_pid is not None:
        die_with_parent(parent_pid)
    raise_open_files_limit()
    # What the process creates contains requests and outputs, so only its user may read it.
    os.umask(0o077)
    try:
        configure_logging()
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_until_stopped(main))
    except StagemeshError as exc:
        # The message is sufficient, and a traceback would hide it.
        _log.error("%s", exc.message)
        if exc.reason == ENGINE_DIED:
            # Python would wait for the engine's threads, which may never end.
            os._exit(exit_code(exc))
        return exit_code(exc)
    except Exception:  # noqa: BLE001
        _log.exception("the service terminates because of an unexpected error")
        return ExitCode.FAILED
    return 0


def raise_open_files_limit() -> None:
    """Lets this process open as many files and connections as the host allows."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


async def _until_stopped(main: Main) -> None:
    await main(stop_on_signals())


def stop_on_signals() -> asyncio.Event:
    """Returns an event that is set when the process receives SIGTERM or SIGINT.

    After this call, these signals no longer interrupt or end the process.
    """
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping.set)
    # In a container, the command line has blocked SIGTERM.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    return stopping


@contextlib.asynccontextmanager
async def ended_when_stuck(stuck_s: float) -> AsyncGenerator[None]:
    """Terminates the process with status 1 if its event loop is blocked for `stuck_s` seconds within this context.

    Prints all stacks to stderr before the process terminates. The check runs in a native thread, so that it also works
    while a thread holds the interpreter's lock. Use this context manager at most once in a process.
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
    """Terminates the process with status 1 after `limit_s` seconds, unless the process terminates earlier.

    Prints all stacks to stderr before termination. A later call replaces the time limit of an earlier call.
    """
    faulthandler.dump_traceback_later(limit_s, exit=True, file=sys.__stderr__ or 2)


def die_with_parent(expected_parent_pid: int) -> None:
    """Makes the kernel kill this process (SIGKILL) when its parent process terminates.

    Ends this process immediately if its current parent is not the process `expected_parent_pid`. In that case, the
    expected parent has already terminated. The kernel watches the thread that created this process, so that thread must
    live as long as the parent process. Does nothing on systems other than Linux.
    """
    if not sys.platform.startswith("linux"):
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    if os.getppid() != expected_parent_pid:
        os._exit(ExitCode.FAILED)


def bind_forks_to_this_process() -> None:
    """Makes all child processes that are forked later, and their own children, terminate with their parent process.

    Call this function once in a process. Spawned processes are not affected, because they start a new interpreter. A
    spawned process must call `die_with_parent` itself.
    """
    parent_pid = os.getpid()

    def in_child() -> None:
        nonlocal parent_pid
        expected, parent_pid = parent_pid, os.getpid()
        die_with_parent(expected)

    os.register_at_fork(after_in_child=in_child)


def run_configured(
    kind: type[ConfigT], serve: Callable[[ConfigT, asyncio.Event], Awaitable[None]], *, module: str
) -> int:
    """Runs a service process until SIGTERM or SIGINT. Returns the exit status of the process.

    Reads the process's config of type `kind` from the file that the command line option --config names. `serve`
    receives the config, and an event that is set by SIGTERM and SIGINT. `module` is the name of the Python module that
    was started.
    """
    parser = argparse.ArgumentParser(prog=f"python -m {module}", description=f"Run {module} until SIGTERM or SIGINT.")
    parser.add_argument(
        "--config",
        type=Path,
        required=True,
        help=f"Read the {kind.__name__} from this JSON file, or from standard input for {STDIN}. Required.",
    )
    try:
        config = load_config(kind, parser.parse_args().config)
    except InvalidRequestError as exc:
        sys.stderr.write(f"{exc.message}\n")
        return exit_code(exc)
    return run_service(partial(serve, config), parent_pid=config.parent_pid)
