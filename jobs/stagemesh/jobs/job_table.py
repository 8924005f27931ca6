"""The transactions on the table of jobs. Each function of a connection runs in one of them."""

import secrets
import uuid
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple

from sqlalchemy import Connection, Integer, Row, case, func, select
from sqlalchemy.exc import IntegrityError
from sqlalchemy.sql import ColumnElement

from stagemesh.common.errors import ExistsError, NotFoundError, OverloadedError
from stagemesh.jobs.config import JobServerConfig
from stagemesh.jobs.database import JOBS, Database, now_s
from stagemesh.v1 import jobs_pb2

QUEUED, RUNNING = jobs_pb2.JOB_STATE_QUEUED, jobs_pb2.JOB_STATE_RUNNING
SUCCEEDED, FAILED, CANCELLED = jobs_pb2.JOB_STATE_SUCCEEDED, jobs_pb2.JOB_STATE_FAILED, jobs_pb2.JOB_STATE_CANCELLED
ENDED = (SUCCEEDED, FAILED, CANCELLED)
_SEEDS = 1 << 63
_FULL_RETRY_S = 5.0
_CANDIDATES = 8
"""The number of jobs from which a process claims one, so that processes that claim at the same time find another."""
_EXPIRED_AT_ONCE = 100
_READ_AT_ONCE = 500
_AGED_S = 600.0
"""The age in seconds from which a job has the highest priority. Otherwise others could overtake it forever."""
_MAX_PRIORITY = 10
_REPORTED = set(JOBS.c.keys()).intersection(jobs_pb2.Job.DESCRIPTOR.fields_by_name)
"""The columns that callers receive in fields of the same name."""
# Requests may be large, and are read only to run them. The lease changes each second, which is not a change of the job.
_SHOWN = [column for column in JOBS.c if column.name not in {"submitted", "lease", "lease_until_s"}]


@dataclass(frozen=True)
class Claim:
    """A job that this process runs until it loses the lease."""

    number: int
    uid: str
    lease: str
    submitted: jobs_pb2.SubmitJobRequest
    attempts: int
    """The number of attempts, including this one."""
    failures: int
    """The number of earlier attempts that failed or whose process terminated."""
    requests: int
    """The number of earlier requests that ended with an error."""
    cancel_requested: bool

    @property
    def prefix(self) -> str:
        """The prefix of the names of the job's requests and of its folders in the store."""
        return prefix_of(self.uid)

    @property
    def request_id(self) -> str:
        """The id of the attempt's request.

        An attempt after the end of a process has the id of that process's request, so that it attaches to the request
        if an orchestrator still runs it.
        """
        return f"{self.prefix}{self.requests}"

    @property
    def folder(self) -> str:
        """The name of the folder for the attempt's files, which no other attempt uses."""
        return f"{self.prefix}{self.attempts}"


class Renewal(Enum):
    """The result of the renewal of a lease."""

    KEPT = "kept"
    CANCELLED = "cancelled"
    """The lease is kept, but a caller has cancelled the job."""
    LOST = "lost"
    """The job was deleted, or another process runs it."""


class Page(NamedTuple):
    """A page of jobs, and the number of the last one if there are more."""

    jobs: Sequence[jobs_pb2.Job]
    next_number: int | None


