"""Follows the jobs that callers watch. One search of the database finds the changes for all callers."""

import asyncio
import random
from collections.abc import AsyncGenerator
from functools import partial
from typing import Any

from sqlalchemy import Row

from stagemesh.jobs.database import when_available
from stagemesh.jobs.job_table import ENDED, JobTable, job_of
from stagemesh.v1 import jobs_pb2

_SEARCH_S = 0.5
"""The pause between two searches, in seconds."""
_SPREAD_S, _MAX_SPREAD_S = 0.002, 0.5
"""The time in seconds over which watches continue after a search, per watch. Other calls are served in between."""


class JobWatcher:
    """Follows jobs for callers while `run` runs."""

    def __init__(self, table: JobTable) -> None:
        self._table = table
        self._waiting: list[tuple[Row[Any], asyncio.Future[Row[Any] | None]]] = []
        """For each watch that waits, the row that it knows, and the future of the row's next state."""

    async def run(self) -> None:
        """Searches for changes of the watched jobs until it is cancelled. Waits for a database that is unavailable."""
        while True:
            await asyncio.sleep(_SEARCH_S)
            waiting = [each for each in self._waiting if not each[1].done()]
            # Watches that begin during the search are not part of it.
            self._waiting = list(waiting)
            numbers = {known.number for known, _ in waiting}
            rows = await when_available(partial(self._table.read, list(numbers)))
            for known, changed in waiting:
                if (row := rows.get(known.uid)) != known and not changed.done():
                    changed.set_result(row)

    async def follow(self, caller: str, job_id: str) -> AsyncGenerator[jobs_pb2.Job]:
        """Yields a job at once and after each change, until it has ended.

        Raises NotFoundError (UNKNOWN_JOB) if the caller has no job with this id, also if it is deleted meanwhile, and
        UnavailableError (DATABASE_UNAVAILABLE) if the database cannot be read at the start.
        """
        row = await self._table.find(caller, job_id)
        while True:
            yield (job := job_of(row))
            if job.state in ENDED:
                return
            changed: asyncio.Future[Row[Any] | None] = asyncio.get_running_loop().create_future()
            self._waiting.append((row, changed))
            row = await changed or await self._table.find(caller, job_id)
            await asyncio.sleep(random.uniform(0, min(_MAX_SPREAD_S, _SPREAD_S * len(self._waiting))))  # noqa: S311
