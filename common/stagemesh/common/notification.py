"""Objects that wake waiting asyncio tasks, or call functions, when something changes.

A `Notifier` wakes tasks when a state changes. A `Journal` calls its readers when a run has produced an item.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import contextmanager
from copy import copy
from functools import partial
from typing import Generic, TypeVar

from stagemesh.common.errors import StagemeshError

T = TypeVar("T")


class Notifier:
    """Wakes the asyncio tasks that wait for a state change.

    A task checks the state and awaits `wait()` if its condition is not met. Afterwards, the task checks the state
    again. The code that changes the state calls `fire`.
    """

    __slots__ = ("_waiters",)

    def __init__(self) -> None:
        self._waiters: list[asyncio.Future[None]] = []

    def fire(self) -> None:
        """Completes all futures that `wait` has returned since the last call of `fire`."""
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
        self.closed = False
        """Whether the journal is closed, so that no further item can be appended."""
        self.items: list[T] = []
        """All items added so far, in order of arrival."""
        self._error: StagemeshError | None = None
        self._on_change: list[Callable[[], None]] = []
        """The functions of the active readers."""

    @property
    def readers(self) -> int:
        """The number of active readers: readers that have started and have not stopped yet."""
        return len(self._on_change)

    def append(self, item: T) -> int:
        """Appends an item and returns its index. All current and later readers receive the item."""
        assert not self.closed, "the journal is closed"
        self.items.append(item)
        for changed in self._on_change:
            changed()
        return len(self.items) - 1

    def replace(self, index: int, item: T) -> None:
        """Replaces the item at `index`. Readers that have already received the old item do not receive the new one."""
        self.items[index] = item

    def close(self, error: StagemeshError | None = None) -> None:
        """Ends the iteration of every reader after the last item. Readers then raise `error`, unless `error` is None.

        Does nothing if the journal is already closed.
        """
        if self.closed:
            return
        # The owner of `on_abandoned` often references the journal, and so do the frames in an error's traceback.
        # Dropping the callback and the traceback (a copy has none) avoids reference cycles.
        self.closed, self._error, self.on_abandoned = True, copy(error), None
        for changed in tuple(self._on_change):
            changed()

    @contextmanager
    def reading(self, on_change: Callable[[], None]) -> Generator[None]:
        """Is a reader of `items` within the block. `on_change` is called after each change, and reads `items`.

        `on_change` must not change the journal or end the block.
        """
        # Not the function itself, because two readers may have passed equal functions.
        changed = partial(on_change)
        self._on_change.append(changed)
        try:
            yield
        finally:
            self._on_change.remove(changed)
            if not self._on_change and self.on_abandoned is not None:
                self.on_abandoned()

    @property
    def error(self) -> StagemeshError | None:
        """A copy of the error with which the journal was closed, or None if there is none."""
        # Each reader raises a copy, because tracebacks of several tasks would mix in a shared object.
        return copy(self._error)

    async def follow(self) -> AsyncGenerator[T]:
        """Yields all items, beginning with the first one. Waits for further items until the journal is closed.

        After the last item, raises the error that was passed to `close`, unless it is None. Iterate within
        `contextlib.aclosing`, so that the journal notices immediately when the reader stops.
        """
        changed = Notifier()
        with self.reading(changed.fire):
            position, items = 0, self.items
            while position < len(items) or not self.closed:
                if position == len(items):
                    await changed.wait()
                    continue
                yield items[position]
                position += 1
            if (error := self.error) is not None:
                raise error
