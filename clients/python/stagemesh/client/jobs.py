"""Jobs: requests that the job server of a pipeline runs, whether or not the client remains connected."""

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeVar, Unpack, cast

import grpc
import grpc.aio

from stagemesh.client.content import Content, MediaFile
from stagemesh.client.media_transfer import ServiceAddress, stored_file
from stagemesh.client.received_events import finish_reason, read_fields, to_progress
from stagemesh.client.requests import GenerateArguments, build_request
from stagemesh.client.responses import Progress, Usage
from stagemesh.client.retries import RetryPolicy
from stagemesh.common.backoff import Backoff
from stagemesh.common.errors import InvalidRequestError, StagemeshError, UnavailableError, UnsupportedError, writing
from stagemesh.common.media.files import suffix_of
from stagemesh.rpc.channels import open_async, open_sync
from stagemesh.rpc.error_mapping import error_from_wire, from_rpc_error, is_broken
from stagemesh.v1 import jobs_pb2, orchestrator_pb2
from stagemesh.v1.jobs_pb2_grpc import JobServiceStub

if TYPE_CHECKING:
    from stagemesh.client.clients import AsyncClient, Client
    from stagemesh.v1.jobs_pb2_grpc import JobServiceAsyncStub

JobState = Literal["queued", "running", "succeeded", "failed", "cancelled"]
"""The state of a job. The last three are final."""
JOB_STATES: tuple[JobState, ...] = ("queued", "running", "succeeded", "failed", "cancelled")
_CALL_TIMEOUT_S = 30.0
_PREFIX = "JOB_STATE_"
_PAGE = 100

_Answer = TypeVar("_Answer")


@dataclass(frozen=True)
class JobOutput:
    """An output of one choice of a job. It has text, token ids or files."""

    name: str
    index: int
    """The choice, from 0."""
    finish_reason: str
    """Why the output ended, as in `OutputFinished`."""
    text: str
    token_ids: tuple[int, ...]
    files: tuple[MediaFile, ...]
    """The stored files: one for each image, and one otherwise. Text of more than 64 KiB is a file, too."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """The state of a job when the server reported it. Times are seconds since 1970-01-01 00:00 UTC."""

    job_id: str
    caller: str
    state: JobState
    attempts: int
    created_s: float
    started_s: float | None
    ended_s: float | None
    expires_s: float | None
    """The time at which the server deletes the job and its files. None before the job has ended."""
    cancel_requested: bool
    queue_position: int
    """The position in the orchestrator's queue, from 1. 0 if the job does not wait there."""
    progress: tuple[Progress, ...]
    """The latest progress of each stage, for each choice."""
    error: StagemeshError | None
    """Why the job failed. While it is queued again: why its last attempt failed."""
    outputs: tuple[JobOutput, ...]
    """The outputs of a job that has succeeded. Empty in a list of jobs."""
    usage: Mapping[str, Usage]
    seed: int
    labels: Mapping[str, str]

    @property
    def is_ended(self) -> bool:
        """Whether the state is final."""
        return self.state not in ("queued", "running")

    @property
    def fraction(self) -> float | None:
        """The completed part of the steps of all stages that know their number of steps, from 0 to 1.

        None if no stage knows it yet.
        """
        if self.state == "succeeded":
            return 1.0
        known = [each for each in self.progress if each.total_engine_steps]
        total = sum(each.total_engine_steps or 0 for each in known)
        return min(1.0, sum(each.engine_steps for each in known) / total) if total else None


