"""An event loop whose time passes at once: it jumps to the next timer instead of waiting for it."""

import asyncio
import selectors
from collections.abc import Coroutine, Mapping
from typing import Any, TypeVar

T = TypeVar("T")


class _Jumping(selectors.BaseSelector):
    """Looks at what is ready, and lets time pass in place of waiting for more."""

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
    """For programs that wait by timers alone: nothing from outside the process comes in time."""

    def __init__(self) -> None:
        self.now_s = 0.0
        super().__init__(selector=_Jumping(self))

    def time(self) -> float:
        """Seconds of virtual time since the loop was made."""
        return self.now_s


def run(main: Coroutine[Any, Any, T]) -> T:
    """`asyncio.run` in virtual time."""
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(main)
