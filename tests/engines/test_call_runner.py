"""The runner of a function's calls: batches, the turns of the thread, and the end."""

import asyncio
import threading
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager

import numpy as np
import pytest

from stagemesh.common.errors import UnavailableError
from stagemesh.connectors.packets import Packet
from stagemesh.services.engines.function.base import Call
from stagemesh.services.engines.function.batch_runner import CallRunner, Outcome, WaitingCall

Done = asyncio.Future[Sequence[Packet]]


class Calls:
    """A runner whose function records its batches, and waits at a gate that the test opens."""

    def __init__(self, thread: ThreadPoolExecutor) -> None:
        self.thread = thread
        self.batches: list[list[object]] = []
        self.gate, self.entered = threading.Event(), threading.Event()
        self.error: BaseException | None = None
        self.recorded = 0
        self.runner = CallRunner("tested", thread, self._compute, max_batch=2, on_done=self._record)

    def add(self, *states: int) -> list[Done]:
        """Adds a call for each state. Returns the futures of their outcomes."""
        made: list[Done] = []
        for state in states:
            done: Done = asyncio.get_running_loop().create_future()
            self.runner.add(WaitingCall(Call[object](state, None), done, None), shape=None, due_s=0.0)
            made.append(done)
        return made

    def _compute(self, calls: Sequence[Call[object]]) -> Sequence[Outcome]:
        self.batches.append([call.state for call in calls])
        self.entered.set()
        assert self.gate.wait(5)
        if self.error is not None:
            raise self.error
        return [[Packet({"y": np.array([call.state])})] for call in calls]

    def _record(self, batch: Sequence[WaitingCall], outcomes: Sequence[Outcome], took_s: float) -> None:
        assert len(batch) == len(outcomes)
        assert took_s > 0
        self.recorded += len(batch)


@asynccontextmanager
async def blocked() -> AsyncIterator[tuple[Calls, list[Done]]]:
    """Yields calls whose first one, 0, has begun and waits at the gate."""
    with ThreadPoolExecutor(1) as thread:
        calls = Calls(thread)
        try:
            first = calls.add(0)
            assert await asyncio.to_thread(calls.entered.wait, 5)
            yield calls, first
        finally:
            calls.gate.set()


async def test_calls_of_one_iteration_share_batches() -> None:
    with ThreadPoolExecutor(1) as thread:
        calls = Calls(thread)
        calls.gate.set()
        made = await asyncio.gather(*calls.add(1, 2, 3))
        assert [int(packets[0].tensors["y"][0]) for packets in made] == [1, 2, 3]
        assert (calls.batches, calls.recorded) == ([[1, 2], [3]], 3)


async def test_other_work_of_the_thread_runs_between_batches() -> None:
    async with blocked() as (calls, first):
        waiting = calls.add(1, 2, 3)
        other = calls.thread.submit(lambda: list(calls.batches))
        calls.gate.set()
        await asyncio.gather(*first, *waiting)
        assert other.result() == [[0]]
        assert calls.batches == [[0], [1, 2], [3]]


async def test_a_cancelled_call_is_not_run() -> None:
    async with blocked() as (calls, first):
        one, two = calls.add(1, 2)
        one.cancel()
        calls.gate.set()
        await asyncio.gather(*first, two)
        assert calls.batches == [[0], [2]]


async def test_the_end_of_the_runner_ends_all_calls() -> None:
    async with blocked() as (calls, first):
        waiting = calls.add(1, 2, 3)
        calls.runner.close()
        calls.runner.close()
        with pytest.raises(UnavailableError, match="closed while it ran"):
            await first[0]
        for done in waiting:
            with pytest.raises(UnavailableError, match=r"tested was closed$"):
                await done
        with pytest.raises(UnavailableError, match="closed"):
            calls.add(4)
    assert calls.batches == [[0]]
    assert not calls.runner.failed.done()


async def test_a_batch_without_outcomes_ends_the_runner(caplog: pytest.LogCaptureFixture) -> None:
    async with blocked() as (calls, first):
        calls.error = KeyboardInterrupt("a defect")
        waiting = calls.add(1)
        calls.gate.set()
        await asyncio.wait_for(calls.runner.failed, 5)
        for done in (*first, *waiting):
            with pytest.raises(UnavailableError):
                await done
    assert "a batch of calls has no outcomes" in caplog.text
