"""The adapter registry admits at most as many adapters at a time as vLLM has slots, also while some are pinned."""

import asyncio
from contextlib import AsyncExitStack

import pytest

from stagemesh.common.errors import ExistsError, NotFoundError, NotReadyError, OverloadedError
from stagemesh.services.engines.adapters.registry import AdapterRegistry, Entry


def make_registry(*names: str, slots: int = 2, capacity: int = 4) -> AdapterRegistry:
    registry = AdapterRegistry("tested", slots, capacity)
    for name in names:
        registry.add(Entry(name, f"/{name}", 8, registry.next_number()))
    return registry


async def pin(registry: AdapterRegistry, name: str) -> None:
    async with registry.pinning(name) as entry:
        entry.pinned = True


async def run_ready_tasks() -> None:
    """Lets every task run until it waits."""
    for _ in range(5):
        await asyncio.sleep(0)


async def use(registry: AdapterRegistry, name: str, until: asyncio.Event) -> None:
    async with registry.using(name):
        await until.wait()


async def test_users_are_counted() -> None:
    registry = make_registry("a")
    async with registry.using("a"), registry.using("a"):
        assert registry.list_adapters()[0].running == 2
    assert registry.list_adapters()[0].running == 0


async def test_an_unknown_adapter_error_lists_the_known_ones() -> None:
    with pytest.raises(NotFoundError, match=r"no adapter 'c'; loaded: a, b") as caught:
        async with make_registry("b", "a").using("c"):
            pass
    assert caught.value.reason == "UNKNOWN_ADAPTER"


async def test_without_pins_no_task_waits() -> None:
    registry = make_registry("a", "b", "c", slots=1)
    async with asyncio.timeout(1), registry.using("a"), registry.using("b"), registry.using("c"):
        assert [adapter.running for adapter in registry.list_adapters()] == [1, 1, 1]


async def test_unpinned_adapters_share_the_remaining_slots() -> None:
    registry, done = make_registry("a", "b", "c"), asyncio.Event()
    await pin(registry, "a")
    async with asyncio.TaskGroup() as tasks, registry.using("a"), AsyncExitStack() as first:
        await first.enter_async_context(registry.using("b"))
        tasks.create_task(use(registry, "c", done))
        tasks.create_task(use(registry, "b", done))
        await run_ready_tasks()
        assert [adapter.running for adapter in registry.list_adapters()] == [1, 2, 0]
        done.set()
        await first.aclose()
        await run_ready_tasks()
    assert [adapter.running for adapter in registry.list_adapters()] == [0, 0, 0]


async def test_pinning_waits_until_enough_slots_are_free() -> None:
    registry = make_registry("a", "b", "c")
    async with AsyncExitStack() as users, asyncio.TaskGroup() as tasks:
        for name in ("b", "c"):
            await users.enter_async_context(registry.using(name))
        pinning = tasks.create_task(pin(registry, "a"))
        await run_ready_tasks()
        assert not pinning.done()
        await users.aclose()
    assert [adapter.pinned for adapter in registry.list_adapters()] == [True, False, False]


async def test_a_cancelled_pin_frees_its_reserved_slot() -> None:
    registry = make_registry("a", "b", "c")
    async with registry.using("b"), registry.using("c"):
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(pin(registry, "a"), 0.01)
    async with asyncio.timeout(1), registry.using("b"), registry.using("c"):
        assert not registry.list_adapters()[0].pinned


async def test_a_pin_must_leave_a_slot_for_other_adapters() -> None:
    registry = make_registry("a", "b")
    await pin(registry, "a")
    with pytest.raises(OverloadedError, match=r"2 slots, its max_loras; pinning 'b' would leave none for c") as caught:
        registry.add(Entry("c", "/c", 8, registry.next_number()))
        await pin(registry, "b")
    assert caught.value.reason == "ADAPTERS_FULL"


async def test_loading_into_a_full_registry_is_rejected() -> None:
    with pytest.raises(OverloadedError, match="2 adapters, its max_cpu_loras"):
        make_registry("a", "b", capacity=2).find_loaded("c", "/c")
    registry = make_registry("a", slots=1)
    await pin(registry, "a")
    with pytest.raises(OverloadedError, match="a pinned adapter in every slot"):
        registry.find_loaded("c", "/c")


def test_a_name_belongs_to_one_folder() -> None:
    registry = make_registry("a")
    assert registry.find_loaded("a", "/a") is registry.find("a")
    assert registry.find_loaded("b", "/b") is None
    with pytest.raises(ExistsError, match="is loaded from /a"):
        registry.find_loaded("a", "/b")


async def test_an_adapter_in_use_is_unloaded_only_with_drain() -> None:
    registry, done = make_registry("a"), asyncio.Event()
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(use(registry, "a", done))
        await run_ready_tasks()
        with pytest.raises(NotReadyError, match="used by 1 requests") as caught:
            async with registry.unloading("a", drain=False):
                pass
        assert caught.value.reason == "ADAPTER_IN_USE"
        tasks.create_task(remove(registry, "a"))
        await run_ready_tasks()
        with pytest.raises(NotReadyError, match="is being unloaded"):
            await use(registry, "a", done)
        done.set()
    assert not registry.list_adapters()


async def remove(registry: AdapterRegistry, name: str) -> None:
    async with registry.unloading(name, drain=True) as entry:
        registry.remove(entry)
