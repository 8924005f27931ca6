"""The append-only record of one run, which any number of callers follow from its start."""

import asyncio
from collections.abc import AsyncGenerator, Callable
from copy import copy
from typing import Generic, TypeVar

from stagemesh.common.errors import StagemeshError

T = TypeVar("T")


class Journal(Generic[T]):
    """What one run has to tell, kept so that a later caller hears it all.

    `on_abandoned` is called when the last reader leaves before the end; whoever sets it cancels the run.
    """

    def __init__(self, *, on_abandoned: Callable[[], None] | None = None) -> None:
        self.on_abandoned = on_abandoned
        self._items: list[T] = []
        self._closed = False
        self._error: StagemeshError | None = None
        self._readers = 0
        self._waiting: list[asyncio.Future[None]] = []
        """Of the readers that have heard all so far."""

    @property
    def readers(self) -> int:
        """How many follow now."""
        return self._readers

    @property
    def closed(self) -> bool:
        """Whether the run has ended."""
        return self._closed

    def append(self, item: T) -> int:
        """Adds an item for every reader, those to come included; returns its index."""
        assert not self._closed, "the journal is closed"
        self._items.append(item)
        self._wake()
        return len(self._items) - 1

    def replace(self, index: int, item: T) -> None:
        """Another item for the readers that have not come as far yet."""
        self._items[index] = item

    def close(self, error: StagemeshError | None = None) -> None:
        """Ends every reader after what was appended, with `error` where there is one. Closing twice is harmless."""
        if self._closed:
            return
        # Whoever is told of leaving readers holds the journal, mostly, and so do the frames of an error's traceback,
        # which a copy has not: a circle would outlive both.
        self._closed, self._error, self.on_abandoned = True, copy(error), None
        self._wake()

    async def follow(self) -> AsyncGenerator[T]:
        """The items from the first one, waiting for those to come; raises the run's error at the end.

        Iterate within `contextlib.aclosing`, so that leaving is noticed at once.
        """
        self._readers += 1
        try:
            position, items = 0, self._items
            while position < len(items) or not self._closed:
                if position == len(items):
                    await self._more()
                    continue
                yield items[position]
                position += 1
            if self._error is not None:
                # A copy for each reader: raising one object in several tasks would mix their tracebacks.
                raise copy(self._error)
        finally:
            self._leave()

    def _more(self) -> "asyncio.Future[None]":
        """Done when there is another item, or no more; for one reader, and cheaper than an event for all of them."""
        more: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(more)
        return more

    def _wake(self) -> None:
        for more in self._waiting:
            if not more.done():
                more.set_result(None)
        self._waiting.clear()

    def _leave(self) -> None:
        self._readers -= 1
        if not self._readers and self.on_abandoned is not None:
            self.on_abandoned()
