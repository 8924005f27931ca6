"""Several waits at once, with one error."""

import asyncio
from collections.abc import Coroutine, Sequence


async def together(steps: Sequence[Coroutine[object, object, None]]) -> None:
    """Runs all to their ends; the first error cancels the others and is raised as it is."""
    if len(steps) == 1:
        await steps[0]
        return
    try:
        async with asyncio.TaskGroup() as group:
            for step in steps:
                group.create_task(step)
    except BaseExceptionGroup as failed:
        raise failed.exceptions[0] from None
