"""The owners and the end of asyncio tasks, and waits with a time limit."""

import asyncio
from collections.abc import Awaitable, Iterable
from contextlib import suppress
from typing import Any, TypeVar

_Task = TypeVar("_Task", bound="asyncio.Task[Any]")
_Result = TypeVar("_Result")


def kept_in(tasks: set[_Task], task: _Task) -> _Task:
    """Adds a task to `tasks`, where it remains until it ends. Returns the task."""
    tasks.add(task)
    task.add_done_callback(tasks.discard)
    return task


async def end_tasks(tasks: Iterable[asyncio.Task[object]]) -> None:
    """Cancels tasks, and waits until they have ended. Ignores their results and their errors."""
    tasks = list(tasks)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def result_before(event: asyncio.Event, work: Awaitable[_Result]) -> _Result | None:
    """Returns the result of `work`. If `event` is set before `work` has finished, cancels `work` and returns None."""
    working, waiting = asyncio.ensure_future(work), asyncio.ensure_future(event.wait())
    try:
        await asyncio.wait((working, waiting), return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        await end_tasks((working, waiting))


async def wait_within(time_limit_s: float, awaitable: Awaitable[object]) -> None:
    """Waits for `awaitable`, but cancels it after `time_limit_s` seconds. Ignores its result."""
    with suppress(TimeoutError):
        async with asyncio.timeout(time_limit_s):
            await awaitable
