"""Starts child processes, forks them from a process that has imported their code, and restarts them."""

import asyncio
import os
import signal
import sys
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from socket import socket
from typing import TypeAlias

import grpc.aio

from stagemesh.cli.launcher.probes import Observation, Probe, ProcessState, ProcessStatus
from stagemesh.cli.launcher.run_folder import read_tail
from stagemesh.common.backoff import Backoff
from stagemesh.common.errors import ExitCode, NotReadyError
from stagemesh.common.process.stage_process import ForkRequest, send_request, socket_pair
from stagemesh.rpc.channels import open_channel


class ForkedProcess:
    """A process that the fork server has forked. Has the interface of `asyncio.subprocess.Process`."""

    def __init__(self, process_id: int, reports: asyncio.StreamReader) -> None:
        self.pid = process_id
        self.returncode: int | None = None
        self._reports = reports

    async def wait(self) -> int:
        """Waits until the process has terminated. Returns its exit status, or the negative number of a signal."""
        if self.returncode is None:
            line = await self._reports.readline()
            # When the server ends, the kernel kills the processes that it has forked.
            self.returncode = int(line) if line else -signal.SIGKILL
        return self.returncode

    def terminate(self) -> None:
        """Sends SIGTERM. Raises ProcessLookupError if the process has terminated."""
        os.kill(self.pid, signal.SIGTERM)


Process: TypeAlias = asyncio.subprocess.Process | ForkedProcess


class ForkServer:
    """A process that imports libraries once, and forks the processes that need them."""

    def __init__(self, requests: socket) -> None:
        self._requests = requests

    @classmethod
    @asynccontextmanager
    async def running(cls, preload: str, *, log: Path) -> AsyncGenerator["ForkServer"]:
        """Runs a server, and kills it and all processes that it has forked when the block is exited.

        `preload` is the function that imports the libraries, as "module:function". If it is empty, the server imports
        only the stage runtime. The server writes its output to the file `log`.
        """
        command = [sys.executable, "-u", "-m", "stagemesh.services.stage.fork_server", "--parent-pid", str(os.getpid())]
        command += ["--preload", preload] if preload else []
        requests, served = socket_pair()
        with requests:
            with served:
                process = await start_process(command, log=log, stdin=served.fileno())
            try:
                yield cls(requests)
            finally:
                with suppress(ProcessLookupError):
                    process.kill()
                await process.wait()

    async def fork(self, config: Path, *, log: Path) -> ForkedProcess | None:
        """Forks a process of the stage whose config file is `config`. Appends its output to the file `log`.

        Waits until the libraries have been imported. Returns None if the server has ended.
        """
        reports = asyncio.StreamReader()
        reading, writing = os.pipe()
        # At the end of the file, the event loop closes it.
        pipe, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reports), os.fdopen(reading, "rb", buffering=0)
        )
        try:
            with log.open("ab") as output:
                send_request(self._requests, ForkRequest(config, output.fileno(), writing))
        except OSError:
            return None
        finally:
            os.close(writing)
        try:
            line = await reports.readline()
        except asyncio.CancelledError:
            # The server kills a process whose id it cannot report.
            pipe.close()
            raise
        return ForkedProcess(int(line), reports) if line else None


async def start_process(
    command: Sequence[str], *, log: Path, stdin: int = asyncio.subprocess.DEVNULL
) -> asyncio.subprocess.Process:
    """Starts `command` in a new process group. Appends its stdout and stderr to the file `log`."""
    # Not in a new session: Linux divides the processors between sessions first (sched_autogroup), and then makes a
    # stage that computes little wait for hundreds of milliseconds.
    with log.open("ab") as output:
        return await asyncio.create_subprocess_exec(
            *command, stdin=stdin, stdout=output, stderr=asyncio.subprocess.STDOUT, process_group=0
        )


_POLL_S = 0.2
_READY_POLL_S = 1.0
TERMINATE_S = 15.0
_HOPELESS = (ExitCode.USAGE, ExitCode.NOT_FOUND)
"""The exit statuses of processes that fail in the same way after a restart."""

Listener = Callable[[ProcessStatus], None]
"""A function that is called with a process's new status after each change of the process's state."""


@dataclass(frozen=True)
class ProcessSpec:
    """A process to supervise: its command, its log file, and a function that probes its state.

    `name` is the name of the replica, or of another process, such as "orchestrator". `stage` is empty for a process
    that serves no stage. `config` is the file that `command` reads.
    """

    name: str
    stage: str
    endpoint: str
    command: tuple[str, ...]
    log: Path
    probe: Probe
    config: Path | None = None
    fork_server: ForkServer | None = None
    """The server that forks the process with its `config`. None if `command` starts the process."""


@dataclass(frozen=True)
class RestartPolicy:
    """Limits the restarts of a process.

    The pause before the first restart is `first_pause_s` seconds. The pause doubles with each failure, up to
    `max_pause_s` seconds. The pause is reset after the process has been ready for `healthy_s` seconds.

    A process that has never been ready is abandoned after `quick_failures` failures. A failure that occurs `slow_s`
    seconds or more after the start counts twice. The reason is that slow failures, such as a model that cannot be
    loaded, rarely disappear after a restart. If the exit status says that the config is invalid or that something does
    not exist, the process is abandoned at once.
    """

    first_pause_s: float = 0.1
    max_pause_s: float = 5.0
    healthy_s: float = 10.0
    quick_failures: int = 5
    slow_s: float = 10.0


