"""The worker of a job server: claims jobs, runs their requests, and removes what has expired."""

import asyncio
import logging
from collections.abc import Collection
from contextlib import suppress
from functools import partial
from pathlib import Path

from stagemesh.client import Admitted, AsyncClient, AsyncResponseStream, Event, Finished, Progress, Queued
from stagemesh.common.backoff import Backoff
from stagemesh.common.errors import InternalError, StagemeshError, UnavailableError
from stagemesh.common.media.store import MediaStore
from stagemesh.common.tasks import end_tasks, wait_within
from stagemesh.jobs.config import JobServerConfig
from stagemesh.jobs.database import when_available
from stagemesh.jobs.job_table import CANCELLED, FAILED, SUCCEEDED, Claim, JobTable, Renewal, prefix_of, report_of
from stagemesh.jobs.outputs import FOLDER, AttemptOutputs
from stagemesh.rpc.error_mapping import error_to_wire
from stagemesh.v1 import errors_pb2, jobs_pb2, orchestrator_pb2, request_pb2, stage_pb2

_POLL_S = 0.5
"""The pause between two searches for a job, in seconds. A job that this process accepts is found at once."""
_RENEW_S = 1.0
"""The pause between two renewals of a lease, which also store the progress and find a cancellation."""
_SWEEP_S = 10.0
_STOP_S = 5.0
"""The time for which a process that stops waits for the database, in seconds."""
_ATTEMPT_PAUSES = Backoff(first_s=1.0, longest_s=60.0)
_STORED_OUTPUTS = "outputs"
"""The folder of the store in which stages store outputs. The names of its folders begin with those of requests."""
_CALLS_PER_ATTEMPT = 100
"""The calls of an attempt have numbers above those of the calls of earlier attempts, which they supersede."""

_log = logging.getLogger(__name__)


