"""Runs many concurrent requests and measures the delay of their outputs and the cost of a process for them."""

import asyncio
import random
import time
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass, field

import psutil

from benchmarks.orchestrator_ways.processes import cpu_s
from benchmarks.orchestrator_ways.ways import Way

_SETTLE_S = 1.5
# Requests start at different times. If they started together, their outputs would be emitted together each time, and
# the delay would be the length of that queue.
_SPREAD_S = 1.5
_ENOUGH = 1_000_000
_READY_S = 60.0


@dataclass
class Turn:
    """The measurements in a window of time, which begins when all requests have outputs."""

    requests: int
    delays_us: list[float] = field(default_factory=list[float], repr=False)
    """The seconds from an output's emission until the client has it, sorted."""
    outputs_each: float = 0.0
    """The outputs of each request, including those before the window."""
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
        """The outputs of all requests together."""
        return len(self.delays_us) / self.seconds

    @property
    def cpu_per_output_us(self) -> float:
        """The processor time of the observed process."""
        return 1e6 * self.watched_cpu_s / len(self.delays_us)

    def __str__(self) -> str:
        """Wakes the tasks that wait for outputs."""
        delays = f"p50 {self.quantile_ms(0.5):.2f} ms, p99 {self.quantile_ms(0.99):.2f} ms"
        return f"{self.outputs_per_s:.0f} outputs/s, {self.cpu_per_output_us:.0f} us each, {delays}"


@dataclass
class _Window:
    begin_ns: int = 1 << 62
    end_ns: int = 1 << 62


async def take_turn(
    way: Way, name: str, *, requests: int, window_s: float, watched: psutil.Process | None = None
) -> Turn:
    """Runs concurrent requests and measures them for `window_s` after all of them have outputs."""
    turn, window = Turn(requests), _Window()
    running = [asyncio.Event() for _ in range(requests)]
    before_bytes = watched.memory_info().rss if watched is not None else 0
    async with asyncio.TaskGroup() as group:
        tasks = [
            group.create_task(_follow(way, f"{name}-{number}", running[number], window, turn))
            for number in range(requests)
        ]
        await _all_run(running, tasks)
        await asyncio.sleep(_SETTLE_S)
        before_s = cpu_s(watched) if watched is not None else 0.0
        window.begin_ns = time.monotonic_ns()
        await asyncio.sleep(window_s)
        window.end_ns = time.monotonic_ns()
        if watched is not None:
            turn.watched_cpu_s = cpu_s(watched) - before_s
            turn.grown_bytes = watched.memory_info().rss - before_bytes
        for task in tasks:
            task.cancel()
    turn.seconds = (window.end_ns - window.begin_ns) / 1e9
    turn.outputs_each /= requests
    turn.delays_us.sort()
    return turn


async def _follow(way: Way, request_id: str, running: asyncio.Event, window: _Window, turn: Turn) -> None:
    await asyncio.sleep(random.Random(request_id).uniform(0, _SPREAD_S))
    async with aclosing(way.pieces(request_id, outputs=_ENOUGH)) as pieces:
        async for piece in pieces:
            if not piece:
                continue
            running.set()
            turn.outputs_each += 1
            made_ns = int(piece)
            if window.begin_ns <= made_ns < window.end_ns:
                turn.delays_us.append((time.monotonic_ns() - made_ns) / 1e3)


async def _all_run(running: Sequence[asyncio.Event], tasks: Sequence["asyncio.Task[None]"]) -> None:
    """Returns when all requests have outputs, or one has ended. Raises that request's error."""
    async with asyncio.timeout(_READY_S):
        for event, task in zip(running, tasks, strict=True):
            waiting = asyncio.create_task(event.wait())
            await asyncio.wait([waiting, task], return_when=asyncio.FIRST_COMPLETED)
            waiting.cancel()
