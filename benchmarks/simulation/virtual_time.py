"""An event loop with virtual time: it jumps to the next timer instead of waiting for it."""

import asyncio
import selectors
from collections.abc import Coroutine, Mapping
from typing import Any, TypeVar

T = TypeVar("T")


class _Jumping(selectors.BaseSelector):
    """Polls for events, and advances the virtual time instead of waiting for them."""

    def __init__(self, loop: "VirtualTimeLoop") -> None:
        self._loop = loop
        self._selector = selectors.DefaultSelector()

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        return self._selector.register(fileobj, events, data)

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        return self._selector.unregister(fileobj)

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = self._selector.select(0)
        if not ready:
            if timeout is None:
                raise RuntimeError("everything waits, and nothing is to come: virtual time cannot pass")
            self._loop.now_s += max(0.0, timeout)
        return ready

    def get_map(self) -> Mapping[Any, selectors.SelectorKey]:
        return self._selector.get_map()

    def close(self) -> None:
        self._selector.close()


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """Runs programs that wait only for timers: events from outside the process would arrive too late."""

    def __init__(self) -> None:
        self.now_s = 0.0
        super().__init__(selector=_Jumping(self))

    def time(self) -> float:
        """Returns the seconds of virtual time since the loop was created."""
        return self.now_s


def run(main: Coroutine[Any, Any, T]) -> T:
    """Runs a coroutine like `asyncio.run`, in virtual time."""
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(main)