class RestartSchedule:
    """Decides whether and when one process is restarted, according to a RestartPolicy.

    Each `now_s` is the current time in seconds on a monotonic clock. All calls must use the same clock.
    """

    def __init__(self, policy: RestartPolicy) -> None:
        self._policy = policy
        self._retries = Backoff(first_s=policy.first_pause_s, longest_s=policy.max_pause_s).retries()
        self._cost = 0
        self._started_s = 0.0
        self._ready_s: float | None = None
        self._ever_ready = False

    def started(self, now_s: float) -> None:
        """Records a start of the process. Must be called at each start."""
        self._started_s = now_s
        self._ready_s = None

    @property
    def is_ready(self) -> bool:
        """Whether the process has become ready since its last start."""
        return self._ready_s is not None

    def ready(self, now_s: float) -> None:
        """Records that the process has become ready. Ignores further calls until the next start."""
        self._ever_ready = True
        self._ready_s = now_s if self._ready_s is None else self._ready_s

    def ended(self, now_s: float, *, status: int) -> float | None:
        """Records that the process has terminated although nothing had requested its termination.

        `status` is its exit status. Returns the pause in seconds before the process must be started again, or None if
        the process must be abandoned.
        """
        policy = self._policy
        if self._ready_s is not None and now_s - self._ready_s >= policy.healthy_s:
            self._retries.reset()
        self._cost += 1 if now_s - self._started_s < policy.slow_s else 2
        if not self._ever_ready and (status in _HOPELESS or self._cost >= policy.quick_failures):
            return None
        return self._retries.next_s()


async def end_process(process: Process, *, terminate_s: float = TERMINATE_S) -> None:
    """Waits until a process has terminated, and then kills all other processes of its process group.

    Sends SIGTERM to the process if it still runs, and waits at most `terminate_s` seconds before it is killed, too.
    """
    try:
        if process.returncode is None:
            with suppress(ProcessLookupError, TimeoutError):
                process.terminate()
                await asyncio.wait_for(process.wait(), terminate_s)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    await process.wait()


class Supervisor:
    """Supervises one process: starts it, observes its state, and restarts it when it terminates."""

    def __init__(self, spec: ProcessSpec, *, policy: RestartPolicy, listener: Listener) -> None:
        self._spec = spec
        self._schedule = RestartSchedule(policy)
        self._listener = listener
        self._process: Process | None = None
        self._failures = 0

    async def run(self) -> None:
        """Starts the process, and restarts it whenever it terminates. Runs until the calling task is cancelled.

        Stops the process when the task is cancelled. Raises NotReadyError (START_FAILED) if the process terminates
        repeatedly without ever becoming ready.
        """
        try:
            async with open_channel(self._spec.endpoint) as channel:
                while True:
                    status = await self._run_once(channel)
                    await self._wait_for_restart(status)
        finally:
            self._report(ProcessState.STOPPED)

    async def _run_once(self, channel: grpc.aio.Channel) -> int:
        process = self._process = await self._start()
        try:
            self._schedule.started(time.monotonic())
            self._report(ProcessState.STARTING)
            async with asyncio.TaskGroup() as tasks:
                observing = tasks.create_task(self._observe(channel))
                status = await process.wait()
                observing.cancel()
            return status
        finally:
            await end_process(process)
            self._process = None

    async def _start(self) -> Process:
        spec = self._spec
        if spec.fork_server is not None and spec.config is not None:
            self._report(ProcessState.STARTING, "importing libraries")
            if (forked := await spec.fork_server.fork(spec.config, log=spec.log)) is not None:
                return forked
        return await start_process(spec.command, log=spec.log)

    async def _observe(self, channel: grpc.aio.Channel) -> None:
        last: Observation | None = None
        while True:
            seen = await self._spec.probe(channel)
            if seen is not None and seen != last:
                self._report(seen.state, seen.detail)
                last = seen
            ready = seen is not None and seen.state is ProcessState.READY
            if ready:
                self._schedule.ready(time.monotonic())
            await asyncio.sleep(_READY_POLL_S if ready else _POLL_S)

    async def _wait_for_restart(self, status: int) -> None:
        if status == 0 and self._schedule.is_ready:
            # SIGTERM or an operator's restart requested the end.
            self._report(ProcessState.RESTARTING, "ended on request; restarts")
            return
        self._failures += 1
        pause_s = self._schedule.ended(time.monotonic(), status=status)
        if pause_s is None:
            raise self._start_error(status)
        cause = f": {read_tail(self._spec.log, lines=1)}" if status > 0 else ""
        detail = f"{_describe_exit(status)}; restarts in {pause_s:.1f} s; log: {self._spec.log}{cause}"
        self._report(ProcessState.RESTARTING, detail)
        await asyncio.sleep(pause_s)

    def _start_error(self, status: int) -> NotReadyError:
        spec = self._spec
        return NotReadyError(
            f"{spec.name} was never ready and ended {self._failures} times (last: it {_describe_exit(status)}); "
            f"its log {spec.log} ends with:\n{read_tail(spec.log)}",
            reason="START_FAILED",
            metadata={"replica": spec.name, "stage": spec.stage, "log": str(spec.log)},
        )

    def _report(self, state: ProcessState, detail: str = "") -> None:
        spec, process = self._spec, self._process
        process_id = process.pid if process is not None else None
        self._listener(ProcessStatus(spec.name, spec.stage, spec.endpoint, state, detail, process_id))


def _describe_exit(status: int) -> str:
    if status >= 0:
        return f"ended with exit status {status}"
    return f"was killed by {signal.Signals(-status).name}"
