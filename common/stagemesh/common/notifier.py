"""Wakes tasks that wait for a change of state."""

import asyncio


class Notifier:
    """Tasks check a state, wait, and check again. Code that changes the state calls `fire`."""

    __slots__ = ("_waiters",)

    def __init__(self) -> None:
        self._waiters: list[asyncio.Future[None]] = []

    def fire(self) -> None:
        """Wakes all tasks that wait now."""
        if self._waiters:
            waiters, self._waiters = self._waiters, []
            for waiter in waiters:
                if not waiter.done():
                    waiter.set_result(None)

    async def wait(self) -> None:
        """Returns at the next `fire`. The caller checks its condition again without awaiting in between."""
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        await waiter
