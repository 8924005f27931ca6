"""The step loop ends while the worker computes a step."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Semaphore
from typing import Any, cast

import pytest

from stagemesh.common.errors import UnavailableError
from stagemesh.services.engines.diffusion.executor import Executor, NextCall
from stagemesh.services.engines.diffusion.step_scheduler import RequestProgress, StepLoop, StepScheduler

_LIMIT_S = 10


class HeldExecutor:
    """An executor whose steps end when the test permits them."""

    def __init__(self) -> None:
        self.begun, self.permitted = Semaphore(0), Semaphore(0)
        self._thread = ThreadPoolExecutor(1)

    async def repeat(self, _method: str, next_call: NextCall, record: Callable[[Any], None]) -> None:
        def work() -> None:
            while (arguments := next_call()) is not None:
                self.begun.release()
                assert self.permitted.acquire(timeout=_LIMIT_S), "the test has not permitted the step"
                record([None] * len(arguments[0]))

        await asyncio.get_running_loop().run_in_executor(self._thread, work)

    async def finish(self) -> None:
        """Permits the running step, and waits for its end."""
        self.permitted.release()
        await asyncio.to_thread(self._thread.shutdown)


async def test_a_request_fails_if_the_loop_ends_before_the_running_step() -> None:
    executor = HeldExecutor()
    loop = StepLoop(cast("Executor", executor), StepScheduler(max_wait_steps=8, max_batch=1))
    serving = asyncio.create_task(loop.serve())
    steps = loop.run_steps(RequestProgress("long", key="key", tokens=1, total_steps=9), stop_at=9)
    executor.permitted.release()
    assert await anext(steps) == 1
    for _ in range(2):
        assert await asyncio.to_thread(executor.begun.acquire, timeout=_LIMIT_S)
    serving.cancel()
    await asyncio.wait([serving])
    await executor.finish()
    with pytest.raises(UnavailableError, match="the engine has ended"):
        async with asyncio.timeout(_LIMIT_S):
            async for _ in steps:
                pass
