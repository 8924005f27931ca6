"""The table of jobs: all watches share one search of the database, jobs that wait grow old, and limits hold."""

import asyncio
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import ExitStack, aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest
from sqlalchemy import Row

from stagemesh.common.errors import NotFoundError, OverloadedError
from stagemesh.common.process.media_config import MediaConfig
from stagemesh.common.tasks import end_tasks
from stagemesh.conformance.replicas import until
from stagemesh.jobs import watcher as watcher_module
from stagemesh.jobs.config import JobServerConfig
from stagemesh.jobs.database import JOBS, Database
from stagemesh.jobs.job_table import CANCELLED, QUEUED, RUNNING, JobTable, report_of
from stagemesh.jobs.watcher import JobWatcher
from stagemesh.v1 import jobs_pb2, jobs_pb2_grpc
from tests.jobs.servers import job_server
from tests.rpc.call_errors import raises

pytestmark = pytest.mark.timeout(240)
SEARCH_S = 0.5


class CountedTable(JobTable):
    """A table that counts its reads."""

    def __init__(self, database: Database, config: JobServerConfig) -> None:
        super().__init__(database, config)
        self.database = database
        self.finds = self.reads = 0

    async def find(self, caller: str, job_id: str) -> Row[Any]:
        self.finds += 1
        return await super().find(caller, job_id)

    async def read(self, numbers: Sequence[int]) -> Mapping[str, Row[Any]]:
        self.reads += bool(numbers)
        return await super().read(numbers)

    async def age(self, job_id: str, *, by_s: float) -> None:
        """Makes a job older."""
        changed = JOBS.update().where(JOBS.c.job_id == job_id).values(created_s=JOBS.c.created_s - by_s)
        await self.database.call(lambda connection: connection.execute(changed))

    async def claimed(self) -> str:
        """Claims a job, and returns its id."""
        claim = await self.claim()
        assert claim is not None
        return claim.submitted.request.request_id


@asynccontextmanager
async def table_of(folder: Path, **settings: Any) -> AsyncGenerator[CountedTable]:
    config = JobServerConfig("p", "127.0.0.1:0", ["127.0.0.1:1"], MediaConfig(str(folder)), **settings)
    database = Database(f"sqlite:///{folder}/jobs.sqlite3")
    await database.migrate()
    try:
        yield CountedTable(database, config)
    finally:
        database.close()


@asynccontextmanager
async def watching(table: JobTable, monkeypatch: pytest.MonkeyPatch) -> AsyncGenerator[JobWatcher]:
    monkeypatch.setattr(watcher_module, "_SEARCH_S", 0.02)
    watcher = JobWatcher(table)
    running = asyncio.create_task(watcher.run())
    try:
        yield watcher
    finally:
        await end_tasks([running])


def submitted(job_id: str, caller: str = "ada", *, priority: int = 0) -> jobs_pb2.SubmitJobRequest:
    request = jobs_pb2.SubmitJobRequest()
    request.request.request_id, request.request.caller, request.request.priority = job_id, caller, priority
    return request


async def test_watches_cause_one_read_for_all_of_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with table_of(tmp_path) as table, watching(table, monkeypatch) as watcher:
        names = [f"job-{number}" for number in range(20)]
        for name in names:
            await table.submit(submitted(name))
        seen: list[list[int]] = [[] for _ in range(100)]

        async def follow(number: int) -> None:
            async with aclosing(watcher.follow("ada", names[number % 20])) as jobs:
                async for job in jobs:
                    seen[number].append(job.state)

        watches = [asyncio.create_task(follow(number)) for number in range(100)]
        await until(lambda: all(seen), timeout_s=20)
        first = table.reads
        await until(lambda: table.reads >= first + 3, timeout_s=20)
        for name in names:
            await table.cancel("ada", name)
        await asyncio.gather(*watches)
        assert seen == [[QUEUED, CANCELLED]] * 100
        # Each watch has read its job once, at its start.
        assert table.finds == 100


async def test_the_watch_of_a_deleted_job_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with table_of(tmp_path) as table, watching(table, monkeypatch) as watcher:
        await table.submit(submitted("one"))
        async with aclosing(watcher.follow("ada", "one")) as jobs:
            assert (await anext(jobs)).state == QUEUED
            await table.remove(await table.find("ada", "one"))
            # The new job has the number of the deleted one.
            await table.submit(submitted("two", "eve"))
            with pytest.raises(NotFoundError):
                await anext(jobs)