class JobTable:
    """The jobs of one pipeline. All methods raise UnavailableError (DATABASE_UNAVAILABLE)."""

    def __init__(self, database: Database, config: JobServerConfig) -> None:
        self._database, self._config = database, config
        self._is_ours = JOBS.c.pipeline == config.pipeline

    # -- for callers

    async def submit(self, submitted: jobs_pb2.SubmitJobRequest) -> jobs_pb2.Job:
        """Stores a job unless it exists. Its request has an id and a caller.

        Raises ExistsError (JOB_EXISTS) if the caller has a job with this id and other content, and OverloadedError
        (ADMISSION_LIMIT, CALLER_LIMIT) if too many jobs wait, or the caller has too many.
        """
        try:
            return await self._database.call(lambda connection: self._submit(connection, submitted))
        except IntegrityError:
            # Another process has stored the same job since this one has searched for it.
            return await self._database.call(lambda connection: self._submit(connection, submitted))

    async def find(self, caller: str, job_id: str) -> Row[Any]:
        """Returns the row of a job, for `job_of`, `read` and `remove`.

        Raises NotFoundError (UNKNOWN_JOB) if the caller has none with this id.
        """
        return await self._database.call(lambda connection: self._find(connection, caller, job_id))

    async def read(self, numbers: Sequence[int]) -> Mapping[str, Row[Any]]:
        """Returns the rows of the jobs that have these numbers now, by their uids."""

        def read(connection: Connection) -> Mapping[str, Row[Any]]:
            parts = (numbers[start : start + _READ_AT_ONCE] for start in range(0, len(numbers), _READ_AT_ONCE))
            queries = (select(*_SHOWN).where(JOBS.c.number.in_(part)) for part in parts)
            return {row.uid: row for query in queries for row in connection.execute(query)}

        return await self._database.call(read)

    async def list_page(self, caller: str, *, states: Collection[int], before: int | None, size: int) -> Page:
        """Returns at most `size` jobs of a caller, the newest first, without their outputs.

        - `states` are the states of the jobs, or empty for all.
        - `before` is the number of the last job of the previous page, or None for the first page.
        """
        wanted = select(*_SHOWN).where(self._is_ours, JOBS.c.caller == caller).order_by(JOBS.c.number.desc())
        if states:
            wanted = wanted.where(JOBS.c.state.in_(states))
        if before is not None:
            wanted = wanted.where(JOBS.c.number < before)
        rows = await self._database.call(lambda connection: connection.execute(wanted.limit(size + 1)).all())
        jobs = [job_of(row) for row in rows[:size]]
        for job in jobs:
            job.ClearField("outputs")
        return Page(jobs, rows[size - 1].number if len(rows) > size else None)

    async def cancel(self, caller: str, job_id: str) -> jobs_pb2.Job:
        """Cancels a queued job, and asks the process of a running job to do so. Returns the job.

        Raises NotFoundError (UNKNOWN_JOB).
        """
        return await self._database.call(lambda connection: self._cancel(connection, caller, job_id))

    async def remove(self, job: Row[Any]) -> None:
        """Deletes a job in any state. Idempotent. `job` has its `number` and its `uid`."""
        is_same = (JOBS.c.number == job.number) & (JOBS.c.uid == job.uid)
        await self._database.call(lambda connection: connection.execute(JOBS.delete().where(is_same)))

    # -- for the worker

    async def release_own(self) -> None:
        """Ends the leases of an earlier process with this process's name, so that its jobs need not wait for them."""
        owned = self._is_ours & (JOBS.c.worker == self._config.name) & (JOBS.c.state == RUNNING)
        ended = JOBS.update().where(owned).values(lease_until_s=0.0)
        await self._database.call(lambda connection: connection.execute(ended))

    async def claim(self) -> Claim | None:
        """Returns a job for this process to run, or None if none waits.

        Jobs of a higher priority are first, then those of callers with fewer running jobs, then the oldest.
        """
        return await self._database.call(self._claim)

    async def renew(self, claim: Claim, report: jobs_pb2.Job) -> Renewal:
        """Renews a lease, and stores the progress in `report`."""
        values = {"report": report.SerializeToString(), "lease_until_s": now_s() + self._config.lease_s}
        changed = JOBS.update().where(_is_held(claim)).values(values).returning(JOBS.c.cancel_requested)
        row = await self._database.call(lambda connection: connection.execute(changed).first())
        if row is None:
            return Renewal.LOST
        return Renewal.CANCELLED if row.cancel_requested else Renewal.KEPT

    async def end(self, claim: Claim, state: int, report: jobs_pb2.Job) -> bool:
        """Ends a job. Returns False if the lease is lost, so that the job's end is up to another process."""
        ended: dict[str, Any] = {"state": state, "ended_s": now_s(), "expires_s": now_s() + self._config.keep_s}
        return await self._leave(claim, report, ended)

    async def requeue(self, claim: Claim, report: jobs_pb2.Job, *, pause_s: float, failed: bool) -> bool:
        """Lets a job wait for its next attempt for at least `pause_s` seconds. Returns False if the lease is lost.

        `failed` is True if the attempt counts as a failure.
        """
        waiting: dict[str, Any] = {"state": QUEUED, "not_before_s": now_s() + pause_s}
        counts = {name: JOBS.c[name] + 1 for name in ("failures", "requests") if failed}
        return await self._leave(claim, report, {**waiting, **counts})

    async def is_deleted(self, claim: Claim) -> bool:
        """Returns whether a job does not exist any more."""
        found = select(JOBS.c.number).where(JOBS.c.number == claim.number, JOBS.c.uid == claim.uid)
        return await self._database.call(lambda connection: connection.execute(found).first() is None)

    async def find_expired(self) -> Sequence[Row[Any]]:
        """Returns the `number` and the `uid` of some expired jobs, including those that have waited for too long."""
        has_waited = (JOBS.c.state == QUEUED) & (JOBS.c.created_s < now_s() - self._config.max_wait_s)
        expired = select(*JOBS.c["number", "uid"]).where(self._is_ours, (JOBS.c.expires_s < now_s()) | has_waited)
        return await self._database.call(lambda connection: connection.execute(expired.limit(_EXPIRED_AT_ONCE)).all())

    # -- transactions

    def _find(self, connection: Connection, caller: str, job_id: str) -> Row[Any]:
        row = connection.execute(select(*_SHOWN).where(self._is(caller, job_id))).first()
        if row is None:
            raise NotFoundError(
                f"no job has the id {job_id[:140]!r}; it never existed, was deleted, has expired, or is not yours; "
                "list your jobs (`stagemesh job list`)",
                reason="UNKNOWN_JOB",
            )
        return row

    def _is(self, caller: str, job_id: str) -> ColumnElement[bool]:
        return self._is_ours & (JOBS.c.caller == caller) & (JOBS.c.job_id == job_id)

    def _submit(self, connection: Connection, submitted: jobs_pb2.SubmitJobRequest) -> jobs_pb2.Job:
        request = submitted.request
        known = select(JOBS.c.submitted).where(self._is(request.caller, request.request_id))
        content = connection.execute(known).scalar()
        if content is not None:
            _check_same(submitted, jobs_pb2.SubmitJobRequest.FromString(content))
            return job_of(self._find(connection, request.caller, request.request_id))
        self._check_limits(connection, request.caller)
        stored = jobs_pb2.SubmitJobRequest()
        stored.CopyFrom(submitted)
        if not request.parameters.HasField("seed"):
            stored.request.parameters.seed = secrets.randbelow(_SEEDS)
        values: dict[str, Any] = {
            "uid": uuid.uuid4().hex,
            "pipeline": self._config.pipeline,
            "caller": request.caller,
            "job_id": request.request_id,
            "submitted": stored.SerializeToString(),
            "priority": max(-_MAX_PRIORITY, min(_MAX_PRIORITY, request.priority)),
            "state": QUEUED,
            "report": report_of(stored).SerializeToString(),
            "created_s": now_s(),
        }
        connection.execute(JOBS.insert().values(values))
        return job_of(self._find(connection, request.caller, request.request_id))

    def _check_limits(self, connection: Connection, caller: str) -> None:
        of_caller = JOBS.c.caller == caller
        counted = select(func.count(), func.sum(of_caller.cast(Integer))).where(self._is_ours, JOBS.c.state == QUEUED)
        queued, queued_by_caller = connection.execute(counted).one()
        stored_by_caller = connection.execute(select(func.count()).where(self._is_ours, of_caller)).scalar_one()
        if queued >= self._config.max_queued:
            raise OverloadedError(
                f"{queued} jobs wait, which is the limit (`max_queued`); submit the job later",
                reason="ADMISSION_LIMIT",
                metadata={"max_queued": str(self._config.max_queued)},
                retry_after_s=_FULL_RETRY_S,
            )
        if (queued_by_caller or 0) >= self._config.max_queued_per_caller:
            problem = (
                f"{queued_by_caller} jobs of this caller wait, which is the limit (`max_queued_per_caller`); cancel one"
            )
        elif stored_by_caller >= self._config.max_jobs_per_caller:
            problem = (
                f"this caller has {stored_by_caller} jobs, which is the limit (`max_jobs_per_caller`); delete those "
                "that have ended (`stagemesh job delete`)"
            )
        else:
            return
        raise OverloadedError(
            f"{problem}, or submit the job later",
            reason="CALLER_LIMIT",
            metadata={"caller": caller},
            retry_after_s=_FULL_RETRY_S,
        )

    def _cancel(self, connection: Connection, caller: str, job_id: str) -> jobs_pb2.Job:
        row = self._find(connection, caller, job_id)
        is_queued = JOBS.c.state == QUEUED
        values: dict[str, Any] = {
            "cancel_requested": True,
            "state": case((is_queued, CANCELLED), else_=JOBS.c.state),
            "ended_s": case((is_queued, now_s())),
            "expires_s": case((is_queued, now_s() + self._config.keep_s)),
        }
        unended = (JOBS.c.number == row.number) & JOBS.c.state.in_((QUEUED, RUNNING))
        connection.execute(JOBS.update().where(unended).values(values))
        return job_of(self._find(connection, caller, job_id))

    def _claim(self, connection: Connection) -> Claim | None:
        waits = (JOBS.c.state == QUEUED) & (JOBS.c.not_before_s <= now_s())
        is_abandoned = (JOBS.c.state == RUNNING) & (JOBS.c.lease_until_s < now_s())
        running = (
            select(JOBS.c.caller, func.count().label("running"))
            .where(self._is_ours, JOBS.c.state == RUNNING)
            .group_by(JOBS.c.caller)
            .subquery()
        )
        priority = case((JOBS.c.created_s < now_s() - _AGED_S, _MAX_PRIORITY), else_=JOBS.c.priority)
        candidates = (
            select(*_SHOWN)
            .select_from(JOBS)
            .join(running, running.c.caller == JOBS.c.caller, isouter=True)
            .where(self._is_ours, waits | is_abandoned)
            .order_by(priority.desc(), func.coalesce(running.c.running, 0), JOBS.c.number)
            .limit(_CANDIDATES)
        )
        claims = (self._take(connection, row) for row in connection.execute(candidates).all())
        return next((claim for claim in claims if claim is not None), None)

    def _take(self, connection: Connection, row: Row[Any]) -> Claim | None:
        """Gives this process the lease of a job. Returns None if another process has changed the job."""
        values: dict[str, Any] = {
            "state": RUNNING,
            "attempts": row.attempts + 1,
            "failures": row.failures + int(row.state == RUNNING),
            "started_s": func.coalesce(JOBS.c.started_s, now_s()),
            "worker": self._config.name,
            "lease": uuid.uuid4().hex,
            "lease_until_s": now_s() + self._config.lease_s,
        }
        # Each claim increments `attempts`, so that only one of the processes that have read the row changes it.
        unchanged = (JOBS.c.number == row.number) & (JOBS.c.state == row.state) & (JOBS.c.attempts == row.attempts)
        unchanged &= (JOBS.c.state == QUEUED) | (JOBS.c.lease_until_s < now_s())
        job = connection.execute(JOBS.update().where(unchanged).values(values).returning(JOBS)).first()
        if job is None:
            return None
        submitted = jobs_pb2.SubmitJobRequest.FromString(job.submitted)
        counts = (job.attempts, job.failures, job.requests)
        return Claim(job.number, job.uid, job.lease, submitted, *counts, job.cancel_requested)

    async def _leave(self, claim: Claim, report: jobs_pb2.Job, values: dict[str, Any]) -> bool:
        changed = JOBS.update().where(_is_held(claim)).values({**values, "report": report.SerializeToString()})
        # The lease remains in the row, so that a repeated call finds that it has succeeded before.
        has_left = select(JOBS.c.number).where(JOBS.c.number == claim.number, JOBS.c.lease == claim.lease)

        def leave(connection: Connection) -> bool:
            return bool(connection.execute(changed).rowcount) or connection.execute(has_left).first() is not None

        return await self._database.call(leave)


