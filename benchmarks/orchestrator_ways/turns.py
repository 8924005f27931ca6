"""Many requests at once for a while: how late their outputs come, and what a process takes for them meanwhile."""

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
# Requests come at any time. Those that began together would have their outputs together, again and again, and the delay
# would be the length of that queue.
_SPREAD_S = 1.5
_ENOUGH = 1_000_000
_READY_S = 60.0


@dataclass
class Turn:
    """What was seen in a window of time, once all requests brought outputs."""

    requests: int
    delays_us: list[float] = field(default_factory=list[float], repr=False)
    """From when an output was made until the client has it, sorted."""
    outputs_each: float = 0.0
    """Of a request, those before the window counted too."""
    seconds: float = 0.0
    watched_cpu_s: float = 0.0
    """Of the process that stands between client and stages."""
    grown_bytes: float = 0.0
    """By how much that has grown from before the requests to the window's end."""

    def quantile_ms(self, share: float) -> float:
        """The delay that this share of the outputs stays under."""
        return self.delays_us[int(share * len(self.delays_us))] / 1e3

    @property
    def outputs_per_s(self) -> float:
        """All requests together."""
        return len(self.delays_us) / self.seconds

    @property
    def cpu_per_output_us(self) -> float:
        """Of the watched process."""
        return 1e6 * self.watched_cpu_s / len(self.delays_us)

    def __str__(self) -> str:
        """For who waits."""
        delays = f"p50 {self.quantile_ms(0.5):.2f} ms, p99 {self.quantile_ms(0.99):.2f} ms"
        return f"{self.outputs_per_s:.0f} outputs/s, {self.cpu_per_output_us:.0f} us each, {delays}"


@dataclass
class _Window:
    begin_ns: int = 1 << 62
    end_ns: int = 1 << 62


async def take_turn(
    way: Way, name: str, *, requests: int, window_s: float, watched: psutil.Process | None = None
) -> Turn:
    """Runs so many requests, and looks at them for `window_s` once all of them bring outputs."""
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
    """Returns once all bring outputs, or one has ended, which is to be heard of."""
    async with asyncio.timeout(_READY_S):
        for event, task in zip(running, tasks, strict=True):
            waiting = asyncio.create_task(event.wait())
            await asyncio.wait([waiting, task], return_when=asyncio.FIRST_COMPLETED)
            waiting.cancel()
