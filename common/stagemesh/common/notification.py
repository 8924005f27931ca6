"""Objects that wake asyncio tasks: `Notifier` at a state change, and `Journal` when a run has produced an item."""

import asyncio
from collections.abc import AsyncGenerator, Callable
from copy import copy
from typing import Generic, TypeVar

from stagemesh.common.errors import StagemeshError

T = TypeVar("T")


class Notifier:
    """Wakes the asyncio tasks that wait for a state change.

    A task checks the state, calls `wait` if the state is not yet suitable, and checks the state again. The code that
    changes the state calls `fire`.
    """

    __slots__ = ("_waiters",)

    def __init__(self) -> None:
        self._waiters: list[asyncio.Future[None]] = []

    def fire(self) -> None:
        """Wakes all tasks that are currently waiting."""
        if self._waiters:
            waiters, self._waiters = self._waiters, []
            for waiter in waiters:
                if not waiter.done():
                    waiter.set_result(None)

    def wait(self) -> "asyncio.Future[None]":
        """Returns a future that completes at the next call of `fire`.

        The caller must not await between checking the state and calling `wait`. Otherwise the caller may miss a call of
        `fire`.
        """
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        return waiter


class Journal(Generic[T]):
    """An append-only log of the items that a run produces. A reader that starts late also receives all items.

    `on_abandoned` is called when the last reader stops before the run has ended, so that the owner can cancel the run.
    """

    def __init__(self, *, on_abandoned: Callable[[], None] | None = None) -> None:
        self.on_abandoned = on_abandoned
        self.readers = 0
        """The number of readers that have started and not yet stopped."""
        self.closed = False
        """Whether `close` was called, so that no further item can be appended."""
        self.items: list[T] = []
        """All items so far."""
        self._error: StagemeshError | None = None
        self._changed = Notifier()

    def append(self, item: T) -> int:
        """Appends an item, which all current and later readers receive. Returns the item's index."""
        assert not self.closed, "the journal is closed"
        self.items.append(item)
        self._changed.fire()
        return len(self.items) - 1

    def replace(self, index: int, item: T) -> None:
        """Replaces the item at `index`. Readers that have already received the old item do not receive the new one."""
        self.items[index] = item

    def close(self, error: StagemeshError | None = None) -> None:
        """Ends the iteration of every reader after the last item. Readers then raise `error`, unless `error` is None.

        Closing twice is harmless.
        """
        if self.closed:
            return
        # The owner of `on_abandoned` often references the journal, and so do the frames in an error's traceback.
        # Dropping the callback and the traceback (a copy has none) avoids reference cycles.
        self.closed, self._error, self.on_abandoned = True, copy(error), None
        self._changed.fire()

    async def follow(self) -> AsyncGenerator[T]:
        """Yields all items from the first one, and waits for items that are appended later.

        After the last item, raises the error that was passed to `close`, if any. Iterate within `contextlib.aclosing`,
        so that the journal notices immediately when the reader stops.
        """
        self.readers += 1
        try:
            position, items = 0, self.items
            while position < len(items) or not self.closed:
                if position == len(items):
                    await self._changed.wait()
                    continue
                yield items[position]
                position += 1
            if self._error is not None:
                # Each reader raises a copy, because tracebacks of several tasks would mix in a shared object.
                raise copy(self._error)
        finally:
            self.readers -= 1
            if not self.readers and self.on_abandoned is not None:
                self.on_abandoned()
