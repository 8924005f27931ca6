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

from stagemesh.services.serving.config import StageConfig, load_stage_config
from stagemesh.services.serving.lifecycle import run_service
from stagemesh.services.stage.process import serve

_TICK_S = 0.002


@dataclass(frozen=True)
class Stalls:
    """How late the loop was, in milliseconds, and for how long at most its thread worked between two ticks."""

    ticks: int
    max_ms: float
    p999_ms: float
    max_work_ms: float


class LoopProbe:
    """Lives on the loop that it looks at."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._due_s = self._work_s = 0.0
        self._late_s: list[float] = []
        self._worked_s: list[float] = []
        self._loop.add_reader(control, self._told)

    def _told(self) -> None:
        word = self._control.recv(16)
        if word == b"begin":
            self._late_s, self._worked_s = [], []
            self._wait()
        elif self._timer is not None:
            self._timer.cancel()
            self._control.send(json.dumps(asdict(self._stalls())).encode())
        if not word:
            self._loop.remove_reader(self._control)

    def _wait(self) -> None:
        self._due_s, self._work_s = time.perf_counter() + _TICK_S, time.thread_time()
        self._timer = self._loop.call_later(_TICK_S, self._tick)

    def _tick(self) -> None:
        self._late_s.append(time.perf_counter() - self._due_s)
        self._worked_s.append(time.thread_time() - self._work_s)
        self._wait()

    def _stalls(self) -> Stalls:
        late_s = sorted(self._late_s)
        p999_s = late_s[int(len(late_s) * 0.999)]
        return Stalls(len(late_s), late_s[-1] * 1e3, p999_s * 1e3, max(self._worked_s) * 1e3)


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
