"""Steady load from real clients. A client sends its next request as soon as the last one has ended."""

import asyncio
import itertools
import time
from collections.abc import Callable
from uuid import uuid4

from stagemesh.client import AsyncClient
from stagemesh.client.retries import RetryPolicy
from stagemesh.common.errors import StagemeshError
from tests.soak.delivery import Delivery
from tests.soak.work import Work
from tests.soak.workload import Request


class Load:
    """Running and ended requests by id."""

    def __init__(self, endpoint: str, work: Work) -> None:
        self.running: dict[str, Delivery] = {}
        self.ended: dict[str, Delivery] = {}
        self._endpoint, self._timeout_s, self._delivery = endpoint, work.timeout_s, work.delivery
        self._upcoming = itertools.cycle([(request, work.units(request)) for request in work.requests])
        self._name = f"soak-{uuid4().hex[:6]}"
        self._numbers = itertools.count()

    async def each_once(self, count: int, *, clients: int) -> None:
        """Runs the next `count` requests, at most `clients` at a time."""
        left = iter(range(count))
        await self._all(clients, lambda: next(left, None) is not None)

    def first(self, request: Request) -> Delivery | None:
        """Returns the first delivery of a request that has ended: the one without faults after `each_once`."""
        return next((each for each in self.ended.values() if each.request == request), None)

    async def until(self, stop: asyncio.Event, *, clients: int) -> None:
        """Runs requests until `stop` is set, and waits for the last ones."""
        await self._all(clients, lambda: not stop.is_set())

    async def _all(self, clients: int, continues: Callable[[], bool]) -> None:
        async with asyncio.TaskGroup() as group:
            for _ in range(clients):
                group.create_task(self._client(continues))

    async def _client(self, continues: Callable[[], bool]) -> None:
        async with AsyncClient(self._endpoint, retry_policy=RetryPolicy(attempts=20, max_pause_s=2.0)) as client:
            while continues():
                await self._one(client)

    async def _one(self, client: AsyncClient) -> None:
        request, expected = next(self._upcoming)
        name = f"{self._name}-{next(self._numbers)}"
        delivery = self.running[name] = self._delivery(request, expected)
        generation = client.generate(
            request.prompt, seed=request.seed, max_tokens=request.steps, request_id=name, timeout_s=self._timeout_s
        )
        try:
            async for event in generation:
                delivery.add(event)
        except StagemeshError as exc:
            delivery.error = f"{type(exc).__name__} {exc.reason}: {exc}"
        finally:
            delivery.ended_s = time.monotonic()
            self.ended[name] = self.running.pop(name)
