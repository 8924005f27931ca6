"""A notifier that wakes the tasks that wait for a state change."""

import asyncio


class Notifier:
    """Wakes the tasks that wait for a state change.

    A task checks the state, calls `wait`, and checks again. The code that changes the state calls `fire`.
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

    async def wait(self) -> None:
        """Returns after the next `fire`.

        Between checking its condition and calling `wait`, the caller must not await, or else it may miss a `fire`.
        """
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        await waiter
