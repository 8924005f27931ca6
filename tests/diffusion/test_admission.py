"""Admission of requests, limited by their number and by memory."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import pytest

from stagemesh.common.errors import InvalidRequestError
from stagemesh.services.engines.diffusion.admission import POSITIONS_PER_PRIORITY, Admission, Footprint
from tests.rpc.call_errors import raises

SMALL = Footprint(10, 5)


class RequestGroup:
    """Requests that run until a test releases them, in the order of their admission."""

    def __init__(self, admission: Admission) -> None:
        self.running: list[str] = []
        self._admission = admission
        self._finished: dict[str, asyncio.Event] = {}
        self.tasks: dict[str, asyncio.Task[None]] = {}

    async def submit(self, *names: str, footprint: Footprint = SMALL, priority: int = 0) -> None:
        """Submits requests one after another, each of which is then running or waiting."""
        for name in names:
            self._finished[name] = asyncio.Event()
            self.tasks[name] = asyncio.create_task(self._stay(name, footprint, priority))
            await until_blocked()

    async def finish(self, name: str) -> None:
        self._finished[name].set()
        await self.tasks[name]
        await until_blocked()

    async def cancel(self, *names: str) -> None:
        """Cancels requests at the same time."""
        for name in names:
            self.tasks[name].cancel()
        await until_blocked()

    async def _stay(self, name: str, footprint: Footprint, priority: int) -> None:
        async with self._admission.admitted(footprint, priority=priority):
            self.running.append(name)
            try:
                await self._finished[name].wait()
            finally:
                self.running.remove(name)


async def until_blocked() -> None:
    """Waits until all tasks are blocked."""
    for _ in range(8):
        await asyncio.sleep(0)


@asynccontextmanager
async def opened(*, max_running: int = 2, memory_bytes: int = 1000) -> AsyncGenerator[tuple[Admission, RequestGroup]]:
    admission = Admission(max_running=max_running, memory_bytes=memory_bytes)
    requests = RequestGroup(admission)
    try:
        yield admission, requests
    finally:
        await requests.cancel(*requests.tasks)
        results = await asyncio.gather(*requests.tasks.values(), return_exceptions=True)
    assert not [each for each in results if isinstance(each, Exception)]
    assert (admission.running, admission.waiting) == (0, 0)


async def test_the_number_of_running_requests_is_limited() -> None:
    async with opened() as (admission, requests):
        await requests.submit("a", "b", "c")
        assert (requests.running, admission.running, admission.waiting) == (["a", "b"], 2, 1)
        await requests.finish("a")
        assert requests.running == ["b", "c"]


async def test_admission_is_by_priority_then_by_arrival() -> None:
    async with opened(max_running=1) as (_, requests):
        await requests.submit("runs", "first", "second")
        await requests.submit("urgent", priority=1)
        seen = list[str]()
        for _ in range(4):
            seen += requests.running
            await requests.finish(seen[-1])
    assert seen == ["runs", "urgent", "first", "second"]


async def test_a_low_priority_is_overtaken_a_limited_number_of_times() -> None:
    async with opened(max_running=1) as (_, requests):
        await requests.submit("runs", "low")
        await requests.submit(*map(str, range(2 * POSITIONS_PER_PRIORITY)), priority=1)
        passed_by = 0
        await requests.finish("runs")
        while requests.running != ["low"]:
            await requests.finish(requests.running[0])
            passed_by += 1
    assert passed_by == POSITIONS_PER_PRIORITY - 1


async def test_memory_counts_all_running_requests_and_one_decode() -> None:
    async with opened(max_running=9, memory_bytes=35) as (_, requests):
        await requests.submit("a", "b", "c", "d")
        assert requests.running == ["a", "b", "c"]


@pytest.mark.parametrize("cancels", [False, True])
async def test_no_request_overtakes_one_that_waits_for_memory(cancels: bool) -> None:
    async with opened(max_running=9, memory_bytes=35) as (admission, requests):
        await requests.submit("runs")
        await requests.submit("large", footprint=Footprint(30, 5))
        await requests.submit("small")
        assert requests.running == ["runs"]
        await (requests.cancel("large") if cancels else requests.finish("runs"))
        assert (requests.running, admission.waiting) == ((["runs", "small"], 0) if cancels else (["large"], 1))


async def test_a_request_that_never_fits_is_rejected_at_once() -> None:
    async with opened(memory_bytes=3 << 20) as (admission, _):
        problem = "about 4 MiB in addition to the weights, and the stage has 3 MiB"
        with raises(InvalidRequestError, reason="EXCEEDS_MEMORY", match=problem):
            async with admission.admitted(Footprint(3 << 20, 1 << 20), priority=0):
                raise AssertionError("it was let in")


@pytest.mark.parametrize("late", [False, True])
async def test_the_slot_of_a_cancelled_request_goes_to_the_next(late: bool) -> None:
    async with opened(max_running=1) as (_, requests):
        await requests.submit("runs", "gives up", "next")
        if late:
            requests.tasks["runs"].add_done_callback(lambda _: requests.tasks["gives up"].cancel())
            await requests.finish("runs")
        else:
            await requests.cancel("runs", "gives up")
        assert requests.running == ["next"]


async def test_a_failed_request_frees_its_slot() -> None:
    async with opened(max_running=1) as (admission, requests):
        with pytest.raises(ValueError, match="inside"):
            async with admission.admitted(SMALL, priority=0):
                raise ValueError("inside")
        await requests.submit("next")
        assert requests.running == ["next"]
