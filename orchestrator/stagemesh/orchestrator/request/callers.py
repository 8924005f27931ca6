"""Those who follow a request, and for how long it goes on without any."""

import asyncio
from collections.abc import Callable

from stagemesh.common.journal import Journal

MAX_LINGER_S = 60


class Callers:
    """Calls `forsake` once the last caller has gone and none has come back in time."""

    def __init__(self, journal: Journal[bytes], *, forsake: Callable[[], None]) -> None:
        self.forsaken = False
        """Whether nobody came back: the request is about to end, for nobody."""
        self._journal, self._forsake = journal, forsake
        self._linger_s = 0
        self._timer: asyncio.TimerHandle | None = None
        journal.on_abandoned = self._all_went

    def expect(self, *, linger_s: int) -> None:
        """A caller is about to follow the journal; once all have gone, the request goes on for so long."""
        self._linger_s = min(linger_s, MAX_LINGER_S)
        self.close()

    def take_leave(self) -> None:
        """A caller goes for good: the request is not to wait for it."""
        self.expect(linger_s=0)
        if not self._journal.readers:
            self._give_up()

    def close(self) -> None:
        """Stops the clock. Closing twice is harmless."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _all_went(self) -> None:
        if not self._linger_s:
            self._give_up()
            return
        self.close()
        self._timer = asyncio.get_running_loop().call_later(self._linger_s, self._give_up)

    def _give_up(self) -> None:
        if not self._journal.readers and not self._journal.closed:
            self.forsaken = True
            self._forsake()
