"""The database of jobs: the table, and transactions in SQLite or PostgreSQL."""

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from importlib import resources
from pathlib import Path
from typing import Any, TypeVar

from alembic import command
from alembic.config import Config
from alembic.util import CommandError
from sqlalchemy import URL, Connection, Double, Engine, MetaData, Table, create_engine, event, make_url, text
from sqlalchemy.exc import ArgumentError, DBAPIError, IntegrityError
from sqlalchemy.exc import TimeoutError as PoolTimeoutError
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.functions import FunctionElement
from sqlalchemy.types import TypeEngine

from stagemesh.common.backoff import Backoff
from stagemesh.common.errors import InvalidRequestError, NotReadyError, UnavailableError, file_access
from stagemesh.common.process.logs import log_cause
from stagemesh.jobs.migrations.versions import v0001_jobs

_THREADS = 4
_BUSY_S = 5
"""The time in seconds for which a call waits for a lock or a connection."""
_STATEMENT_S = 10
_RETRY_AFTER_S = 1.0
_PAUSES = Backoff(first_s=0.5, longest_s=5.0)
_LOG_PAUSE_S = 60.0
_MIGRATION_LOCK = 7_405_283_114
"""The key of the lock of PostgreSQL that a migration has. Drawn at random."""

_log = logging.getLogger(__name__)
_Result = TypeVar("_Result")


class Database:
    """A database. Runs each transaction in a thread, so that it never blocks the event loop."""

    def __init__(self, url: str | URL) -> None:
        """Does not connect yet. `url` is that of `JobServerConfig.database`.

        Raises InvalidRequestError if the URL cannot be parsed (INVALID_CONFIG), or if the folder of a SQLite file
        cannot be created (CANNOT_WRITE).
        """
        self._engine = _make_engine(url)
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="database")

    async def call(self, function: Callable[[Connection], _Result]) -> _Result:
        """Calls a function within a transaction, which is committed when the function returns.

        Raises UnavailableError (DATABASE_UNAVAILABLE) if the database is locked, full or unreachable. The transaction
        may have been committed then.
        """
        return await asyncio.get_running_loop().run_in_executor(self._threads, self._run, function)

    async def migrate(self) -> None:
        """Creates or updates the tables. Several processes may call it at the same time.

        Raises UnavailableError (DATABASE_UNAVAILABLE), and NotReadyError (WRONG_VERSION) if a later version of
        Stagemesh has written the database.
        """
        await self.call(_upgrade)

    def close(self) -> None:
        """Waits for running transactions, and closes the connections."""
        self._threads.shutdown()
        self._engine.dispose()

    def _run(self, function: Callable[[Connection], _Result]) -> _Result:
        try:
            with self._engine.begin() as connection:
                return function(connection)
        except IntegrityError:
            raise
        except (DBAPIError, PoolTimeoutError) as exc:
            raise _unavailable(exc) from exc


async def when_available(call: Callable[[], Awaitable[_Result]]) -> _Result:
    """Repeats a transaction until the database is available. Logs once a minute that the database is not available."""
    retries, logged_s = _PAUSES.retries(), -math.inf
    while True:
        try:
            return await call()
        except UnavailableError as exc:
            if time.monotonic() - logged_s > _LOG_PAUSE_S:
                _log.warning("%s", exc.message)
                logged_s = time.monotonic()
        await retries.sleep()


def _make_engine(url: str | URL) -> Engine:
    try:
        parsed = make_url(url)
    except (ArgumentError, ValueError):
        # The cause would show a part of the URL, which may be a part of the password.
        raise InvalidRequestError(
            "the URL of the database cannot be parsed; write postgresql://USER:PASSWORD@HOST/NAME, with %-escapes for "
            "special characters of the password",
            reason="INVALID_CONFIG",
        ) from None
    if parsed.drivername == "sqlite":
        assert parsed.database is not None, "the config has been checked"
        file = Path(parsed.database)
        problem = f"the folder {file.parent} of the database cannot be created"
        remedy = "; make it writable, or set `database` to another file"
        with file_access(problem, reason="CANNOT_WRITE", remedy=remedy):
            file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            if file.exists():
                # An earlier version has created it for all users of the host. SQLite's other files have the same mode.
                file.chmod(0o600)
        engine = create_engine(parsed, connect_args={"timeout": _BUSY_S})
        event.listen(engine, "connect", _prepare_sqlite)
        return engine
    options = f"-c statement_timeout={_STATEMENT_S}s -c lock_timeout={_BUSY_S}s"
    return create_engine(
        parsed.set(drivername="postgresql+psycopg"),
        pool_pre_ping=True,
        pool_timeout=_BUSY_S,
        connect_args={"connect_timeout": _BUSY_S, "options": options, "tcp_user_timeout": _STATEMENT_S * 1000},
    )


def _prepare_sqlite(connection: Any, _record: object) -> None:
    connection.execute("PRAGMA journal_mode=WAL")
    # A commit survives a loss of power.
    connection.execute("PRAGMA synchronous=FULL")


def _upgrade(connection: Connection) -> None:
    if connection.dialect.name == "sqlite":
        connection.exec_driver_sql("BEGIN IMMEDIATE")
    else:
        connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": _MIGRATION_LOCK})
    config = Config()
    with resources.as_file(resources.files("stagemesh.jobs") / "migrations") as folder:
        config.set_main_option("script_location", str(folder))
        config.set_main_option("path_separator", "os")
        config.attributes["connection"] = connection
        try:
            command.upgrade(config, "head")
        except CommandError as exc:
            raise NotReadyError(
                f"a later version of Stagemesh has written the database of jobs ({exc}); install that version, or name "
                "another database",
                reason="WRONG_VERSION",
            ) from exc


def _unavailable(exc: Exception) -> UnavailableError:
    # SQLAlchemy's text would contain the values of the statement.
    cause = log_cause(getattr(exc, "orig", None) or exc, what="a transaction on the database of jobs")
    return UnavailableError(
        f"the database of jobs cannot be used; {cause}; nothing is lost; retry, and if it persists, the operator must "
        "free space or restore the database",
        reason="DATABASE_UNAVAILABLE",
        retry_after_s=_RETRY_AFTER_S,
    )


# Each migration defines the columns that it adds. Later migrations append theirs here.
JOBS = Table("jobs", MetaData(), *v0001_jobs.columns())
"""The jobs.

- `number` orders the jobs by their submission. SQLite reuses the numbers of deleted jobs.
- `uid` names the job's requests and files. It is never reused.
- `submitted` is the SubmitJobRequest.
- `report` is a Job message with the seed, the labels, the progress, the error, the outputs and the usage.
- `failures` counts the attempts that failed or whose process terminated, and `requests` those whose request failed.
- `not_before_s` is the earliest time of the next attempt.
- `lease` identifies the attempt that runs. Only a process that knows it may change the job's state.
"""


class now_s(FunctionElement[float]):  # noqa: N801 - named like SQL's functions
    """The database's time in seconds since 1970, so that the clocks of job servers need not agree."""

    type: TypeEngine[float] = Double()
    inherit_cache = True


@compiles(now_s, "sqlite")
def _compile_sqlite(_element: now_s, _compiler: Any, **_: Any) -> str:
    return "((julianday('now') - 2440587.5) * 86400.0)"


@compiles(now_s, "postgresql")
def _compile_postgresql(_element: now_s, _compiler: Any, **_: Any) -> str:
    return "(extract(epoch from clock_timestamp())::double precision)"
