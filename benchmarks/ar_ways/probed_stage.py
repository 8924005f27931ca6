"""A stage process as it is, beside which a probe looks how late the event loop comes to its timers.

`python -m benchmarks.ar_ways.probed_stage --config FILE --probe FD`: FD is a socket on which "begin" starts the probe
and "end" is answered with what it saw.
"""

import argparse
import asyncio
import json
import socket
import sys
import time
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

from stagemesh.services.serving.config import StageConfig, load_stage_config
from stagemesh.services.serving.lifecycle import run_service
from stagemesh.services.stage.process import serve

_TICK_S = 0.002
_SCHEDULING = Path("/proc/thread-self/schedstat")


@dataclass(frozen=True)
class Stalls:
    """How late the loop came to its timers, in milliseconds."""

    ticks: int
    max_ms: float
    p999_ms: float
    max_own_ms: float
    """The time taken off for which others had the processors."""
    max_work_ms: float
    """What the loop's thread computed between two ticks."""


class Tick(NamedTuple):
    """One timer, in seconds."""

    late_s: float
    queued_s: float
    worked_s: float


class LoopProbe:
    """Lives on the loop that it looks at."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._due_s = self._queued_s = self._worked_s = 0.0
        self._ticks: list[Tick] = []
        self._loop.add_reader(control, self._told)

    def _told(self) -> None:
        word = self._control.recv(16)
        if word == b"begin":
            self._ticks = []
            self._wait()
        elif self._timer is not None:
            self._timer.cancel()
            self._control.send(json.dumps(asdict(self._stalls())).encode())
        if not word:
            self._loop.remove_reader(self._control)

    def _wait(self) -> None:
        self._due_s = time.perf_counter() + _TICK_S
        self._queued_s, self._worked_s = self._queued(), time.thread_time()
        self._timer = self._loop.call_later(_TICK_S, self._tick)

    def _tick(self) -> None:
        late_s = time.perf_counter() - self._due_s
        self._ticks.append(Tick(late_s, self._queued() - self._queued_s, time.thread_time() - self._worked_s))
        self._wait()

    def _queued(self) -> float:
        """For how long this thread has waited for a processor, in seconds."""
        return int(_SCHEDULING.read_bytes().split()[1]) / 1e9

    def _stalls(self) -> Stalls:
        late_s = sorted(tick.late_s for tick in self._ticks)
        return Stalls(
            ticks=len(late_s),
            max_ms=late_s[-1] * 1e3,
            p999_ms=late_s[int(len(late_s) * 0.999)] * 1e3,
            max_own_ms=max(tick.late_s - tick.queued_s for tick in self._ticks) * 1e3,
            max_work_ms=max(tick.worked_s for tick in self._ticks) * 1e3,
        )


async def _serve(config: StageConfig, control: socket.socket, stopping: asyncio.Event) -> None:
    LoopProbe(control)
    await serve(config, stopping)


def main() -> int:
    """Serves until SIGTERM."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--probe", type=int, required=True)
    arguments = parser.parse_args()
    config = load_stage_config(arguments.config)
    with socket.socket(fileno=arguments.probe) as control:
        return run_service(partial(_serve, config, control), parent_pid=config.parent_pid)


if __name__ == "__main__":
    sys.exit(main())
