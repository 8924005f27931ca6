"""Measures whether an orchestrator keeps up with short requests that arrive at random times."""

import asyncio
import random
import statistics
import time
from contextlib import aclosing
from dataclasses import dataclass, field

import grpc
import psutil

from benchmarks.orchestrator_ways.processes import cpu_s
from benchmarks.orchestrator_ways.ways import Orchestrated

_LATE_S = 60.0
_SETTLE_S = 2.0


@dataclass
class Arrivals:
    """The results of all arrivals."""

    in_flight: list[int] = field(default_factory=list[int], repr=False)
    """The number of requests in flight at each arrival."""
    admitted_ms: list[float] = field(default_factory=list[float], repr=False)
    queued: int = 0
    """The number of requests that were queued."""
    refused: int = 0
    """The number of requests that were rejected because the queue was full."""
    finished: int = 0
    seconds: float = 0.0
    """The seconds until the last request finished."""
    watched_cpu_s: float = 0.0

    @property
    def finished_per_minute(self) -> float:
        """The requests per second over the time in which they arrived."""
        return 60 * self.finished / self.seconds

    @property
    def growth(self) -> float:
        """The average number of requests in flight in the second half of the time, minus that in the first half."""
        middle = len(self.in_flight) // 2
        return statistics.mean(self.in_flight[middle:]) / max(1.0, statistics.mean(self.in_flight[:middle]))

    @property
    def admitted_p99_ms(self) -> float:
        """The seconds from the call until the request is admitted."""
        return sorted(self.admitted_ms)[int(0.99 * len(self.admitted_ms))]

    @property
    def cpu_per_request_ms(self) -> float:
        """The processor time of the orchestrator."""
        return 1e3 * self.watched_cpu_s / max(1, self.finished)


async def arrive(way: Orchestrated, watched: psutil.Process, *, per_s: float, for_s: float, outputs: int) -> Arrivals:
    """Runs requests that arrive `per_s` times a second on average. The arrivals are the same in every run."""
    found, rng, in_flight = Arrivals(), random.Random(1), set[asyncio.Task[None]]()
    loop = asyncio.get_running_loop()
    # By then, earlier requests have released their slots.
    await asyncio.sleep(_SETTLE_S)
    before_s, began_s = cpu_s(watched), loop.time()
    due_s = began_s
    async with asyncio.timeout(for_s + _LATE_S), asyncio.TaskGroup() as group:
        for number in range(round(per_s * for_s)):
            due_s += rng.expovariate(per_s)
            await asyncio.sleep(max(0.0, due_s - loop.time()))
            found.in_flight.append(len(in_flight))
            task = group.create_task(_ask(way, f"arrival-{number}", outputs, found))
            in_flight.add(task)
            task.add_done_callback(in_flight.discard)
    found.seconds, found.watched_cpu_s = loop.time() - began_s, cpu_s(watched) - before_s
    return found


async def _ask(way: Orchestrated, request_id: str, outputs: int, found: Arrivals) -> None:
    began_s, waited = time.monotonic(), False
    try:
        async with aclosing(way.events(request_id, outputs=outputs)) as events:
            async for event in events:
                match event.WhichOneof("event"):
                    case "queued":
                        waited = True
                    case "admitted":
                        found.admitted_ms.append(1e3 * (time.monotonic() - began_s))
                    case "finished":
                        found.finished += 1
                    case _:
                        pass
    except grpc.aio.AioRpcError as exc:
        if exc.code() is not grpc.StatusCode.RESOURCE_EXHAUSTED:
            raise
        found.refused += 1
    found.queued += waited