class Worker:
    """Runs the jobs of a table, up to `max_running` at the same time."""

    def __init__(
        self, config: JobServerConfig, table: JobTable, *, client: AsyncClient, store: MediaStore, spool: Path
    ) -> None:
        self._config, self._table, self._client = config, table, client
        self._store, self._spool = store, spool
        self._wake = asyncio.Event()
        self._free = asyncio.Semaphore(config.max_running)

    def wake(self) -> None:
        """Lets the worker search for a job at once."""
        self._wake.set()

    async def run(self) -> None:
        """Runs jobs until it is cancelled. Running jobs are then released for another process."""
        await when_available(self._table.release_own)
        async with asyncio.TaskGroup() as group:
            group.create_task(self._remove_expired(), name="remove expired jobs")
            while True:
                await self._free.acquire()
                claim = await self._next_claim()
                task = group.create_task(self._run_job(claim), name=f"job {claim.request_id}")
                task.add_done_callback(lambda _: self._free.release())

    async def _next_claim(self) -> Claim:
        """Waits for a job, and returns it."""
        while True:
            self._wake.clear()
            claim = await when_available(self._table.claim)
            if claim is not None:
                return claim
            await wait_within(_POLL_S, self._wake.wait())

    async def _run_job(self, claim: Claim) -> None:
        attempt = _Attempt(claim)
        try:
            async with AttemptOutputs(self._store, folder=claim.folder, spool=self._spool) as outputs:
                await self._run_attempt(attempt, outputs)
        except asyncio.CancelledError:
            # The process stops. If the database does not answer in time, the lease ends by itself.
            with suppress(StagemeshError):
                await self._table.requeue(claim, attempt.report, pause_s=0.0, failed=False)
            raise
        except Exception:  # noqa: BLE001 - a defect ends one job, not the job server
            _log.exception("job %s failed unexpectedly", claim.request_id)
            error = InternalError("the job server failed unexpectedly; its log at this time has the details")
            await self._end_without_outputs(claim, FAILED, attempt.failed_report(error))

    async def _run_attempt(self, attempt: "_Attempt", outputs: AttemptOutputs) -> None:
        """Runs the request, and ends or requeues the job."""
        claim = attempt.claim
        if claim.cancel_requested:
            await self._end_without_outputs(claim, CANCELLED, attempt.report)
            return
        if claim.failures >= self._config.max_failures:
            await self._end_without_outputs(claim, FAILED, attempt.failed_report(_abandoned(claim)))
            return
        generating = asyncio.create_task(self._generate(attempt, outputs), name=f"generate {claim.request_id}")
        renewing = asyncio.create_task(self._renew(attempt), name=f"renew {claim.request_id}")
        try:
            await asyncio.wait([generating, renewing], return_when=asyncio.FIRST_COMPLETED)
            # Until the request has ended, its outputs are in use.
            if generating.done():
                await self._finish(attempt, outputs, generating)
            elif renewing.result() is Renewal.CANCELLED:
                await end_tasks([generating])
                await self._end_without_outputs(claim, CANCELLED, attempt.report)
        finally:
            await end_tasks([generating, renewing])
        if renewing.done() and not renewing.cancelled() and renewing.result() is Renewal.LOST:
            await self._forget(claim)

    async def _generate(self, attempt: "_Attempt", outputs: AttemptOutputs) -> None:
        request = _request_of(attempt.claim, keeps_caller=self._config.tls is None)
        async for event in AsyncResponseStream(self._client, request=request, timeout_s=None):
            attempt.note(event)
            await outputs.add(event)

    async def _finish(self, attempt: "_Attempt", outputs: AttemptOutputs, generating: "asyncio.Task[None]") -> None:
        """Stores the outputs, or the error, of a request that has ended."""
        claim = attempt.claim
        try:
            await generating
            attempt.report.outputs.extend(await outputs.commit())
        except StagemeshError as exc:
            await self._fail(attempt, exc)
            return
        ending = asyncio.create_task(self._end(claim, SUCCEEDED, attempt.report), name=f"end {claim.request_id}")
        try:
            is_ended = await asyncio.shield(ending)
        except asyncio.CancelledError:
            await asyncio.wait([ending], timeout=_STOP_S)
            if not ending.done() or ending.result():
                # The database may have committed the job's end. Otherwise the next attempt removes the files.
                outputs.keep()
            await end_tasks([ending])
            raise
        if is_ended:
            outputs.keep()
            files = [file for output in attempt.report.outputs for file in output.files]
            await remove_files(self._store, claim.prefix, keep={file.uri.split("/")[-2] for file in files})
        else:
            await self._forget(claim)

    async def _fail(self, attempt: "_Attempt", error: StagemeshError) -> None:
        claim, report = attempt.claim, attempt.failed_report(error)
        counts = attempt.is_admitted
        if not _may_retry(error) or (counts and claim.failures + 1 >= self._config.max_failures):
            await self._end_without_outputs(claim, FAILED, report)
            return
        pause_s = max(_ATTEMPT_PAUSES.pause_s(claim.attempts), error.retry_after_s or 0.0)
        _log.warning("job %s is attempted again in %.0f s: %s", claim.request_id, pause_s, error.message)
        await when_available(lambda: self._table.requeue(claim, report, pause_s=pause_s, failed=counts))

    async def _end(self, claim: Claim, state: int, report: jobs_pb2.Job) -> bool:
        """Ends a job in the database. Returns False if its lease is lost."""
        return await when_available(lambda: self._table.end(claim, state, report))

    async def _end_without_outputs(self, claim: Claim, state: int, report: jobs_pb2.Job) -> None:
        """Ends a job that has failed or was cancelled, and removes the files of all of its attempts."""
        if await self._end(claim, state, report):
            await remove_files(self._store, claim.prefix)
        else:
            await self._forget(claim)

    async def _forget(self, claim: Claim) -> None:
        """Removes what stages have stored for a job that was deleted while it ran.

        Leaves the files of a job that another process runs to that process.
        """
        _log.info("job %s was deleted, or is run by another process", claim.request_id)
        if await when_available(lambda: self._table.is_deleted(claim)):
            await remove_files(self._store, claim.prefix)

    async def _renew(self, attempt: "_Attempt") -> Renewal:
        """Renews the lease until it is lost or the job is cancelled. Returns which of them has happened."""
        while True:
            await asyncio.sleep(_RENEW_S)
            # The attempt continues without the database. Its result is stored unless another process claims the job.
            with suppress(UnavailableError):
                renewal = await self._table.renew(attempt.claim, attempt.report)
                if renewal is not Renewal.KEPT:
                    return renewal

    async def _remove_expired(self) -> None:
        while True:
            for job in await when_available(self._table.find_expired):
                # The row remains until the files are deleted, so that a failure is repeated.
                if await remove_files(self._store, prefix_of(job.uid)):
                    await when_available(partial(self._table.remove, job))
            await asyncio.sleep(_SWEEP_S)


