"""Measures how late the timers of an idle event loop are. The machine adds this lateness to every delay.

    python -m benchmarks.orchestrator_paths.idle_loop

Measures until SIGTERM, then prints the result as JSON.
"""

import asyncio
import os
import sys
import time
from dataclasses import dataclass

from pydantic import TypeAdapter

from stagemesh.common.process.lifecycle import run_service

_STEP_S = 0.005


@dataclass(frozen=True)
class Lateness:
    """The lateness of the loop's timers."""

    p50_ms: float
    p99_ms: float


LATENESS = TypeAdapter(Lateness)


async def _measure(stopping: asyncio.Event) -> None:
    late_s: list[float] = []
    while not stopping.is_set():
        due_s = time.monotonic() + _STEP_S
        await asyncio.sleep(_STEP_S)
        late_s.append(time.monotonic() - due_s)
    late_s.sort()
    p50_ms, p99_ms = (1e3 * late_s[int(share * len(late_s))] for share in (0.5, 0.99))
    sys.stdout.buffer.write(LATENESS.dump_json(Lateness(p50_ms, p99_ms)))


if __name__ == "__main__":
    raise SystemExit(run_service(_measure, parent_pid=os.getppid()))
