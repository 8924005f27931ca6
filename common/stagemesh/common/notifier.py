"""A notifier for asyncio tasks that wait for a state change."""

import asyncio


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

    async def wait(self) -> None:
        """Waits until the next call of `fire`.

        The caller must not await between checking the state and calling `wait`. Otherwise the caller may miss a call of
        `fire`.
        """
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        await waiter
