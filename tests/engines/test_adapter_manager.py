"""The adapter manager admits at most as many adapters at a time as vLLM has slots, also while some are pinned."""

import asyncio
from contextlib import AsyncExitStack

import pytest

from stagemesh.common.errors import ExistsError, NotFoundError, NotReadyError, OverloadedError
from stagemesh.services.engines.adapters import AdapterManager, Entry
from tests.rpc.call_errors import raises


class Adapters(AdapterManager):
    """The adapters of an engine that accepts all adapters."""

    def __init__(self, *, slots: int, capacity: int) -> None:
        super().__init__(
            stage="tested", slots=slots, capacity=capacity, capacity_option="max_cpu_loras", lock=asyncio.Lock()
        )

    async def _engine_load(self, entry: Entry) -> int:
        return 8

    async def _engine_unload(self, entry: Entry) -> None: ...

    async def _engine_pin(self, entry: Entry) -> None: ...

    def _check_awake(self) -> None: ...


async def make_adapters(*names: str, slots: int = 2, capacity: int = 4) -> Adapters:
    adapters = Adapters(slots=slots, capacity=capacity)
    for name in names:
        await adapters.load(name, f"/{name}")
    return adapters


async def run_ready_tasks() -> None:
    """Lets every task run until it waits."""
    for _ in range(5):
        await asyncio.sleep(0)


async def use(adapters: Adapters, name: str, until: asyncio.Event) -> None:
    async with adapters.lease(name):
        await until.wait()


async def test_users_are_counted() -> None:
    adapters = await make_adapters("a")
    async with adapters.lease("a"), adapters.lease("a"):
        assert adapters.list_adapters()[0].running == 2
    assert adapters.list_adapters()[0].running == 0


async def test_an_unknown_adapter_error_lists_the_known_ones() -> None:
    with raises(NotFoundError, reason="UNKNOWN_ADAPTER", match=r"no adapter 'c'; loaded: a, b"):
        async with (await make_adapters("b", "a")).lease("c"):
            pass


async def test_without_pins_no_task_waits() -> None:
    adapters = await make_adapters("a", "b", "c", slots=1)
    async with asyncio.timeout(1), adapters.lease("a"), adapters.lease("b"), adapters.lease("c"):
        assert [adapter.running for adapter in adapters.list_adapters()] == [1, 1, 1]


async def test_unpinned_adapters_share_the_remaining_slots() -> None:
    adapters, done = await make_adapters("a", "b", "c"), asyncio.Event()
    await adapters.pin("a")
    async with asyncio.TaskGroup() as tasks, adapters.lease("a"), AsyncExitStack() as first:
        await first.enter_async_context(adapters.lease("b"))
        tasks.create_task(use(adapters, "c", done))
        tasks.create_task(use(adapters, "b", done))
        await run_ready_tasks()
        assert [adapter.running for adapter in adapters.list_adapters()] == [1, 2, 0]
        done.set()
        await first.aclose()
        await run_ready_tasks()
    assert [adapter.running for adapter in adapters.list_adapters()] == [0, 0, 0]


async def test_pinning_waits_until_enough_slots_are_free() -> None:
    adapters = await make_adapters("a", "b", "c")
    async with AsyncExitStack() as users, asyncio.TaskGroup() as tasks:
        for name in ("b", "c"):
            await users.enter_async_context(adapters.lease(name))
        pinning = tasks.create_task(adapters.pin("a"))
        await run_ready_tasks()
        assert not pinning.done()
        await users.aclose()
    assert [adapter.pinned for adapter in adapters.list_adapters()] == [True, False, False]


async def test_a_cancelled_pin_frees_its_reserved_slot() -> None:
    adapters = await make_adapters("a", "b", "c")
    async with adapters.lease("b"), adapters.lease("c"):
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(adapters.pin("a"), 0.01)
    async with asyncio.timeout(1), adapters.lease("b"), adapters.lease("c"):
        assert not adapters.list_adapters()[0].pinned


async def test_a_pin_must_leave_a_slot_for_other_adapters() -> None:
    adapters = await make_adapters("a", "b")
    await adapters.pin("a")
    with pytest.raises(OverloadedError, match=r"2 slots, its max_loras; pinning 'b' would leave none for c") as caught:
        await adapters.load("c", "/c")
        await adapters.pin("b")
    assert caught.value.reason == "ADAPTERS_FULL"


async def test_loading_into_a_full_registry_is_rejected() -> None:
    with pytest.raises(OverloadedError, match="2 adapters, its max_cpu_loras"):
        await (await make_adapters("a", "b", capacity=2)).load("c", "/c")
    adapters = await make_adapters("a", slots=1)
    await adapters.pin("a")
    with pytest.raises(OverloadedError, match="a pinned adapter in every slot"):
        await adapters.load("c", "/c")


async def test_a_name_belongs_to_one_folder() -> None:
    adapters = await make_adapters("a")
    assert await adapters.load("a", "/a") == adapters.list_adapters()[0]
    assert len(adapters.list_adapters()) == 1
    with pytest.raises(ExistsError, match="is loaded from /a"):
        await adapters.load("a", "/b")


async def test_an_adapter_in_use_is_unloaded_only_with_drain() -> None:
    adapters, done = await make_adapters("a"), asyncio.Event()
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(use(adapters, "a", done))
        await run_ready_tasks()
        with raises(NotReadyError, reason="ADAPTER_IN_USE", match="used by 1 requests"):
            await adapters.unload("a", drain=False)
        tasks.create_task(adapters.unload("a", drain=True))
        await run_ready_tasks()
        with pytest.raises(NotReadyError, match="is being unloaded"):
            await use(adapters, "a", done)
        done.set()
    assert not adapters.list_adapters()
