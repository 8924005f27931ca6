"""Journals of scripted steps."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any, cast

from stagemesh.common.notification import Journal
from stagemesh.v1 import stage_pb2


def journal_of(events: AsyncGenerator[stage_pb2.ExecuteStepResponse]) -> Journal[bytes]:
    """Returns a journal of the events that a generator yields. Closes the generator when the journal's last
    reader stops."""
    journal = Journal[bytes]()
    writing = asyncio.create_task(_write(events, journal))
    journal.on_abandoned = lambda: _cancel(writing)
    return journal


async def _write(events: AsyncGenerator[stage_pb2.ExecuteStepResponse], journal: Journal[bytes]) -> None:
    error: Exception | None = None
    try:
        async with aclosing(events):
            async for event in events:
                journal.append(event.SerializeToString())
    except Exception as exc:  # noqa: BLE001
        error = exc
    # An error may be of any kind here, because the caller must receive that of a defect, too.
    journal.close(cast("Any", error))


def _cancel(task: asyncio.Task[None]) -> None:
    task.cancel()
