"""Work that is not left halfway."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


async def to_the_end(doing: Coroutine[Any, Any, T]) -> T:
    """Runs what must not stop halfway: a cancellation takes effect when it has ended."""
    task = asyncio.ensure_future(doing)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError as exc:
            cancelled = exc
    if cancelled is not None:
        # Whatever came of it is nobody's any more, but must have been looked at.
        task.exception()
        raise cancelled
    return task.result()
