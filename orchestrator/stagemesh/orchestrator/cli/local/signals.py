"""Stops a command when its process receives SIGINT or SIGTERM."""

import asyncio
import signal
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

_Result = TypeVar("_Result")


def stop_on_signals() -> asyncio.Event:
    """Returns an event that is set when the process receives SIGINT or SIGTERM.

    After this call, these signals no longer interrupt or end the process.
    """
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stopping.set)
    # In a container, the command line has blocked SIGTERM.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    return stopping


async def result_before(stopping: asyncio.Event, work: Callable[[], Coroutine[Any, Any, _Result]]) -> _Result | None:
    """Runs `work` and returns the result of `work`, or None if `stopping` is set first.

    Cancels `work` if `stopping` is set before `work` has finished.
    """
    async with asyncio.TaskGroup() as tasks:
        working = tasks.create_task(work())
        waiting = tasks.create_task(stopping.wait())
        await asyncio.wait((working, waiting), return_when=asyncio.FIRST_COMPLETED)
        finished = working.done()
        working.cancel()
        waiting.cancel()
    return working.result() if finished else None
