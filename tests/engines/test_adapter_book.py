"""Who may use which adapter, and when: as many at a time as vLLM has slots, also while some are pinned."""

import asyncio
from contextlib import AsyncExitStack

import pytest

from stagemesh.common.errors import ExistsError, NotFoundError, NotReadyError, OverloadedError
from stagemesh.services.engines.adapters.registry import AdapterRegistry, Entry


def make_book(*names: str, slots: int = 2, room: int = 4) -> AdapterRegistry:
    book = AdapterRegistry("tested", slots, room)
    for name in names:
        book.add(Entry(name, f"/{name}", 8, book.number()))
    return book


async def pin(book: AdapterRegistry, name: str) -> None:
    async with book.pinning(name) as entry:
        entry.held = True


async def settled() -> None:
    """Lets every task run until it waits."""
    for _ in range(5):
        await asyncio.sleep(0)


async def use(book: AdapterRegistry, name: str, until: asyncio.Event) -> None:
    async with book.using(name):
        await until.wait()


async def test_users_are_counted() -> None:
    book = make_book("a")
    async with book.using("a"), book.using("a"):
        assert book.listed()[0].running == 2
    assert book.listed()[0].running == 0


async def test_an_unknown_adapter_is_named_with_those_known() -> None:
    with pytest.raises(NotFoundError, match=r"no adapter 'c'; loaded: a, b") as caught:
        async with make_book("b", "a").using("c"):
            pass
    assert caught.value.reason == "UNKNOWN_ADAPTER"


async def test_without_pins_nobody_waits() -> None:
    book = make_book("a", "b", "c", slots=1)
    async with asyncio.timeout(1), book.using("a"), book.using("b"), book.using("c"):
        assert [adapter.running for adapter in book.listed()] == [1, 1, 1]


async def test_beside_a_pinned_adapter_others_share_what_is_left() -> None:
    book, done = make_book("a", "b", "c"), asyncio.Event()
    await pin(book, "a")
    async with asyncio.TaskGroup() as tasks, book.using("a"), AsyncExitStack() as first:
        await first.enter_async_context(book.using("b"))
        tasks.create_task(use(book, "c", done))
        tasks.create_task(use(book, "b", done))
        await settled()
        assert [adapter.running for adapter in book.listed()] == [1, 2, 0]
        done.set()
        await first.aclose()
        await settled()
    assert [adapter.running for adapter in book.listed()] == [0, 0, 0]


async def test_pinning_waits_for_more_users_than_slots_left() -> None:
    book = make_book("a", "b", "c")
    async with AsyncExitStack() as users, asyncio.TaskGroup() as tasks:
        for name in ("b", "c"):
            await users.enter_async_context(book.using(name))
        pinning = tasks.create_task(pin(book, "a"))
        await settled()
        assert not pinning.done()
        await users.aclose()
    assert [adapter.pinned for adapter in book.listed()] == [True, False, False]


async def test_a_pin_that_is_given_up_leaves_all_as_it_was() -> None:
    book = make_book("a", "b", "c")
    async with book.using("b"), book.using("c"):
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(pin(book, "a"), 0.01)
    async with asyncio.timeout(1), book.using("b"), book.using("c"):
        assert not book.listed()[0].pinned


async def test_pins_leave_the_others_a_slot() -> None:
    book = make_book("a", "b")
    await pin(book, "a")
    with pytest.raises(OverloadedError, match=r"2 slots, its max_loras; 'b' pinned would leave none for c") as caught:
        book.add(Entry("c", "/c", 8, book.number()))
        await pin(book, "b")
    assert caught.value.reason == "ADAPTERS_FULL"


async def test_no_room_is_no_loading() -> None:
    with pytest.raises(OverloadedError, match="2 adapters, its max_cpu_loras"):
        make_book("a", "b", room=2).loaded("c", "/c")
    book = make_book("a", slots=1)
    await pin(book, "a")
    with pytest.raises(OverloadedError, match="a pinned adapter in every slot"):
        book.loaded("c", "/c")


def test_a_name_stands_for_one_folder() -> None:
    book = make_book("a")
    assert book.loaded("a", "/a") is book.find("a")
    assert book.loaded("b", "/b") is None
    with pytest.raises(ExistsError, match="is loaded from /a"):
        book.loaded("a", "/b")


async def test_an_adapter_in_use_is_kept_unless_drained() -> None:
    book, done = make_book("a"), asyncio.Event()
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(use(book, "a", done))
        await settled()
        with pytest.raises(NotReadyError, match="used by 1 requests") as caught:
            async with book.leaving("a", drain=False):
                pass
        assert caught.value.reason == "ADAPTER_IN_USE"
        tasks.create_task(remove(book, "a"))
        await settled()
        with pytest.raises(NotReadyError, match="is being unloaded"):
            await use(book, "a", done)
        done.set()
    assert not book.listed()


async def remove(book: AdapterRegistry, name: str) -> None:
    async with book.leaving(name, drain=True) as entry:
        book.remove(entry)
