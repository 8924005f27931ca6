"""The owners and the end of asyncio tasks, and waits with a time limit."""

import asyncio
from collections.abc import Awaitable, Iterable
from contextlib import suppress
from typing import Any, TypeVar

_Task = TypeVar("_Task", bound="asyncio.Task[Any]")


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


async def wait_within(time_limit_s: float, awaitable: Awaitable[object]) -> None:
    """Waits for `awaitable`, but cancels it after `time_limit_s` seconds. Ignores its result."""
    with suppress(TimeoutError):
        async with asyncio.timeout(time_limit_s):
            await awaitable
