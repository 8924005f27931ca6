"""The clients of orchestrators: `AsyncClient` for asyncio programs, and `Client` for programs without asyncio."""

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator
from contextlib import aclosing, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Self, TypeVar, Unpack

import grpc
import grpc.aio

from stagemesh.client.async_session import AsyncSession
from stagemesh.client.calls import BaseClient, BaseResponseStream, ClientOptions, main_error
from stagemesh.client.content import Content, MediaFile
from stagemesh.client.jobs import AsyncJobs, Jobs
from stagemesh.client.media_transfer import (
    CHANNEL_OPTIONS,
    Download,
    OnBytes,
    UploadMessages,
    media_address,
    stored_file,
    stream_file,
)
from stagemesh.client.requests import ConverseArguments, GenerateArguments, build_open, build_request
from stagemesh.client.responses import Event, Result, ResultBuilder
from stagemesh.client.sync_session import Session
from stagemesh.common.errors import StagemeshError
from stagemesh.common.tasks import kept_in
from stagemesh.common.wire.versions import check_version, own_protocol
from stagemesh.rpc.channels import open_async, open_sync
from stagemesh.rpc.error_mapping import from_rpc_error
from stagemesh.v1 import orchestrator_pb2
from stagemesh.v1.media_pb2_grpc import MediaServiceStub
from stagemesh.v1.orchestrator_pb2_grpc import OrchestratorServiceStub

if TYPE_CHECKING:
    from stagemesh.v1.orchestrator_pb2_grpc import OrchestratorServiceAsyncStub

_CONTROL_TIMEOUT_S = 10.0
_LEAVE_TIMEOUT_S = 1.0

Answer = TypeVar("Answer")


class AsyncResponseStream(BaseResponseStream["AsyncClient"]):
    """A request and its events. The request is sent when the iteration over the events starts.

    The events can be iterated over only once. A second iteration raises RuntimeError. If the caller leaves the loop
    early, the request is cancelled on every stage.
    """

    # Each loop gets an async generator of its own: `break` drops the generator, whose end cancels the call.
    async def __aiter__(self) -> AsyncGenerator[Event]:
        with self._begin_calls() as calls:
            while True:
                timeout_s = calls.begin_call()
                stub = self._client.stubs[calls.endpoint]
                call = stub.Generate(calls.position.request(), timeout=timeout_s, metadata=calls.headers)
                try:
                    async for response in call:
                        for event in calls.take(response):
                            yield event
                except grpc.aio.AioRpcError as exc:
                    pause_s = calls.pause_s(exc)
                else:
                    return
                finally:
                    call.cancel()
                await asyncio.sleep(pause_s)

    async def result(self) -> Result:
        """Sends the request, waits until the request finishes, and returns all of its outputs."""
        builder = ResultBuilder()
        async for event in self:
            builder.add(event)
        return builder.build()


