"""Supervises one process: starts it, observes its state, and restarts it when it ends."""

import asyncio
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import grpc.aio

from stagemesh.common.errors import NotReadyError
from stagemesh.orchestrator.launcher.child import Child
from stagemesh.orchestrator.launcher.probes import Observation, Probe
from stagemesh.orchestrator.launcher.process_states import ProcessState, ProcessStatus
from stagemesh.orchestrator.launcher.restart_policy import RestartPolicy, RestartSchedule
from stagemesh.orchestrator.launcher.run_folder import read_tail
from stagemesh.rpc.channels import open_channel

_POLL_S = 0.2
_READY_POLL_S = 1.0

Listener = Callable[[ProcessStatus], None]
"""A function that is called with the new status after each change of a process's state."""


@dataclass(frozen=True)
class ProcessSpec:
    """A process to supervise: its command, its log file, and a function that probes its state."""

    name: str
    stage: str
    endpoint: str
    command: tuple[str, ...]
    log: Path
    probe: Probe


class Supervisor:
    """Supervises one process: starts it, observes its state, and restarts it when it ends."""

    def __init__(self, spec: ProcessSpec, *, policy: RestartPolicy, listener: Listener) -> None:
        self._spec = spec
        self._schedule = RestartSchedule(policy)
        self._listener = listener
        self._child: Child | None = None
        self._failures = 0
        self._was_ready = False
        """Whether the process has become ready since its last start."""

    async def run(self) -> None:
        """Starts the process, and restarts it whenever it ends. Stops the process when this task is cancelled.

        Raises NotReadyError (START_FAILED) if the process ends repeatedly without ever becoming ready.
        """
        try:
            async with open_channel(self._spec.endpoint) as channel:
                while True:
                    status = await self._run_once(channel)
                    await self._wait_for_restart(status)
        finally:
            self._report(ProcessState.STOPPED)

    async def _run_once(self, channel: grpc.aio.Channel) -> int:
        child = self._child = await Child.start(self._spec.command, log=self._spec.log)
        try:
            self._schedule.started(time.monotonic())
            self._was_ready = False
            self._report(ProcessState.STARTING)
            async with asyncio.TaskGroup() as tasks:
                observing = tasks.create_task(self._observe(channel))
                status = await child.wait()
                observing.cancel()
            return status
        finally:
            await child.stop()
            self._child = None

    async def _observe(self, channel: grpc.aio.Channel) -> None:
        last: Observation | None = None
        while True:
            seen = await self._spec.probe(channel)
            if seen is not None and seen != last:
                self._report(seen.state, seen.detail)
                last = seen
            ready = seen is not None and seen.state is ProcessState.READY
            if ready:
                self._was_ready = True
                self._schedule.ready(time.monotonic())
            await asyncio.sleep(_READY_POLL_S if ready else _POLL_S)

    async def _wait_for_restart(self, status: int) -> None:
        if status == 0 and self._was_ready:
            # SIGTERM or an operator's restart requested the end.
            self._report(ProcessState.RESTARTING, "ended on request; restarts")
            return
        self._failures += 1
        pause_s = self._schedule.ended(time.monotonic())
        if pause_s is None:
            raise self._start_error(status)
        detail = f"{_describe_exit(status)}; restarts in {pause_s:.1f} s; log: {self._spec.log}"
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
        spec, child = self._spec, self._child
        process_id = child.process_id if child is not None else None
        self._listener(ProcessStatus(spec.name, spec.stage, spec.endpoint, state, detail, process_id))


def _describe_exit(status: int) -> str:
    if status >= 0:
        return f"ended with exit status {status}"
    return f"was killed by {signal.Signals(-status).name}"
