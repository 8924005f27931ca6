"""What `up` and `demo` share while processes run."""

import asyncio
import signal
from collections.abc import Awaitable, Callable


def stop_on_signals() -> asyncio.Event:
    """An event that SIGINT and SIGTERM set, in place of what they did."""
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stopping.set)
    return stopping


async def done_before(stopping: asyncio.Event, work: Callable[[], Awaitable[None]]) -> bool:
    """Runs `work` and returns True, or cancels it once `stopping` is set and returns False."""
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
