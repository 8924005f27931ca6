"""An append-only log of the items that a run produces. Any number of callers can read all items from the first one."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from copy import copy
from typing import Generic, TypeVar

from stagemesh.common.errors import StagemeshError

T = TypeVar("T")


class Journal(Generic[T]):
    """An append-only log of the items that a run produces. A reader that starts late also receives all items.

    `on_abandoned` is called when the last reader stops before the run has ended, so that the owner can cancel the run.
    """

    def __init__(self, *, on_abandoned: Callable[[], None] | None = None) -> None:
        self.on_abandoned = on_abandoned
        self._items: list[T] = []
        self._closed = False
        self._error: StagemeshError | None = None
        self._readers = 0
        self._waiting: list[asyncio.Future[None]] = []
        """The futures of the readers that wait for the next item, one for each reader."""

    @property
    def readers(self) -> int:
        """The number of readers that have started and not yet stopped."""
        return self._readers

    @property
    def items(self) -> Sequence[T]:
        """All items so far."""
        return self._items

    @property
    def closed(self) -> bool:
        """Whether `close` was called, so that no further item can be appended."""
        return self._closed

    def append(self, item: T) -> int:
        """Appends an item, which all current and later readers receive. Returns the item's index."""
        assert not self._closed, "the journal is closed"
        self._items.append(item)
        self._wake()
        return len(self._items) - 1

    def replace(self, index: int, item: T) -> None:
        """Replaces the item at `index`. Readers that have already received the old item do not receive the new one."""
        self._items[index] = item

    def close(self, error: StagemeshError | None = None) -> None:
        """Ends the iteration of every reader after the last item. Readers then raise `error`, unless `error` is None.

        Closing twice is harmless.
        """
        if self._closed:
            return
        # The owner of `on_abandoned` often references the journal, and so do the frames in an error's traceback.
        # Dropping the callback and the traceback (a copy has none) avoids reference cycles.
        self._closed, self._error, self.on_abandoned = True, copy(error), None
        self._wake()

    async def follow(self) -> AsyncGenerator[T]:
        """Yields all items from the first one, and waits for items that are appended later.

        After the last item, raises the error that was passed to `close`, if any. Iterate within `contextlib.aclosing`,
        so that the journal notices immediately when the reader stops.
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
                # Each reader raises a copy, because tracebacks of several tasks would mix in a shared object.
                raise copy(self._error)
        finally:
            self._leave()

    def _more(self) -> "asyncio.Future[None]":
        """Returns a future that completes when an item is appended or the journal is closed.

        One future for each reader is cheaper than one event for all readers.
        """
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
