"""Admission of requests to denoising. Limits the number of admitted requests and their total memory."""

import asyncio
import itertools
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from stagemesh.common.errors import InvalidRequestError

POSITIONS_PER_PRIORITY = 64


@dataclass(frozen=True)
class Footprint:
    """The estimated memory that a request needs in addition to the model's weights."""

    denoise_bytes: int
    """Memory for the request's tensors and for its part of a forward pass, in bytes. Needed as long as the request is
    admitted."""
    decode_bytes: int = 0
    """Memory for decoding the request, in bytes. Only one request is decoded at a time."""


class Admission:
    """Admits requests by priority, then in order of arrival. If the first request in the queue does not fit in the
    limits, all later requests also wait.

    One priority level equals `POSITIONS_PER_PRIORITY` queue positions. Therefore only a limited number of requests with
    a higher priority can overtake a waiting request, and every request is eventually admitted.
    """

    def __init__(self, *, max_running: int, memory_bytes: int) -> None:
        self._max_running, self._memory_bytes = max_running, memory_bytes
        self._admitted: list[Footprint] = []
        self._waiting: list[tuple[int, int, Footprint, asyncio.Future[None]]] = []
        """The waiting requests, sorted by queue position, then by arrival number. Each item ends with a future that is
        completed on admission."""
        self._numbers = itertools.count()

    @property
    def running(self) -> int:
        """Number of admitted requests."""
        return len(self._admitted)

    @property
    def waiting(self) -> int:
        """Number of requests that wait for admission."""
        return len(self._waiting)

    @asynccontextmanager
    async def admitted(self, footprint: Footprint, *, priority: int) -> AsyncGenerator[None]:
        """Waits until the request is admitted. The request counts toward the limits until the context exits.

        `footprint` is the memory that the request needs. Raises InvalidRequestError if the stage's memory limit is
        lower.
        """
        self._check(footprint)
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        number = next(self._numbers)
        self._waiting.append((number - POSITIONS_PER_PRIORITY * priority, number, footprint, future))
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
                f"the request needs about {needed_bytes >> 20} MiB in addition to the weights, and the stage has "
                f"{self._memory_bytes >> 20} MiB; request fewer pixels or frames, or raise the option memory_bytes",
                reason="EXCEEDS_MEMORY",
            )

    def _admit(self) -> None:
        # A cancelled request remains in the queue until its task runs. It must not block other requests.
        self._waiting = sorted(entry for entry in self._waiting if not entry[3].cancelled())
        while self._waiting and self._fits(self._waiting[0][2]):
            _, _, footprint, future = self._waiting.pop(0)
            self._admitted.append(footprint)
            future.set_result(None)

    def _fits(self, footprint: Footprint) -> bool:
        footprints = [*self._admitted, footprint]
        needed_bytes = sum(each.denoise_bytes for each in footprints) + max(each.decode_bytes for each in footprints)
        return self.running < self._max_running and needed_bytes <= self._memory_bytes

    def _release(self, footprint: Footprint) -> None:
        self._admitted.remove(footprint)
        self._admit()