async def remove_files(store: MediaStore, prefix: str, *, keep: Collection[str] = ()) -> bool:
    """Removes the files of a job from a store. Returns whether that succeeded.

    - `prefix` is the prefix of the names of the job's folders.
    - `keep` are the names of the folders that remain.
    """
    try:
        for folder in (FOLDER, _STORED_OUTPUTS):
            await store.remove_folders(folder, prefix=prefix, keep=keep)
    except StagemeshError as exc:
        _log.warning("files of %s remain in the store: %s", prefix, exc.message)
        return False
    return True


class _Attempt:
    """An attempt at a job, and what is known about its request."""

    def __init__(self, claim: Claim) -> None:
        self.claim = claim
        self.report = report_of(claim.submitted)
        self.is_admitted = False
        self._progress: dict[tuple[str, int], orchestrator_pb2.RequestProgress] = {}

    def note(self, event: Event) -> None:
        """Notes the progress in an event."""
        match event:
            case Queued(position=position):
                self.report.queue_position = position
            case Admitted():
                self.is_admitted = True
                self.report.ClearField("queue_position")
            case Progress(stage=stage, index=index):
                if (stage, index) not in self._progress:
                    self._progress[stage, index] = self.report.progress.add(stage=stage, index=index)
                done = stage_pb2.StepProgress(
                    engine_steps=event.engine_steps, total_engine_steps=event.total_engine_steps
                )
                self._progress[stage, index].progress.CopyFrom(done)
            case Finished():
                for name, usage in event.usage.items():
                    self.report.usage[name].CopyFrom(request_pb2.Usage(**vars(usage)))
            case _:
                pass

    def failed_report(self, error: StagemeshError) -> jobs_pb2.Job:
        """Returns the report of a failed attempt."""
        report = report_of(self.claim.submitted)
        report.error.CopyFrom(error_to_wire(error))
        report.progress.extend(self.report.progress)
        return report


def _request_of(claim: Claim, *, keeps_caller: bool) -> orchestrator_pb2.GenerateRequest:
    """Returns the request of an attempt.

    With `keeps_caller`, the orchestrator counts it for the job's caller. Otherwise it counts for the job server, whose
    certificate does not contain the names of callers.
    """
    request = orchestrator_pb2.GenerateRequest()
    request.CopyFrom(claim.submitted.request)
    request.request_id = claim.request_id
    request.earlier_calls = min((claim.attempts - 1) * _CALLS_PER_ATTEMPT, 1_000_000)
    for field in ("next_positions", "linger_s", "generation", "parsed"):
        request.ClearField(field)
    if not keeps_caller:
        request.ClearField("caller")
    return request


def _may_retry(error: StagemeshError) -> bool:
    """Returns whether the catalogue of errors says that a retry can help, or whether the code says so."""
    value = errors_pb2.ErrorReason.DESCRIPTOR.values_by_name.get(f"ERROR_REASON_{error.reason}")
    if value is None:
        return isinstance(error, UnavailableError) or error.retry_after_s is not None
    return value.GetOptions().Extensions[errors_pb2.error_description].retry


def _abandoned(claim: Claim) -> InternalError:
    return InternalError(
        f"{claim.failures} attempts at the job failed, or ended with their job server; read the logs of the job "
        "servers, and submit the job again",
        reason="POISON_REQUEST",
    )
