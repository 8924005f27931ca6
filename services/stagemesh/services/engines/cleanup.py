"""Runs coroutines that must not be cancelled before they end."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


async def run_to_completion(work: Coroutine[Any, Any, T]) -> T:
    """Runs a coroutine until it ends. If the caller is cancelled, the cancellation takes effect afterwards."""
    task = asyncio.ensure_future(work)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError as exc:
            cancelled = exc
    if cancelled is not None:
        # The exception is retrieved, so that asyncio does not log it as never retrieved.
        task.exception()
        raise cancelled
    return task.result()
