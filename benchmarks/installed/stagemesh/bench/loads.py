"""Runs loads: a closed load with a constant number of requests, and an open load whose requests arrive by a clock."""

import asyncio
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice, takewhile

from stagemesh.bench.measurements import Measurement
from stagemesh.bench.settings import Arrivals, arrival_times_s
from stagemesh.bench.targets import MixedRequest, Target, draw_requests
from stagemesh.common.errors import InvalidRequestError

OnResult = Callable[[Measurement], None]
"""Called with the measurements of each request that has ended."""


@dataclass(frozen=True)
class Load:
    """A load: the number of requests at the same time, or the number of arrivals per second. Exactly one is set."""

    concurrency: int | None = None
    rate_per_s: float | None = None

    @property
    def name(self) -> str:
        """The load in words, for example "concurrency 4"."""
        return f"concurrency {self.concurrency}" if self.concurrency else f"rate {self.rate_per_s:g}/s"

    @property
    def value(self) -> float:
        """The number of requests at the same time, or the number of arrivals per second."""
        value = self.concurrency or self.rate_per_s
        assert value is not None, "one of them is set"
        return value


@dataclass(frozen=True)
class LoadSettings:
    """The settings that all loads of a sweep share. Exactly one of `requests` and `duration_s` is set."""

    mix: Sequence[MixedRequest]
    seed: int
    requests: int | None
    """The number of requests to send."""
    duration_s: float | None
    """The number of seconds in which requests are sent. The load ends when they have ended."""
    arrivals: Arrivals
    burst: int


@dataclass
class LoadRun:
    """A load that has run, or that runs: the requests that have ended so far, and the seconds so far."""

    load: Load
    measurements: list[Measurement] = field(default_factory=list[Measurement])
    seconds: float = 0.0


class LoadRunner:
    """Sends the requests of loads to a target, one load after the other. `runs` contains the results so far."""

    def __init__(self, target: Target, settings: LoadSettings, *, on_result: OnResult) -> None:
        self._target, self._settings, self._on_result = target, settings, on_result
        self._began_s = 0.0
        self.runs: list[LoadRun] = []

    async def warm_up(self, count: int) -> None:
        """Sends requests that are not counted: the first one alone, then the others at once.

        Raises InvalidRequestError if the server rejects the first one as invalid.
        """
        self._began_s = _now_s()
        requests = list(islice(draw_requests(self._settings.mix, seed=self._settings.seed), count))
        for request in requests[:1]:
            failure = (await self._measure(0, request, due_s=0.0)).failure
            if failure is not None and failure.is_final:
                raise InvalidRequestError(f"the server rejects the request: {failure.message} ({failure.reason})")
        await asyncio.gather(
            *(self._measure(index, request, due_s=0.0) for index, request in enumerate(requests[1:], 1))
        )

    async def run(self, load: Load) -> None:
        """Runs a load until all of its requests have ended. If the caller is cancelled, those that ended are kept."""
        run = LoadRun(load)
        self.runs.append(run)
        self._began_s = _now_s()
        requests = enumerate(draw_requests(self._settings.mix, seed=self._settings.seed))
        try:
            if load.concurrency is not None:
                await self._run_closed(run, requests, concurrency=load.concurrency)
            else:
                await self._run_open(run, requests, rate_per_s=load.value)
        finally:
            run.seconds = self._clock_s()

    async def _run_closed(
        self, run: LoadRun, requests: Iterator[tuple[int, MixedRequest]], *, concurrency: int
    ) -> None:
        duration_s = self._settings.duration_s or math.inf
        # All callers share the iterator, so that together they send the number of requests.
        shared = islice(requests, self._settings.requests)

        async def call() -> None:
            for index, request in shared:
                if (now_s := self._clock_s()) >= duration_s:
                    return
                await self._add(run, index, request, due_s=now_s)

        async with asyncio.TaskGroup() as group:
            for _ in range(concurrency):
                group.create_task(call())

    async def _run_open(self, run: LoadRun, requests: Iterator[tuple[int, MixedRequest]], *, rate_per_s: float) -> None:
        settings, duration_s = self._settings, self._settings.duration_s or math.inf
        times_s = arrival_times_s(settings.arrivals, rate_per_s=rate_per_s, burst=settings.burst, seed=settings.seed)
        due_times_s = takewhile(lambda due_s: due_s < duration_s, islice(times_s, settings.requests))
        async with asyncio.TaskGroup() as group:
            for due_s, (index, request) in zip(due_times_s, requests, strict=False):
                await asyncio.sleep(max(0.0, due_s - self._clock_s()))
                group.create_task(self._add(run, index, request, due_s=due_s))

    async def _add(self, run: LoadRun, index: int, request: MixedRequest, *, due_s: float) -> None:
        measurement = await self._measure(index, request, due_s=due_s)
        run.measurements.append(measurement)
        self._on_result(measurement)

    async def _measure(self, index: int, request: MixedRequest, *, due_s: float) -> Measurement:
        measurement = Measurement(due_s, self._clock_s())
        # Each request has a seed of its own, which the next run with the same seed repeats.
        seed = self._settings.seed + index
        measurement.failure = await self._target.send(request, measurement, seed=seed, clock=self._clock_s)
        measurement.ended_s = self._clock_s()
        return measurement

    def _clock_s(self) -> float:
        """Returns the number of seconds since the load began."""
        return _now_s() - self._began_s


def _now_s() -> float:
    return asyncio.get_running_loop().time()
