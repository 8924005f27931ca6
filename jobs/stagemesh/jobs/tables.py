"""The table of jobs."""

from typing import Any

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    Double,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Table,
    UniqueConstraint,
)
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.functions import FunctionElement
from sqlalchemy.types import TypeEngine

METADATA = MetaData()
JOBS = Table(
    "jobs",
    METADATA,
    # SQLite generates numbers only for the type INTEGER.
    Column("number", BigInteger().with_variant(Integer, "sqlite"), primary_key=True),
    Column("uid", String(32), nullable=False),
    Column("pipeline", String(128), nullable=False),
    Column("caller", String(128), nullable=False),
    Column("job_id", String(128), nullable=False),
    Column("submitted", LargeBinary, nullable=False),
    Column("priority", Integer, nullable=False),
    Column("state", Integer, nullable=False),
    Column("report", LargeBinary, nullable=False),
    Column("attempts", Integer, nullable=False),
    Column("failures", Integer, nullable=False),
    Column("requests", Integer, nullable=False),
    Column("created_s", Double, nullable=False),
    Column("started_s", Double),
    Column("ended_s", Double),
    Column("expires_s", Double),
    Column("not_before_s", Double, nullable=False),
    Column("cancel_requested", Boolean, nullable=False),
    Column("worker", String(128)),
    Column("lease", String(32)),
    Column("lease_until_s", Double),
    UniqueConstraint("pipeline", "caller", "job_id", name="jobs_of_a_caller"),
    Index("jobs_by_state", "pipeline", "state", "not_before_s"),
    Index("jobs_by_expiry", "pipeline", "expires_s"),
)
"""The jobs.

- `number` orders the jobs by their submission.
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
