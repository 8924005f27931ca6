"""A wake-up for everybody who waits for some state to change."""

import asyncio


class Pulse:
    """Waiters look at the state, wait, and look again; whoever changes the state fires."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def fire(self) -> None:
        """Wakes all who wait now."""
        self._event.set()
        self._event.clear()

    async def wait(self) -> None:
        """Returns at the next fire. The caller re-checks its condition without awaiting in between."""
        await self._event.wait()