class AsyncJobs:
    """The jobs of the pipeline of an `AsyncClient`.

    Calls are repeated for `RetryPolicy.reattach_s` seconds while the job server or its database is unavailable. All
    methods raise UnsupportedError if the pipeline has no job server, and all but `submit` and `list` raise
    NotFoundError (UNKNOWN_JOB) if the caller has no such job. `caller` is the caller's name, which credentials
    determine.
    """

    def __init__(self, client: "AsyncClient") -> None:
        self._client = client
        self._address: ServiceAddress | None = None

    async def submit(
        self,
        prompt: Content | None = None,
        *,
        labels: Mapping[str, str] | None = None,
        **arguments: Unpack[GenerateArguments],
    ) -> Job:
        """Submits a job with the arguments of `generate`. Its id is `request_id`, by default a random one.

        `labels` are texts by name, which the server returns with the job. A repeated call with the same request_id
        returns the existing job. Raises ExistsError (JOB_EXISTS) if that has other content, and OverloadedError if too
        many jobs wait, or the caller has too many.
        """
        request = jobs_pb2.SubmitJobRequest(request=build_request(prompt, arguments), labels=labels)
        return to_job((await self._call(lambda stub: stub.SubmitJob(request, timeout=_CALL_TIMEOUT_S))).job)

    async def get(self, job_id: str, *, caller: str = "") -> Job:
        """Returns a job."""
        request = jobs_pb2.GetJobRequest(job_id=job_id, caller=caller)
        return to_job((await self._call(lambda stub: stub.GetJob(request, timeout=_CALL_TIMEOUT_S))).job)

    async def list(self, *, states: Sequence[JobState] = (), caller: str = "") -> AsyncGenerator[Job]:
        """Yields the caller's jobs, the newest first, without their outputs. `states` restricts them to some states."""
        request = _list_request(states, caller)
        while True:
            page = await self._call(lambda stub: stub.ListJobs(request, timeout=_CALL_TIMEOUT_S))
            for job in page.jobs:
                yield to_job(job)
            request.page_token = page.next_page_token
            if not request.page_token:
                return

    async def watch(self, job_id: str, *, caller: str = "") -> AsyncGenerator[Job]:
        """Yields the job at once, and after each change until it has ended. Iterate within `contextlib.aclosing`."""
        request = jobs_pb2.WatchJobRequest(job_id=job_id, caller=caller)
        retries, shown = _Retries(self._client.retry_policy), None
        while True:
            address = await self._find()
            try:
                async with open_async(address.endpoint, self._client.credentials, address.options) as channel:
                    async for response in JobServiceStub(channel).WatchJob(request):
                        retries.note_answer()
                        if response.job != shown:
                            shown = response.job
                            yield to_job(shown)
                    return
            except grpc.aio.AioRpcError as exc:
                await asyncio.sleep(retries.pause_s(exc, peer=address.endpoint))

    async def cancel(self, job_id: str, *, caller: str = "") -> Job:
        """Cancels a job. Returns it: a running job stops some seconds later."""
        request = jobs_pb2.CancelJobRequest(job_id=job_id, caller=caller)
        return to_job((await self._call(lambda stub: stub.CancelJob(request, timeout=_CALL_TIMEOUT_S))).job)

    async def delete(self, job_id: str, *, caller: str = "") -> None:
        """Stops a job if it runs, and deletes it and its files."""
        request = jobs_pb2.DeleteJobRequest(job_id=job_id, caller=caller)
        await self._call(lambda stub: stub.DeleteJob(request, timeout=_CALL_TIMEOUT_S))

    async def download(self, job: Job, folder: Path | str) -> Sequence[Path]:
        """Downloads the files of a job into a folder, which is created. Returns their paths.

        Raises the errors of `AsyncClient.download`.
        """
        files = download_paths(job, Path(folder))
        for path, file in files.items():
            await self._client.download(file, path)
        return list(files)

    async def _find(self) -> ServiceAddress:
        if self._address is None:
            self._address = _address_of(await self._client.describe())
        return self._address

    async def _call(self, method: "Callable[[JobServiceAsyncStub], Awaitable[_Answer]]") -> _Answer:
        retries = _Retries(self._client.retry_policy)
        address = await self._find()
        while True:
            try:
                async with open_async(address.endpoint, self._client.credentials, address.options) as channel:
                    return await method(JobServiceStub(channel))
            except grpc.aio.AioRpcError as exc:
                await asyncio.sleep(retries.pause_s(exc, peer=address.endpoint))


class Jobs:
    """The jobs of the pipeline of a `Client`. The methods are those of `AsyncJobs`."""

    def __init__(self, client: "Client") -> None:
        self._client = client
        self._address: ServiceAddress | None = None

    def submit(
        self,
        prompt: Content | None = None,
        *,
        labels: Mapping[str, str] | None = None,
        **arguments: Unpack[GenerateArguments],
    ) -> Job:
        """Submits a job with the arguments of `generate`, in the same way as `AsyncJobs.submit`."""
        request = jobs_pb2.SubmitJobRequest(request=build_request(prompt, arguments), labels=labels)
        return to_job(self._call(lambda stub: stub.SubmitJob(request, timeout=_CALL_TIMEOUT_S)).job)

    def get(self, job_id: str, *, caller: str = "") -> Job:
        """Returns a job."""
        request = jobs_pb2.GetJobRequest(job_id=job_id, caller=caller)
        return to_job(self._call(lambda stub: stub.GetJob(request, timeout=_CALL_TIMEOUT_S)).job)

    def list(self, *, states: Sequence[JobState] = (), caller: str = "") -> Generator[Job]:
        """Yields the caller's jobs, the newest first, without their outputs. `states` restricts them to some states."""
        request = _list_request(states, caller)
        while True:
            page = self._call(lambda stub: stub.ListJobs(request, timeout=_CALL_TIMEOUT_S))
            yield from map(to_job, page.jobs)
            request.page_token = page.next_page_token
            if not request.page_token:
                return

    def watch(self, job_id: str, *, caller: str = "") -> Generator[Job]:
        """Yields the job at once, and after each change until it has ended."""
        request = jobs_pb2.WatchJobRequest(job_id=job_id, caller=caller)
        retries, shown = _Retries(self._client.retry_policy), None
        while True:
            address = self._find()
            try:
                with open_sync(address.endpoint, self._client.credentials, address.options) as channel:
                    for response in JobServiceStub(channel).WatchJob(request):
                        retries.note_answer()
                        if response.job != shown:
                            shown = response.job
                            yield to_job(shown)
                    return
            except grpc.RpcError as exc:
                time.sleep(retries.pause_s(exc, peer=address.endpoint))

    def cancel(self, job_id: str, *, caller: str = "") -> Job:
        """Cancels a job. Returns it: a running job stops some seconds later."""
        request = jobs_pb2.CancelJobRequest(job_id=job_id, caller=caller)
        return to_job(self._call(lambda stub: stub.CancelJob(request, timeout=_CALL_TIMEOUT_S)).job)

    def delete(self, job_id: str, *, caller: str = "") -> None:
        """Stops a job if it runs, and deletes it and its files."""
        request = jobs_pb2.DeleteJobRequest(job_id=job_id, caller=caller)
        self._call(lambda stub: stub.DeleteJob(request, timeout=_CALL_TIMEOUT_S))

    def download(self, job: Job, folder: Path | str) -> Sequence[Path]:
        """Downloads the files of a job into a folder, in the same way as `AsyncJobs.download`. Returns their paths."""
        files = download_paths(job, Path(folder))
        for path, file in files.items():
            self._client.download(file, path)
        return list(files)

    def _find(self) -> ServiceAddress:
        if self._address is None:
            self._address = _address_of(self._client.describe())
        return self._address

    def _call(self, method: Callable[[JobServiceStub], _Answer]) -> _Answer:
        retries = _Retries(self._client.retry_policy)
        address = self._find()
        while True:
            try:
                with open_sync(address.endpoint, self._client.credentials, address.options) as channel:
                    return method(JobServiceStub(channel))
            except grpc.RpcError as exc:
                time.sleep(retries.pause_s(exc, peer=address.endpoint))


