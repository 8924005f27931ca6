"""Tests that run in virtual time, so that they wait for minutes without taking any time."""

from collections.abc import Callable, Coroutine
from functools import wraps
from typing import Any, ParamSpec

from benchmarks.simulation import virtual_time

_Arguments = ParamSpec("_Arguments")


def in_virtual_time(test: Callable[_Arguments, Coroutine[Any, Any, None]]) -> Callable[_Arguments, None]:
    """Decorates an async test that waits for timers only. Its fixtures must not be async."""

    @wraps(test)
    def run(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> None:
        virtual_time.run(test(*args, **kwargs))

    return run
