"""Functions that stop commands when the process receives SIGINT or SIGTERM."""

import asyncio
import signal
from collections.abc import Awaitable, Callable


def stop_on_signals() -> asyncio.Event:
    """Returns an event that is set when the process receives SIGINT or SIGTERM.

    After this call, the signals have no other effect.
    """
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stopping.set)
    return stopping


async def done_before(stopping: asyncio.Event, work: Callable[[], Awaitable[None]]) -> bool:
    """Runs `work` and returns True when `work` ends. If `stopping` is set first, cancels `work` and returns False."""
    async with asyncio.TaskGroup() as tasks:
        working = tasks.create_task(_run(work))
        waiting = tasks.create_task(stopping.wait())
        await asyncio.wait((working, waiting), return_when=asyncio.FIRST_COMPLETED)
        finished = working.done()
        working.cancel()
        waiting.cancel()
    return finished


async def _run(work: Callable[[], Awaitable[None]]) -> None:
    await work()