class AsyncClient(BaseClient):
    """A client of the orchestrators of one pipeline. Each of its `endpoints` is the "host:port" of one orchestrator.

    The client runs any number of requests concurrently. A failed call raises a StagemeshError. The error's message
    states the cause and the remedy.
    """

    def __init__(self, *endpoints: str, **options: Unpack[ClientOptions]) -> None:
        super().__init__(*endpoints, **options)
        self._channels = [open_async(endpoint, self.credentials, CHANNEL_OPTIONS) for endpoint in endpoints]
        self.stubs = [OrchestratorServiceStub(channel) for channel in self._channels]
        self._leaving: set[asyncio.Task[None]] = set()
        self.sessions: set[AsyncSession] = set()
        """The open sessions."""
        self.jobs = AsyncJobs(self)
        """The jobs of the pipeline: requests that run without a connected client."""

    def generate(
        self, prompt: Content | None = None, *, timeout_s: float | None = None, **arguments: Unpack[GenerateArguments]
    ) -> AsyncResponseStream:
        """Returns a request for `prompt`, which is text or a sequence of text and media.

        Receive the request's events with `async for`, or all of its outputs with `await request.result()`.

        The client sends the request again, with the same request_id, while the server is unreachable or asks for a
        retry. If the connection or the orchestrator fails after the request has started, the client calls the next
        endpoint and resumes after the outputs that it has already received. The caller receives every event exactly
        once.

        `timeout_s` is the request's timeout in seconds, or None for no timeout. Raises InvalidRequestError if an
        argument is invalid.
        """
        return AsyncResponseStream(self, request=build_request(prompt, arguments), timeout_s=timeout_s)

    def converse(self, **arguments: Unpack[ConverseArguments]) -> AsyncSession:
        """Returns a session: a conversation of numbered turns. `async with` opens it and closes it.

        The client opens the session again if the connection breaks or the orchestrator stops, at the same or another
        endpoint. The caller loses no event and receives none twice. Raises InvalidRequestError if an argument is
        invalid.
        """
        return AsyncSession(self, build_open(arguments))

    async def cancel(self, request_id: str) -> None:
        """Stops the request. Returns when every stage has released the request.

        Raises NotFoundError if the request is not running.
        """
        request = orchestrator_pb2.CancelRequestRequest(request_id=request_id)
        await self._call(lambda stub: stub.CancelRequest(request, timeout=_CONTROL_TIMEOUT_S), anywhere=True)

    async def describe(self, pipeline: str = "") -> orchestrator_pb2.DescribePipelineResponse:
        """Returns the pipeline's current stages, replicas, edges and outputs.

        `pipeline` is the pipeline's name. It may be empty if the server has only one pipeline. Raises NotReadyError
        (NO_COMMON_VERSION) if the server speaks no version of the wire that this client speaks.
        """
        request = orchestrator_pb2.DescribePipelineRequest(pipeline=pipeline, protocol=own_protocol())
        answer = await self._call(lambda stub: stub.DescribePipeline(request, timeout=_CONTROL_TIMEOUT_S))
        check_version(answer.protocol, peer=f"the orchestrator at {self.endpoint}", own_name="this client")
        return answer

    async def upload(
        self,
        path: Path | str,
        *,
        media_type: str | None = None,
        on_bytes: OnBytes | None = None,
        timeout_s: float | None = None,
    ) -> MediaFile:
        """Stores an image, audio or video file in the pipeline's object store. Returns its description, which a prompt
        may contain.

        - `media_type` is the file's media type. If None, the suffix of its name determines it.
        - `on_bytes` is called in another thread, during the transfer, with the number of bytes sent so far.
        - `timeout_s` is the time limit in seconds, or None for no limit.

        Raises InvalidRequestError if the file cannot be read (INVALID_MEDIA) or is too large (FILE_TOO_LARGE), and
        UnsupportedError if the pipeline has no media service. After an error, nothing is stored.
        """
        messages = UploadMessages(path, media_type=media_type, on_bytes=on_bytes)
        address = media_address(await self.describe())
        loop, ended = asyncio.get_running_loop(), asyncio.Event()

        def end(_: object) -> None:
            loop.call_soon_threadsafe(ended.set)

        # A call of grpc.aio loses its status if the server ends it while a message is written.
        with open_sync(address.endpoint, self.credentials, address.options) as channel:
            call = MediaServiceStub(channel).UploadMedia.future(iter(messages), timeout=timeout_s)
            call.add_done_callback(end)
            try:
                await ended.wait()
                return stored_file(call.result().file)
            except grpc.RpcError as exc:
                raise messages.error or from_rpc_error(exc, peer=f"the media service at {address.endpoint}") from exc
            finally:
                call.cancel()

    async def download(
        self,
        file: MediaFile | str,
        path: Path | str,
        *,
        on_bytes: OnBytes | None = None,
        timeout_s: float | None = None,
    ) -> None:
        """Downloads a stored file to `path`, and checks its content by the size and the digest in `file`.

        - `on_bytes` is called during the transfer with the number of bytes received so far.
        - `timeout_s` is the time limit in seconds, or None for no limit.

        Raises NotFoundError (UNKNOWN_MEDIA) if there is no such file, InvalidRequestError (MEDIA_MISMATCH) if the
        content differs, and UnsupportedError if the pipeline has no media service. After an error, an earlier file at
        `path` is unchanged.
        """
        with Download(file, path, on_bytes=on_bytes) as download:
            async with aclosing(stream_file(self, file, timeout_s=timeout_s)) as responses:
                async for response in responses:
                    await asyncio.to_thread(download.add, response)
            download.finish()

    async def _call(
        self, method: "Callable[[OrchestratorServiceAsyncStub], Awaitable[Answer]]", *, anywhere: bool = False
    ) -> Answer:
        """Calls the endpoints in turn until one is reachable, and returns the answer of that endpoint.

        If `anywhere` is True, also tries the next endpoint if an endpoint reports NOT_FOUND.
        """
        errors: list[StagemeshError] = []
        for endpoint in self.endpoints_in_turn():
            try:
                return await method(self.stubs[endpoint])
            except grpc.aio.AioRpcError as exc:
                errors.append(self.error_of(exc, endpoint=endpoint, anywhere=anywhere))
        raise main_error(errors)

    async def close(self) -> None:
        """Cancels the running requests, and closes the sessions and the connections. Idempotent."""
        for session in list(self.sessions):
            await session.close()
        self._leave_all()
        if self._leaving:
            await asyncio.wait(self._leaving)
        for channel in self._channels:
            await channel.close()

    def _connect(self, endpoint: int) -> None:
        channel = open_async(self.endpoints[endpoint], self.credentials, CHANNEL_OPTIONS)
        self._channels.append(channel)
        self.stubs[endpoint] = OrchestratorServiceStub(channel)

    def _send_leave(self, endpoint: int, request: orchestrator_pb2.CancelRequestRequest) -> None:
        async def send() -> None:
            with suppress(grpc.aio.AioRpcError):
                await self.stubs[endpoint].CancelRequest(request, timeout=_LEAVE_TIMEOUT_S)

        kept_in(self._leaving, asyncio.create_task(send()))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


