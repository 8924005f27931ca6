import re
import resource
import sqlite3
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import grpc
import pytest
from sqlalchemy import create_engine, inspect

from stagemesh.common.errors import StagemeshError, UnavailableError
from stagemesh.jobs.database import JOBS
from tests.deployment import Deployment, eventually
from tests.jobs.postgres import Postgres, postgres
from tests.jobs.servers import RUNNING, SUCCEEDED, JobServer, error_of, job_server, make_server, stored_names

pytestmark = pytest.mark.timeout(240)


@pytest.fixture(scope="module")
def postgresql() -> Iterator[Postgres]:
    with postgres() as server:
        yield server


@pytest.fixture
def database(postgresql: Postgres) -> Iterator[Postgres]:
    """A running server with an empty database."""
    with postgresql.new_database():
        yield postgresql


def columns_of(url: str) -> set[str]:
    engine = create_engine(url)
    try:
        return {column["name"] for column in inspect(engine).get_columns("jobs")}
    finally:
        engine.dispose()


def assert_unavailable(error: StagemeshError) -> None:
    assert (type(error), error.reason) == (UnavailableError, "DATABASE_UNAVAILABLE")
    assert error.retry_after_s
    assert re.search(r"the service's log has the cause \([0-9a-f]{8}\)", error.message)
    assert not re.search("sqlite|psycopg|locked|refused|disk|server|port", error.message, re.IGNORECASE)


def test_the_migrations_make_the_table_and_can_be_repeated(jobs_up: Deployment, tmp_path: Path) -> None:
    with make_server(tmp_path, jobs_up.endpoint) as server:
        for _ in range(2):
            server.start()
            assert server.stop() == 0
        assert columns_of(server.config.database) == set(JOBS.columns.keys())


def test_a_database_of_a_later_version_is_rejected(jobs_up: Deployment, tmp_path: Path) -> None:
    with make_server(tmp_path, jobs_up.endpoint) as server:
        server.start()
        server.stop()
        with sqlite3.connect(tmp_path / "jobs.sqlite3") as connection:
            connection.execute("UPDATE alembic_version SET version_num = '9999'")
        connection.close()
        server.launch()
        assert server.process is not None
        assert server.process.wait(timeout=30) != 0
        assert "later version of Stagemesh" in server.log.read_text()


def test_a_locked_database_delays_jobs(jobs_up: Deployment, tmp_path: Path) -> None:
    with job_server(tmp_path, jobs_up.endpoint) as server:
        server.submit(job_id="before", steps=400)
        server.wait("before", RUNNING)
        locker = sqlite3.connect(tmp_path / "jobs.sqlite3", isolation_level=None)
        locker.execute("BEGIN EXCLUSIVE")
        assert_unavailable(error_of(lambda: server.submit(job_id="during")))
        locker.execute("ROLLBACK")
        locker.close()
        server.submit(job_id="during")
        jobs = [server.wait(name) for name in ("before", "during")]
    assert [(job.state, job.attempts) for job in jobs] == [(SUCCEEDED, 1), (SUCCEEDED, 1)]
    assert len(stored_names(tmp_path)) == 2


def test_a_full_disk_rejects_jobs_until_there_is_space(jobs_up: Deployment, tmp_path: Path) -> None:
    with job_server(tmp_path, jobs_up.endpoint) as server:
        assert server.process is not None
        soft, hard = resource.prlimit(server.process.pid, resource.RLIMIT_FSIZE)
        resource.prlimit(server.process.pid, resource.RLIMIT_FSIZE, (1, hard))
        assert_unavailable(error_of(lambda: server.submit(job_id="full")))
        resource.prlimit(server.process.pid, resource.RLIMIT_FSIZE, (soft, hard))
        server.submit(job_id="full")
        assert server.wait("full").state == SUCCEEDED


def test_jobs_survive_a_crash_of_postgresql(jobs_up: Deployment, tmp_path: Path, database: Postgres) -> None:
    with job_server(tmp_path, jobs_up.endpoint, database=database.url) as server:
        server.submit(job_id="running", steps=400)
        server.wait("running", RUNNING)
        server.submit(job_id="queued", priority=-1)
        database.kill()
        assert_unavailable(error_of(lambda: server.get("running")))
        database.start()
        jobs = [server.wait(name) for name in ("running", "queued")]
    assert [job.state for job in jobs] == [SUCCEEDED, SUCCEEDED]
    assert len(stored_names(tmp_path)) == 2


def test_a_server_starts_before_its_database(jobs_up: Deployment, tmp_path: Path, database: Postgres) -> None:
    database.kill()
    with make_server(tmp_path, jobs_up.endpoint, database=database.url) as server:
        submit = partial(server.submit, job_id="early")
        server.launch()
        # Until the process listens, the error has another reason.
        eventually(lambda: error_of(submit).reason == "DATABASE_UNAVAILABLE", timeout_s=30)
        database.start()
        eventually(lambda: _succeeds(submit), timeout_s=30)
        assert server.wait("early").state == SUCCEEDED
    assert columns_of(database.url.replace("postgresql:", "postgresql+psycopg:")) == set(JOBS.columns.keys())


def _succeeds(call: Callable[[], object]) -> bool:
    try:
        call()
    except grpc.RpcError:
        return False
    return True


def test_servers_that_share_a_database_run_each_job_once(
    jobs_up: Deployment, tmp_path: Path, database: Postgres
) -> None:
    names = [f"job-{number}" for number in range(24)]
    with (
        make_server(tmp_path, jobs_up.endpoint, name="first", database=database.url, lease_s=2.0) as first,
        make_server(tmp_path, jobs_up.endpoint, name="second", database=database.url, lease_s=2.0) as second,
    ):
        servers = (first, second)
        with ThreadPoolExecutor(2) as threads:
            list(threads.map(JobServer.start, servers))
            list(threads.map(lambda server: server.submit(job_id="job-0"), servers))
        for index, name in enumerate(names[1:]):
            servers[index % 2].submit(job_id=name, steps=50)
        first.kill()
        jobs = [second.wait(name) for name in names]
    assert {job.state for job in jobs} == {SUCCEEDED}
    assert len(stored_names(tmp_path)) == len(names)
