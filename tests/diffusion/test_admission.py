"""Who may begin: as many as are allowed and as memory holds, and whoever leaves makes room."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import pytest

from stagemesh.common.errors import InvalidRequestError
from stagemesh.services.engines.diffusion.scheduling.admission import PLACES_A_PRIORITY, Admission, Footprint

SMALL = Footprint(10, 5)


class Guests:
    """Requests that stay until they are let go, and the order in which they came in."""

    def __init__(self, admission: Admission) -> None:
        self.inside: list[str] = []
        self._admission = admission
        self._doors: dict[str, asyncio.Event] = {}
        self.tasks: dict[str, asyncio.Task[None]] = {}

    async def come(self, name: str, footprint: Footprint = SMALL, *, priority: int = 0) -> None:
        """Until it is in, or waits."""
        self._doors[name] = asyncio.Event()
        self.tasks[name] = asyncio.create_task(self._stay(name, footprint, priority))
        await settled()

    async def leave(self, name: str) -> None:
        self._doors[name].set()
        await self.tasks[name]
        await settled()

    async def cancel(self, *names: str) -> None:
        """All at once."""
        for name in names:
            self.tasks[name].cancel()
        await settled()

    async def _stay(self, name: str, footprint: Footprint, priority: int) -> None:
        async with self._admission.admitted(footprint, priority=priority):
            self.inside.append(name)
            try:
                await self._doors[name].wait()
            finally:
                self.inside.remove(name)


async def settled() -> None:
    """Until whatever can go on without anybody's doing has."""
    for _ in range(8):
        await asyncio.sleep(0)


@asynccontextmanager
async def opened(*, max_running: int = 2, memory_bytes: int = 1000) -> AsyncGenerator[tuple[Admission, Guests]]:
    admission = Admission(max_running=max_running, memory_bytes=memory_bytes)
    guests = Guests(admission)
    try:
        yield admission, guests
    finally:
        await guests.cancel(*guests.tasks)
        results = await asyncio.gather(*guests.tasks.values(), return_exceptions=True)
    assert not [each for each in results if isinstance(each, Exception)]
    assert (admission.running, admission.waiting) == (0, 0)


async def test_only_so_many_run_at_once() -> None:
    async with opened() as (admission, guests):
        for name in "abc":
            await guests.come(name)
        assert (guests.inside, admission.running, admission.waiting) == (["a", "b"], 2, 1)
        await guests.leave("a")
        assert guests.inside == ["b", "c"]


async def test_the_highest_priority_is_next_and_else_the_first() -> None:
    async with opened(max_running=1) as (_, guests):
        await guests.come("runs")
        for name, priority in (("first", 0), ("second", 0), ("urgent", 1)):
            await guests.come(name, priority=priority)
        seen = list[str]()
        for _ in range(4):
            seen += guests.inside
            await guests.leave(seen[-1])
    assert seen == ["runs", "urgent", "first", "second"]


async def test_a_low_priority_waits_only_for_so_many() -> None:
    async with opened(max_running=1) as (_, guests):
        await guests.come("runs")
        await guests.come("low")
        others = 2 * PLACES_A_PRIORITY
        for number in range(others):
            await guests.come(str(number), priority=1)
        passed_by = 0
        await guests.leave("runs")
        while guests.inside != ["low"]:
            await guests.leave(guests.inside[0])
            passed_by += 1
    assert passed_by == PLACES_A_PRIORITY - 1


async def test_memory_counts_all_that_run_and_one_that_is_decoded() -> None:
    async with opened(max_running=9, memory_bytes=35) as (_, guests):
        for name in "abcd":
            await guests.come(name)
        assert guests.inside == ["a", "b", "c"]


async def test_nobody_passes_one_who_waits_for_memory() -> None:
    async with opened(max_running=9, memory_bytes=35) as (_, guests):
        await guests.come("runs")
        await guests.come("large", Footprint(30, 5))
        await guests.come("small")
        assert guests.inside == ["runs"]
        await guests.leave("runs")
        assert guests.inside == ["large"]


async def test_what_never_fits_is_refused_at_once() -> None:
    async with opened(memory_bytes=3 << 20) as (admission, _):
        with pytest.raises(InvalidRequestError, match="about 4 MiB beside the weights, and the stage has 3 MiB") as why:
            async with admission.admitted(Footprint(3 << 20, 1 << 20), priority=0):
                raise AssertionError("it was let in")
    assert why.value.reason == "TOO_LARGE"


async def test_one_that_gives_up_waiting_lets_those_behind_it_pass() -> None:
    async with opened(max_running=9, memory_bytes=35) as (admission, guests):
        await guests.come("runs")
        await guests.come("large", Footprint(30, 5))
        await guests.come("small")
        await guests.cancel("large")
        assert (guests.inside, admission.waiting) == (["runs", "small"], 0)


async def test_room_that_comes_as_somebody_gives_up_goes_to_the_next() -> None:
    async with opened(max_running=1) as (_, guests):
        await guests.come("runs")
        await guests.come("gives up")
        await guests.come("next")
        await guests.cancel("runs", "gives up")
        assert guests.inside == ["next"]


async def test_room_given_to_one_that_gives_up_at_once_goes_to_the_next() -> None:
    async with opened(max_running=1) as (_, guests):
        await guests.come("runs")
        await guests.come("gives up")
        await guests.come("next")
        guests.tasks["runs"].add_done_callback(lambda _: guests.tasks["gives up"].cancel())
        await guests.leave("runs")
        assert guests.inside == ["next"]


async def test_one_that_fails_inside_makes_room() -> None:
    async with opened(max_running=1) as (admission, guests):
        with pytest.raises(ValueError, match="inside"):
            async with admission.admitted(SMALL, priority=0):
                raise ValueError("inside")
        await guests.come("next")
        assert guests.inside == ["next"]