async def test_a_renewed_lease_is_no_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with table_of(tmp_path) as table, watching(table, monkeypatch) as watcher:
        await table.submit(submitted("one"))
        claim = await table.claim()
        assert claim is not None
        report = report_of(claim.submitted)
        async with aclosing(watcher.follow("ada", "one")) as jobs:
            assert (await anext(jobs)).state == RUNNING
            following = asyncio.ensure_future(anext(jobs))
            await until(lambda: table.reads >= 1, timeout_s=20)
            first = table.reads
            await table.renew(claim, report)
            await until(lambda: table.reads >= first + 3, timeout_s=20)
            assert not following.done()
            report.labels["series"] = "sea"
            await table.renew(claim, report)
            assert (await following).labels["series"] == "sea"


def test_many_watches_leave_the_processor_to_other_callers(tmp_path: Path) -> None:
    with ExitStack() as stack:
        server = stack.enter_context(job_server(tmp_path, "127.0.0.1:1"))
        for number in range(20):
            server.submit(job_id=f"job-{number}", caller="eve")
        watches = list[Any]()
        for connection in range(10):
            options = [("grpc.use_local_subchannel_pool", 1)]
            channel = stack.enter_context(grpc.insecure_channel(server.config.listen, options=options))
            stub = jobs_pb2_grpc.JobServiceStub(channel)
            for number in range(100):
                request = jobs_pb2.WatchJobRequest(job_id=f"job-{(number + connection) % 20}", caller="eve")
                watches.append(stub.WatchJob(request, timeout=200))
        for watch in watches:
            next(watch)
        assert server.process is not None
        process = psutil.Process(server.process.pid)
        began_s = sum(process.cpu_times()[:2])
        # The time of a measurement: three searches.
        time.sleep(3 * SEARCH_S)
        used_s = sum(process.cpu_times()[:2]) - began_s
        for watch in watches:
            watch.cancel()
    assert used_s < SEARCH_S / 2


async def test_a_job_that_has_waited_is_not_overtaken_forever(tmp_path: Path) -> None:
    async with table_of(tmp_path) as table:
        for name, caller, priority in (("low", "ada", -10), ("high", "eve", 10), ("next", "eve", 10)):
            await table.submit(submitted(name, caller, priority=priority))
        assert await table.claimed() == "high"
        await table.age("low", by_s=601)
        assert await table.claimed() == "low"


async def test_a_flood_of_old_jobs_does_not_delay_another_caller(tmp_path: Path) -> None:
    async with table_of(tmp_path) as table:
        for number in range(5):
            await table.submit(submitted(f"old-{number}", "eve"))
            await table.age(f"old-{number}", by_s=1000)
        assert (await table.claimed()).startswith("old")
        await table.submit(submitted("new", "ada", priority=10))
        assert await table.claimed() == "new"


async def test_a_job_that_waits_for_too_long_expires(tmp_path: Path) -> None:
    async with table_of(tmp_path, max_wait_s=3600) as table:
        for name in ("stale", "running", "fresh"):
            await table.submit(submitted(name, priority=int(name == "running")))
        assert await table.claimed() == "running"
        for name in ("stale", "running"):
            await table.age(name, by_s=4000)
        (stale,) = await table.find_expired()
        await table.remove(stale)
        page = await table.list_page("ada", states=(), before=None, size=9)
        assert {job.job_id for job in page.jobs} == {"fresh", "running"}
        assert not any(job.HasField("expires_s") for job in page.jobs)


async def test_more_jobs_than_the_limits_are_rejected_also_when_they_have_ended(tmp_path: Path) -> None:
    async def reject(job_id: str, caller: str, reason: str, message: str) -> None:
        with raises(OverloadedError, reason=reason, match=message) as caught:
            await table.submit(submitted(job_id, caller))
        assert caught.value.retry_after_s

    async with table_of(tmp_path, max_queued=3, max_queued_per_caller=2, max_jobs_per_caller=2) as table:
        for job_id, caller in (("one", "ada"), ("two", "ada"), ("one", "bob")):
            await table.submit(submitted(job_id, caller))
        await reject("three", "ada", "ADMISSION_LIMIT", "max_queued")
        await table.cancel("bob", "one")
        await reject("three", "ada", "CALLER_LIMIT", "max_queued_per_caller")
        for job_id in ("one", "two"):
            await table.cancel("ada", job_id)
        await reject("three", "ada", "CALLER_LIMIT", "max_jobs_per_caller.*stagemesh job delete")
        assert (await table.submit(submitted("one"))).state == CANCELLED
        await table.remove(await table.find("ada", "one"))
        assert (await table.submit(submitted("three"))).state == QUEUED
