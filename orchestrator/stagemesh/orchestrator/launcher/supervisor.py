"""Keeps one process running: starts it, watches it come up, starts it again when it ends."""

import asyncio
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from stagemesh.common.errors import NotReadyError
from stagemesh.orchestrator.launcher.child import Child
from stagemesh.orchestrator.launcher.probes import Observation, Probe
from stagemesh.orchestrator.launcher.process_states import ProcessState, ProcessStatus
from stagemesh.orchestrator.launcher.restart_policy import RestartPolicy, RestartSchedule
from stagemesh.orchestrator.launcher.run_folder import read_tail

_POLL_S = 0.2
_READY_POLL_S = 1.0

Report = Callable[[ProcessStatus], None]


@dataclass(frozen=True)
class ProcessSpec:
    """A process to be kept running."""

    name: str
    stage: str
    endpoint: str
    command: tuple[str, ...]
    log: Path
    make_probe: Callable[[str], Probe]


class Supervisor:
    """One process over all its lives."""

    def __init__(self, spec: ProcessSpec, *, policy: RestartPolicy, report: Report) -> None:
        self._spec = spec
        self._schedule = RestartSchedule(policy)
        self._report = report
        self._child: Child | None = None
        self._failures = 0
        self._was_ready = False
        """In the life that goes on, or the last one."""

    async def run(self) -> None:
        """Keeps the process running until cancelled, which stops it; raises NotReadyError to give up."""
        probe = self._spec.make_probe(self._spec.endpoint)
        try:
            while True:
                status = await self._live(probe)
                await self._wait_for_restart(status)
        finally:
            await probe.close()
            self._tell(ProcessState.STOPPED)

    async def _live(self, probe: Probe) -> int:
        child = self._child = await Child.start(self._spec.command, log=self._spec.log)
        try:
            self._schedule.started(time.monotonic())
            self._was_ready = False
            self._tell(ProcessState.STARTING)
            async with asyncio.TaskGroup() as tasks:
                watching = tasks.create_task(self._watch(probe))
                status = await child.wait()
                watching.cancel()
            return status
        finally:
            await child.stop()
            self._child = None

    async def _watch(self, probe: Probe) -> None:
        last: Observation | None = None
        while True:
            seen = await probe.look()
            if seen is not None and seen != last:
                self._tell(seen.state, seen.detail)
                last = seen
            ready = seen is not None and seen.state is ProcessState.READY
            if ready:
                self._was_ready = True
                self._schedule.ready(time.monotonic())
            await asyncio.sleep(_READY_POLL_S if ready else _POLL_S)

    async def _wait_for_restart(self, status: int) -> None:
        if status == 0 and self._was_ready:
            # It was asked to end, by SIGTERM or by an operator who restarts it.
            self._tell(ProcessState.RESTARTING, "ended as it was asked to; starts again")
            return
        self._failures += 1
        pause_s = self._schedule.ended(time.monotonic())
        if pause_s is None:
            raise self._given_up(status)
        detail = f"{_describe_exit(status)}; starts again in {pause_s:.1f} s; its log is {self._spec.log}"
        self._tell(ProcessState.RESTARTING, detail)
        await asyncio.sleep(pause_s)

    def _given_up(self, status: int) -> NotReadyError:
        spec = self._spec
        return NotReadyError(
            f"{spec.name} was never ready and ended {self._failures} times (at last it {_describe_exit(status)}); "
            f"its log {spec.log} ends with:\n{read_tail(spec.log)}",
            reason="START_FAILED",
            metadata={"replica": spec.name, "stage": spec.stage, "log": str(spec.log)},
        )

    def _tell(self, state: ProcessState, detail: str = "") -> None:
        spec, child = self._spec, self._child
        process_id = child.process_id if child is not None else None
        self._report(ProcessStatus(spec.name, spec.stage, spec.endpoint, state, detail, process_id))


def _describe_exit(status: int) -> str:
    if status >= 0:
        return f"ended with exit status {status}"
    return f"was killed by {signal.Signals(-status).name}"
