"""The tasks of sessions, which the registry owns."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import TypeAlias

Task: TypeAlias = "asyncio.Task[None]"
Spawn: TypeAlias = Callable[[Coroutine[object, object, None]], Task]
"""Starts a task."""
