"""The servicer of JobService. Checks requests, and converts messages."""

import uuid
from collections.abc import AsyncIterator
from contextlib import aclosing

from stagemesh.common.errors import InvalidRequestError, NotFoundError
from stagemesh.common.media.store import MediaStore
from stagemesh.common.requests.request_checks import check_caller, check_input, check_known, check_request_id
from stagemesh.jobs.config import JobServerConfig
from stagemesh.jobs.job_table import JobTable, job_of, prefix_of
from stagemesh.jobs.watcher import JobWatcher
from stagemesh.jobs.worker import Worker, remove_files
from stagemesh.rpc.callers import caller_of
from stagemesh.rpc.handlers import Context, answered, streaming
from stagemesh.rpc.pages import invalid_token, size_of_page
from stagemesh.v1 import jobs_pb2, jobs_pb2_grpc

SERVICE_NAME = jobs_pb2.DESCRIPTOR.services_by_name["JobService"].full_name
_MAX_LABELS, _MAX_NAME_LENGTH, _MAX_LABEL_LENGTH = 16, 64, 1024


@answered
class JobServicer(jobs_pb2_grpc.JobServiceServicer):
    """Implements JobService for the jobs of one pipeline."""

    def __init__(
        self, config: JobServerConfig, table: JobTable, *, store: MediaStore, worker: Worker, watcher: JobWatcher
    ) -> None:
        self._config, self._table, self._store, self._worker, self._watcher = config, table, store, worker, watcher

    async def SubmitJob(self, request: jobs_pb2.SubmitJobRequest, context: Context) -> jobs_pb2.SubmitJobResponse:
        generate = request.request
        generate.caller = _caller(generate.caller)
        generate.request_id = generate.request_id or uuid.uuid4().hex
        _check(request, self._config)
        job = await self._table.submit(request)
        self._worker.wake()
        return jobs_pb2.SubmitJobResponse(job=job)

    async def GetJob(self, request: jobs_pb2.GetJobRequest, context: Context) -> jobs_pb2.GetJobResponse:
        return jobs_pb2.GetJobResponse(job=job_of(await self._table.find(_caller(request.caller), request.job_id)))

    async def ListJobs(self, request: jobs_pb2.ListJobsRequest, context: Context) -> jobs_pb2.ListJobsResponse:
        page = await self._table.list_page(
            _caller(request.caller),
            states=set(request.states),
            before=_number_of(request.page_token),
            size=size_of_page(request),
        )
        token = "" if page.next_number is None else str(page.next_number)
        return jobs_pb2.ListJobsResponse(jobs=page.jobs, next_page_token=token)

    @streaming
    async def WatchJob(
        self, request: jobs_pb2.WatchJobRequest, context: Context
    ) -> AsyncIterator[jobs_pb2.WatchJobResponse]:
        async with aclosing(self._watcher.follow(_caller(request.caller), request.job_id)) as jobs:
            async for job in jobs:
                yield jobs_pb2.WatchJobResponse(job=job)

    async def CancelJob(self, request: jobs_pb2.CancelJobRequest, context: Context) -> jobs_pb2.CancelJobResponse:
        return jobs_pb2.CancelJobResponse(job=await self._table.cancel(_caller(request.caller), request.job_id))

    async def DeleteJob(self, request: jobs_pb2.DeleteJobRequest, context: Context) -> jobs_pb2.DeleteJobResponse:
        job = await self._table.find(_caller(request.caller), request.job_id)
        await self._table.remove(job)
        await remove_files(self._store, prefix_of(job.uid))
        return jobs_pb2.DeleteJobResponse()


def _caller(claimed: str) -> str:
    caller = caller_of(claimed=claimed)
    check_caller(caller)
    return caller


def _check(submitted: jobs_pb2.SubmitJobRequest, config: JobServerConfig) -> None:
    """Checks what does not depend on the pipeline's stages. The orchestrator checks the rest when the job runs."""
    request = submitted.request
    check_request_id(request.request_id)
    check_known(request.parameters)
    check_input(request.input)
    if request.pipeline not in ("", config.pipeline):
        raise NotFoundError(
            f"pipeline {request.pipeline[:100]!r} is not served here; this job server serves {config.pipeline!r}",
            reason="UNKNOWN_PIPELINE",
            metadata={"pipeline": request.pipeline},
        )
    size_bytes, limit_bytes = submitted.ByteSize(), config.max_request_bytes
    if size_bytes > limit_bytes:
        raise InvalidRequestError(
            f"the job is {size_bytes} bytes long; the limit is {limit_bytes}; shorten the input, or upload its media",
            reason="MESSAGE_TOO_LARGE",
            metadata={"size_bytes": str(size_bytes), "limit_bytes": str(limit_bytes)},
        )
    labels = submitted.labels
    too_long = any(len(name) > _MAX_NAME_LENGTH or len(text) > _MAX_LABEL_LENGTH for name, text in labels.items())
    if len(labels) > _MAX_LABELS or too_long:
        raise InvalidRequestError(
            f"labels has {len(labels)} entries; it may have {_MAX_LABELS}, with names of at most {_MAX_NAME_LENGTH} "
            f"and texts of at most {_MAX_LABEL_LENGTH} characters"
        )


def _number_of(token: str) -> int | None:
    if not token:
        return None
    if not (token.isascii() and token.isdecimal() and len(token) < 19):
        raise invalid_token(token, "a list of jobs")
    return int(token)