class ResponseStream(BaseResponseStream["Client"]):
    """A request and its events. The request is sent when the iteration over the events starts.

    The events can be iterated over only once. A second iteration raises RuntimeError. If the caller leaves the loop
    early, the request is cancelled on every stage.
    """

    # Each loop gets a generator of its own: `break` drops the generator, whose end cancels the call.
    def __iter__(self) -> Generator[Event]:
        with self._begin_calls() as calls:
            while True:
                timeout_s = calls.begin_call()
                stub = self._client.stubs[calls.endpoint]
                call = stub.Generate(calls.position.request(), timeout=timeout_s, metadata=calls.headers)
                try:
                    for response in call:
                        yield from calls.take(response)
                except grpc.RpcError as exc:
                    pause_s = calls.pause_s(exc)
                else:
                    return
                finally:
                    call.cancel()
                time.sleep(pause_s)

    def result(self) -> Result:
        """Sends the request, waits until the request finishes, and returns all of its outputs."""
        builder = ResultBuilder()
        for event in self:
            builder.add(event)
        return builder.build()


class Client(BaseClient):
    """A client without asyncio of the orchestrators of one pipeline. Several threads can share the client.

    Each of its `endpoints` is the "host:port" of one orchestrator. The client runs any number of requests concurrently.
    A failed call raises a StagemeshError. The error's message states the cause and the remedy.
    """

    def __init__(self, *endpoints: str, **options: Unpack[ClientOptions]) -> None:
        super().__init__(*endpoints, **options)
        self._channels = [open_sync(endpoint, self.credentials, CHANNEL_OPTIONS) for endpoint in endpoints]
        self.stubs = [OrchestratorServiceStub(channel) for channel in self._channels]
        self._leaving: set[grpc.Future[orchestrator_pb2.CancelRequestResponse]] = set()
        self.sessions: set[Session] = set()
        """The open sessions."""
        self.jobs = Jobs(self)
        """The jobs of the pipeline: requests that run without a connected client."""

    def generate(
        self, prompt: Content | None = None, *, timeout_s: float | None = None, **arguments: Unpack[GenerateArguments]
    ) -> ResponseStream:
        """Returns a request for `prompt`, which is text or a sequence of text and media.

        Receive the request's events with `for`, or all of its outputs with `result()`. The client retries and resumes
        the request in the same way as `AsyncClient`.

        `timeout_s` is the request's timeout in seconds, or None for no timeout. Raises InvalidRequestError if an
        argument is invalid.
        """
        return ResponseStream(self, request=build_request(prompt, arguments), timeout_s=timeout_s)

    def converse(self, **arguments: Unpack[ConverseArguments]) -> Session:
        """Returns a session: a conversation of numbered turns. `with` opens it and closes it.

        The client continues the session in the same way as `AsyncClient`. Raises InvalidRequestError if an argument is
        invalid.
        """
        return Session(self, build_open(arguments))

    def cancel(self, request_id: str) -> None:
        """Stops the request. Returns when every stage has released the request.

        Raises NotFoundError if the request is not running.
        """
        request = orchestrator_pb2.CancelRequestRequest(request_id=request_id)
        self._call(lambda stub: stub.CancelRequest(request, timeout=_CONTROL_TIMEOUT_S), anywhere=True)

    def describe(self, pipeline: str = "") -> orchestrator_pb2.DescribePipelineResponse:
        """Returns the pipeline's current stages, replicas, edges and outputs.

        `pipeline` is the pipeline's name. It may be empty if the server has only one pipeline. Raises NotReadyError
        (NO_COMMON_VERSION) if the server speaks no version of the wire that this client speaks.
        """
        request = orchestrator_pb2.DescribePipelineRequest(pipeline=pipeline, protocol=own_protocol())
        answer = self._call(lambda stub: stub.DescribePipeline(request, timeout=_CONTROL_TIMEOUT_S))
        check_version(answer.protocol, peer=f"the orchestrator at {self.endpoint}", own_name="this client")
        return answer

    def upload(
        self,
        path: Path | str,
        *,
        media_type: str | None = None,
        on_bytes: OnBytes | None = None,
        timeout_s: float | None = None,
    ) -> MediaFile:
        """Stores a file in the pipeline's object store, in the same way as `AsyncClient.upload`. Returns its
        description.

        `on_bytes` is called in another thread.
        """
        messages = UploadMessages(path, media_type=media_type, on_bytes=on_bytes)
        address = media_address(self.describe())
        with open_sync(address.endpoint, self.credentials, address.options) as channel:
            try:
                return stored_file(MediaServiceStub(channel).UploadMedia(iter(messages), timeout=timeout_s).file)
            except grpc.RpcError as exc:
                raise messages.error or from_rpc_error(exc, peer=f"the media service at {address.endpoint}") from exc

    def download(
        self,
        file: MediaFile | str,
        path: Path | str,
        *,
        on_bytes: OnBytes | None = None,
        timeout_s: float | None = None,
    ) -> None:
        """Writes a stored file to `path`, in the same way as `AsyncClient.download`."""
        address = media_address(self.describe())
        with (
            open_sync(address.endpoint, self.credentials, address.options) as channel,
            Download(file, path, on_bytes=on_bytes) as download,
        ):
            try:
                for response in MediaServiceStub(channel).DownloadMedia(download.request, timeout=timeout_s):
                    download.add(response)
            except grpc.RpcError as exc:
                raise from_rpc_error(exc, peer=f"the media service at {address.endpoint}") from exc
            download.finish()

    def _call(self, method: Callable[[OrchestratorServiceStub], Answer], *, anywhere: bool = False) -> Answer:
        """Calls the endpoints in turn until one is reachable, and returns the answer of that endpoint.

        If `anywhere` is True, also tries the next endpoint if an endpoint reports NOT_FOUND.
        """
        errors: list[StagemeshError] = []
        for endpoint in self.endpoints_in_turn():
            try:
                return method(self.stubs[endpoint])
            except grpc.RpcError as exc:
                errors.append(self.error_of(exc, endpoint=endpoint, anywhere=anywhere))
        raise main_error(errors)

    def close(self) -> None:
        """Cancels the running requests, and closes the sessions and the connections. Idempotent."""
        for session in list(self.sessions):
            session.close()
        self._leave_all()
        for future in list(self._leaving):
            with suppress(grpc.FutureCancelledError):
                future.exception()
        for channel in self._channels:
            channel.close()

    def _connect(self, endpoint: int) -> None:
        channel = open_sync(self.endpoints[endpoint], self.credentials, CHANNEL_OPTIONS)
        self._channels.append(channel)
        self.stubs[endpoint] = OrchestratorServiceStub(channel)

    def _send_leave(self, endpoint: int, request: orchestrator_pb2.CancelRequestRequest) -> None:
        future = self.stubs[endpoint].CancelRequest.future(request, timeout=_LEAVE_TIMEOUT_S)
        self._leaving.add(future)
        future.add_done_callback(self._leaving.discard)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
