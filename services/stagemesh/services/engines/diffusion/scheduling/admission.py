"""How many requests are under way at once: as many as are allowed, and as memory holds."""

import asyncio
import heapq
import itertools
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from stagemesh.common.errors import InvalidRequestError

PLACES_A_PRIORITY = 64


@dataclass(frozen=True)
class Footprint:
    """What a request takes of memory beside the weights, in bytes."""

    denoise_bytes: int
    """As long as it runs: its tensors, and its share of a forward."""
    decode_bytes: int = 0
    """At its end; one is decoded at a time."""


class Admission:
    """The highest priority first, else in order; nobody passes one who waits for memory.

    A priority is worth `PLACES_A_PRIORITY` places: one who has been passed by that many no longer counts as lower, and
    so nobody waits for ever.
    """

    def __init__(self, *, max_running: int, memory_bytes: int) -> None:
        self.running = 0
        self._max_running, self._memory_bytes = max_running, memory_bytes
        self._admitted: list[Footprint] = []
        self._waiting: list[tuple[int, int, Footprint, asyncio.Future[None]]] = []
        """A heap by place and number."""
        self._numbers = itertools.count()

    @property
    def waiting(self) -> int:
        """How many wait."""
        return len(self._waiting)

    @asynccontextmanager
    async def admitted(self, footprint: Footprint, *, priority: int) -> AsyncGenerator[None]:
        """Waits for room and holds it. Raises InvalidRequestError for what never fits."""
        self._check(footprint)
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        number = next(self._numbers)
        heapq.heappush(self._waiting, (number - PLACES_A_PRIORITY * priority, number, footprint, future))
        self._admit()
        try:
            await future
        except asyncio.CancelledError:
            if not future.cancelled():
                self._release(footprint)
            else:
                self._admit()
            raise
        try:
            yield
        finally:
            self._release(footprint)

    # -- inner workings

    def _check(self, footprint: Footprint) -> None:
        needed_bytes = footprint.denoise_bytes + footprint.decode_bytes
        if needed_bytes > self._memory_bytes:
            raise InvalidRequestError(
                f"the request would take about {needed_bytes >> 20} MiB beside the weights, and the stage has "
                f"{self._memory_bytes >> 20} MiB; ask for fewer pixels or frames, or raise the option memory_bytes",
                reason="TOO_LARGE",
            )

    def _admit(self) -> None:
        # One that gave up is still here until its turn to be told so has come, and nobody waits for it.
        self._waiting = [entry for entry in self._waiting if not entry[3].cancelled()]
        heapq.heapify(self._waiting)
        while self._waiting and self._fits(self._waiting[0][2]):
            _, _, footprint, future = heapq.heappop(self._waiting)
            self._admitted.append(footprint)
            self.running += 1
            future.set_result(None)

    def _fits(self, footprint: Footprint) -> bool:
        held = [*self._admitted, footprint]
        needed_bytes = sum(each.denoise_bytes for each in held) + max(each.decode_bytes for each in held)
        return self.running < self._max_running and needed_bytes <= self._memory_bytes

    def _release(self, footprint: Footprint) -> None:
        self._admitted.remove(footprint)
        self.running -= 1
        self._admit()
