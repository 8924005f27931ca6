"""A wake-up for everybody who waits for some state to change."""

import asyncio


class Notifier:
    """Waiters look at the state, wait, and look again; whoever changes the state fires."""

    __slots__ = ("_waiters",)

    def __init__(self) -> None:
        self._waiters: list[asyncio.Future[None]] = []

    def fire(self) -> None:
        """Wakes all who wait now."""
        if self._waiters:
            waiters, self._waiters = self._waiters, []
            for waiter in waiters:
                if not waiter.done():
                    waiter.set_result(None)

    async def wait(self) -> None:
        """Returns at the next fire. The caller re-checks its condition without awaiting in between."""
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        await waiter
