"""Measures the delays of outputs of many concurrent requests, and the resources that a process uses for them."""

import asyncio
import random
import time
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass, field

import psutil

from benchmarks.orchestrator_paths.paths import RequestPath
from benchmarks.orchestrator_paths.processes import cpu_s

_SETTLE_S = 1.5
# Requests start at random times. Requests that start together would emit all outputs together, and the measured delay
# would be the length of that queue.
_SPREAD_S = 1.5
_ENOUGH = 1_000_000
_READY_S = 60.0


@dataclass
class Measurement:
    """The figures of a window of time in which all requests emit outputs."""

    requests: int
    delays_us: list[float] = field(default_factory=list[float], repr=False)
    """The times from the creation of outputs to their arrival at the client, sorted."""
    outputs_each: float = 0.0
    """The number of outputs per request, including those before the window."""
    seconds: float = 0.0
    watched_cpu_s: float = 0.0
    """The processor time of the process between client and stages."""
    grown_bytes: float = 0.0
    """The growth of that process's memory from before the requests to the end of the window."""

    def quantile_ms(self, share: float) -> float:
        """Returns the delay that this fraction of the outputs does not exceed."""
        return self.delays_us[int(share * len(self.delays_us))] / 1e3

    @property
    def outputs_per_s(self) -> float:
        """The outputs of all requests per second."""
        return len(self.delays_us) / self.seconds

    @property
    def cpu_per_output_us(self) -> float:
        """The watched process's processor time per output."""
        return 1e6 * self.watched_cpu_s / len(self.delays_us)

    def __str__(self) -> str:
        delays = f"p50 {self.quantile_ms(0.5):.2f} ms, p99 {self.quantile_ms(0.99):.2f} ms"
        return f"{self.outputs_per_s:.0f} outputs/s, {self.cpu_per_output_us:.0f} us each, {delays}"


@dataclass
class _Window:
    begin_ns: int = 1 << 62
    end_ns: int = 1 << 62


async def measure_path(
    path: RequestPath, name: str, *, requests: int, window_s: float, watched: psutil.Process | None = None
) -> Measurement:
    """Runs concurrent requests, and measures them for `window_s` when all of them emit outputs."""
    measurement, window = Measurement(requests), _Window()
    running = [asyncio.Event() for _ in range(requests)]
    before_bytes = watched.memory_info().rss if watched is not None else 0
    async with asyncio.TaskGroup() as group:
        tasks = [
            group.create_task(_follow(path, f"{name}-{number}", running[number], window, measurement))
            for number in range(requests)
        ]
        await _all_run(running, tasks)
        await asyncio.sleep(_SETTLE_S)
        before_s = cpu_s(watched) if watched is not None else 0.0
        window.begin_ns = time.monotonic_ns()
        await asyncio.sleep(window_s)
        window.end_ns = time.monotonic_ns()
        if watched is not None:
            measurement.watched_cpu_s = cpu_s(watched) - before_s
            measurement.grown_bytes = watched.memory_info().rss - before_bytes
        for task in tasks:
            task.cancel()
    measurement.seconds = (window.end_ns - window.begin_ns) / 1e9
    measurement.outputs_each /= requests
    measurement.delays_us.sort()
    return measurement


async def _follow(
    path: RequestPath, request_id: str, running: asyncio.Event, window: _Window, measurement: Measurement
) -> None:
    await asyncio.sleep(random.Random(request_id).uniform(0, _SPREAD_S))
    async with aclosing(path.texts(request_id, outputs=_ENOUGH)) as texts:
        async for text in texts:
            if not text:
                continue
            running.set()
            measurement.outputs_each += 1
            made_ns = int(text)
            if window.begin_ns <= made_ns < window.end_ns:
                measurement.delays_us.append((time.monotonic_ns() - made_ns) / 1e3)


async def _all_run(running: Sequence[asyncio.Event], tasks: Sequence["asyncio.Task[None]"]) -> None:
    """Returns when all requests emit outputs or have ended early. The tasks raise the errors."""
    async with asyncio.timeout(_READY_S):
        for event, task in zip(running, tasks, strict=True):
            waiting = asyncio.create_task(event.wait())
            await asyncio.wait([waiting, task], return_when=asyncio.FIRST_COMPLETED)
            waiting.cancel()
