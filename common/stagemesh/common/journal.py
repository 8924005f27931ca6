"""The append-only record of one run, which any number of callers read from its start."""

import asyncio
from collections.abc import AsyncGenerator, Callable
from copy import copy
from typing import Generic, TypeVar

from stagemesh.common.errors import StagemeshError

T = TypeVar("T")


class Journal(Generic[T]):
    """Keeps all items of a run, so that a later caller receives all of them.

    `on_abandoned` is called when the last reader leaves before the end of the run. Its owner then cancels the run.
    """

    def __init__(self, *, on_abandoned: Callable[[], None] | None = None) -> None:
        self.on_abandoned = on_abandoned
        self._items: list[T] = []
        self._closed = False
        self._error: StagemeshError | None = None
        self._readers = 0
        self._waiting: list[asyncio.Future[None]] = []
        """One future for each reader that has received all items so far."""

    @property
    def readers(self) -> int:
        """The number of current readers."""
        return self._readers

    @property
    def closed(self) -> bool:
        """Whether the run has ended."""
        return self._closed

    def append(self, item: T) -> int:
        """Adds an item for all current and later readers and returns its index."""
        assert not self._closed, "the journal is closed"
        self._items.append(item)
        self._wake()
        return len(self._items) - 1

    def replace(self, index: int, item: T) -> None:
        """Replaces an item for the readers that have not received it yet."""
        self._items[index] = item

    def close(self, error: StagemeshError | None = None) -> None:
        """Ends every reader after the last item, with `error` if it is given. Closing twice is harmless."""
        if self._closed:
            return
        # The owner of `on_abandoned` often references the journal, and so do the frames in an error's traceback. A copy
        # has no traceback, so that no reference cycle keeps them alive.
        self._closed, self._error, self.on_abandoned = True, copy(error), None
        self._wake()

    async def follow(self) -> AsyncGenerator[T]:
        """Yields all items from the first one, as they are appended. Raises the run's error at the end.

        Iterate within `contextlib.aclosing`, so that the journal notices at once when the reader leaves.
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
                # Each reader gets a copy: raising one object in several tasks would mix their tracebacks.
                raise copy(self._error)
        finally:
            self._leave()

    def _more(self) -> "asyncio.Future[None]":
        """Returns a future that is done at the next change. One for each reader is cheaper than an event for all."""
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