def prefix_of(uid: str) -> str:
    """Returns the prefix of the names of a job's requests and of its folders in the store."""
    return f"job-{uid}."


def report_of(submitted: jobs_pb2.SubmitJobRequest) -> jobs_pb2.Job:
    """Returns the report of a job about which no more is known than its request."""
    return jobs_pb2.Job(seed=submitted.request.parameters.seed, labels=submitted.labels)


def _is_held(claim: Claim) -> ColumnElement[bool]:
    return (JOBS.c.number == claim.number) & (JOBS.c.lease == claim.lease) & (JOBS.c.state == RUNNING)


def _check_same(submitted: jobs_pb2.SubmitJobRequest, stored: jobs_pb2.SubmitJobRequest) -> None:
    if not submitted.request.parameters.HasField("seed"):
        submitted.request.parameters.seed = stored.request.parameters.seed
    if submitted != stored:
        raise ExistsError(
            f"a job with the id {submitted.request.request_id!r} has other content; use another request_id",
            reason="JOB_EXISTS",
        )


def job_of(row: Row[Any]) -> jobs_pb2.Job:
    """Returns the message of a job."""
    job = jobs_pb2.Job.FromString(row.report)
    job.MergeFrom(jobs_pb2.Job(**{name: getattr(row, name) for name in _REPORTED}))
    return job