class _Retries:
    """The retries of calls to a job server, which may be restarting. Every call can be repeated safely."""

    def __init__(self, policy: RetryPolicy) -> None:
        self._policy = policy
        self.note_answer()

    def note_answer(self) -> None:
        """Notes that the server has answered."""
        self._retries = Backoff(first_s=self._policy.first_pause_s, longest_s=1.0).retries()
        self._ends_s = time.monotonic() + self._policy.reattach_s

    def pause_s(self, failure: grpc.RpcError, *, peer: str) -> float:
        """Returns the pause in seconds before the next call. Raises the error if a further call cannot help."""
        error = from_rpc_error(failure, peer=peer)
        is_temporary = is_broken(failure, error, peer=peer) or isinstance(error, UnavailableError)
        pause_s = self._retries.next_s()
        if not is_temporary or time.monotonic() + pause_s > self._ends_s:
            raise error from failure
        return pause_s


def to_job(message: jobs_pb2.Job) -> Job:
    """Returns the client's description of a job."""
    return read_fields(
        Job,
        message,
        state=cast("JobState", jobs_pb2.JobState.Name(message.state).removeprefix(_PREFIX).lower()),
        progress=tuple(map(to_progress, message.progress)),
        error=error_from_wire(message.error) if message.HasField("error") else None,
        outputs=tuple(map(_output, message.outputs)),
        usage={name: read_fields(Usage, usage) for name, usage in message.usage.items()},
        labels=dict(message.labels),
    )


def download_paths(job: Job, folder: Path) -> dict[Path, MediaFile]:
    """Creates a folder. Returns the paths in it of the files of a job: OUTPUT[-CHOICE][-NUMBER].SUFFIX.

    Raises InvalidRequestError (CANNOT_WRITE) if the folder cannot be created.
    """
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    paths: dict[Path, MediaFile] = {}
    for output in job.outputs:
        for number, file in enumerate(output.files, 1):
            choice = f"-{output.index}" if output.index else ""
            numbered = f"-{number}" if len(output.files) > 1 else ""
            paths[folder / f"{output.name}{choice}{numbered}{suffix_of(file.media_type)}"] = file
    return paths


def _list_request(states: Sequence[JobState], caller: str) -> jobs_pb2.ListJobsRequest:
    unknown = [state for state in states if state not in JOB_STATES]
    if unknown:
        raise InvalidRequestError(f"states contains {unknown[0]!r}; use {', '.join(JOB_STATES)}")
    numbers = [jobs_pb2.JobState.Value(f"{_PREFIX}{state.upper()}") for state in states]
    return jobs_pb2.ListJobsRequest(page_size=_PAGE, states=numbers, caller=caller)


def _address_of(pipeline: orchestrator_pb2.DescribePipelineResponse) -> ServiceAddress:
    if not pipeline.jobs_endpoint:
        raise UnsupportedError(
            f"pipeline {pipeline.pipeline!r} has no job server; call `generate`, or ask the operator to start one "
            "(`stagemesh up --jobs`)"
        )
    return ServiceAddress(pipeline.jobs_endpoint, pipeline.jobs_server_name)


def _output(message: jobs_pb2.JobOutput) -> JobOutput:
    return JobOutput(
        message.name,
        message.index,
        finish_reason(message.finish),
        message.text,
        tuple(message.token_ids.ids),
        tuple(map(stored_file, message.files)),
    )
