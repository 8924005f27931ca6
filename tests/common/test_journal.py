"""The journal of one run with many readers."""

import asyncio
from contextlib import aclosing

import pytest

from stagemesh.common.errors import UnavailableError
from stagemesh.common.notification import Journal


async def test_late_reader_receives_everything() -> None:
    journal = Journal[int]()
    journal.append(1)
    journal.append(2)
    journal.close()
    assert [item async for item in journal.follow()] == [1, 2]


async def test_all_waiting_readers_receive_an_item() -> None:
    journal = Journal[int]()
    async with asyncio.TaskGroup() as group:
        readers = [group.create_task(_collect(journal)) for _ in range(3)]
        await asyncio.sleep(0)
        journal.append(7)
        await asyncio.sleep(0)
        journal.append(8)
        journal.close()
    assert [reader.result() for reader in readers] == [[7, 8]] * 3


async def test_error_comes_after_the_items() -> None:
    journal = Journal[int]()
    journal.append(1)
    journal.close(UnavailableError("gone", metadata={"stage": "thinker"}))
    items = journal.follow()
    assert await anext(items) == 1
    with pytest.raises(UnavailableError, match="gone") as caught:
        await anext(items)
    assert caught.value.metadata == {"stage": "thinker"}


async def test_only_the_last_reader_abandons() -> None:
    abandoned: list[str] = []
    journal = Journal[int](on_abandoned=lambda: abandoned.append("run"))
    journal.append(1)
    async with aclosing(journal.follow()) as first:
        await anext(first)
        async with aclosing(journal.follow()) as second:
            await anext(second)
            assert journal.readers == 2
        assert abandoned == []
    assert abandoned == ["run"]


async def test_leaving_after_the_end_abandons_nothing() -> None:
    abandoned: list[str] = []
    journal = Journal[int](on_abandoned=lambda: abandoned.append("run"))
    journal.close()
    assert await _collect(journal) == []
    assert abandoned == []


async def test_first_close_decides() -> None:
    journal = Journal[int]()
    journal.close()
    journal.close(UnavailableError("too late"))
    assert await _collect(journal) == []


async def _collect(journal: Journal[int]) -> list[int]:
    async with aclosing(journal.follow()) as items:
        return [item async for item in items]
