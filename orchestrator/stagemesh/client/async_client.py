"""The client for asyncio programs."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import suppress
from types import TracebackType
from typing import TYPE_CHECKING, Self, TypeVar, Unpack

import grpc
import grpc.aio

from stagemesh.client.descriptions import PipelineInfo, decode_pipeline
from stagemesh.client.endpoints import CHANNEL_OPTIONS
from stagemesh.client.events import Event
from stagemesh.client.media import Content
from stagemesh.client.request_session import ITERATED_TWICE, RequestSession, is_broken, leads_on, order, surest
from stagemesh.client.requests import GenerateArguments, build_request
from stagemesh.client.results import Result, ResultBuilder
from stagemesh.client.retries import RetryPolicy
from stagemesh.common.errors import CancelledRequestError, StagemeshError
from stagemesh.rpc.error_mapping import from_rpc_error
from stagemesh.v1 import orchestrator_pb2
from stagemesh.v1.orchestrator_pb2_grpc import OrchestratorServiceStub

if TYPE_CHECKING:
    from stagemesh.v1.orchestrator_pb2_grpc import OrchestratorServiceAsyncStub

CONTROL_TIMEOUT_S = 10.0
LEAVE_TIMEOUT_S = 1.0

Answer = TypeVar("Answer")


class AsyncGeneration:
    """One request on its way. Nothing is sent before it is iterated, which can be done once (RuntimeError).

    Leaving the loop early cancels the request on every stage.
    """

    def __init__(
        self, client: "AsyncClient", *, request: orchestrator_pb2.GenerateRequest, timeout_s: float | None
    ) -> None:
        self._client = client
        self._request = request
        self._timeout_s = timeout_s
        self._is_begun = False

    @property
    def request_id(self) -> str:
        """The request's name everywhere."""
        return self._request.request_id

    # An async generator made for each loop: breaking out drops it, and its end cancels the call.
    async def __aiter__(self) -> AsyncGenerator[Event]:
        if self._is_begun:
            raise RuntimeError(ITERATED_TWICE)
        self._is_begun = True
        client = self._client
        course = client.set_out(self._request, timeout_s=self._timeout_s)
        number = 0
        try:
            while True:
                number, request, timeout_s = course.begin()
                call = client.stub_for(self.request_id, number).Generate(request, timeout=timeout_s)
                try:
                    async for response in call:
                        event = course.take(response)
                        if event is not None:
                            yield event
                except grpc.aio.AioRpcError as exc:
                    peer = client.endpoints[number]
                    error = from_rpc_error(exc, peer=peer)
                    pause_s = course.pause_s(error, broken=is_broken(exc.code(), error, peer=peer))
                    if pause_s is None or client.closed:
                        raise error from exc
                else:
                    return
                finally:
                    call.cancel()
                await asyncio.sleep(pause_s)
        except (GeneratorExit, asyncio.CancelledError):
            client.take_leave(self.request_id, number)
            raise
        finally:
            client.note_end(self.request_id)

    async def result(self) -> Result:
        """Runs the request to its end."""
        builder = ResultBuilder()
        async for event in self:
            builder.add(event)
        return builder.build()


class AsyncClient:
    """A connection to an orchestrator at "host:port", or to several of one pipeline, good for any number of requests at
    once.

    Every method raises a StagemeshError that says what happened and what to do.
    """

    def __init__(self, *endpoints: str, retry_policy: RetryPolicy | None = None) -> None:
        if not endpoints:
            raise ValueError("a client needs at least one endpoint")
        self.endpoints = endpoints
        self.retry_policy = retry_policy or RetryPolicy()
        self.closed = False
        self._channels = [grpc.aio.insecure_channel(endpoint, options=CHANNEL_OPTIONS) for endpoint in endpoints]
        self._stubs = [OrchestratorServiceStub(channel) for channel in self._channels]
        self._latest = 0
        """The endpoint that was called last: where one has failed, new requests begin with the next."""
        self._running: dict[str, int] = {}
        self._leaving: set[asyncio.Task[None]] = set()

    @property
    def endpoint(self) -> str:
        """The one in use."""
        return self.endpoints[self._latest]

    def generate(
        self, prompt: Content | None = None, *, timeout_s: float | None = None, **arguments: Unpack[GenerateArguments]
    ) -> AsyncGeneration:
        """A request for `prompt`, text or text and media, to be read with `async for` or `await ….result()`.

        It is sent again, under the same request_id, while the server cannot be reached or asks to come back. Once it
        has begun, a lost connection or orchestrator does no harm: the client goes on behind what it has, on the next
        endpoint where there are several, and every event comes once. Raises InvalidRequestError for arguments that
        cannot be sent.
        """
        return AsyncGeneration(self, request=build_request(prompt, arguments), timeout_s=timeout_s)

    async def cancel(self, request_id: str) -> None:
        """Stops a request; returns once every stage has let go. Raises NotFoundError where it does not run."""
        request = orchestrator_pb2.CancelRequestRequest(request_id=request_id)
        await self._ask(lambda stub: stub.CancelRequest(request, timeout=CONTROL_TIMEOUT_S), anywhere=True)

    async def describe(self, pipeline: str = "") -> PipelineInfo:
        """The pipeline, its stages and its replicas as they are now."""
        request = orchestrator_pb2.DescribePipelineRequest(pipeline=pipeline)
        answer = await self._ask(lambda stub: stub.DescribePipeline(request, timeout=CONTROL_TIMEOUT_S))
        return decode_pipeline(answer)

    async def close(self) -> None:
        """Cancels what runs and disconnects. Closing twice is harmless."""
        for request_id, number in self._running.items():
            self.take_leave(request_id, number)
        self.closed = True
        if self._leaving:
            await asyncio.wait(self._leaving)
        for channel in self._channels:
            await channel.close()

    # -- for AsyncGeneration

    def set_out(self, request: orchestrator_pb2.GenerateRequest, *, timeout_s: float | None) -> RequestSession:
        """The calls of a request, from the first on."""
        return RequestSession(
            request,
            policy=self.retry_policy,
            timeout_s=timeout_s,
            endpoints=len(self.endpoints),
            first=self._latest,
        )

    def stub_for(self, request_id: str, number: int) -> "OrchestratorServiceAsyncStub":
        """An endpoint, by its number, which is about to be called for a request."""
        if self.closed:
            raise CancelledRequestError("the client was closed")
        self._latest = self._running[request_id] = number
        return self._stubs[number]

    def take_leave(self, request_id: str, number: int) -> None:
        """Tells a server, soon, that nobody will come back for a request."""
        if self.closed or not self.retry_policy.reattach_s:
            return
        task = asyncio.create_task(self._take_leave(request_id, self._stubs[number]))
        self._leaving.add(task)
        task.add_done_callback(self._leaving.discard)

    def note_end(self, request_id: str) -> None:
        """A request is over, or left."""
        self._running.pop(request_id, None)

    async def _take_leave(self, request_id: str, stub: "OrchestratorServiceAsyncStub") -> None:
        request = orchestrator_pb2.CancelRequestRequest(request_id=request_id, when_left=True)
        # One that nobody hears of is stopped a little later.
        with suppress(grpc.aio.AioRpcError):
            await stub.CancelRequest(request, timeout=LEAVE_TIMEOUT_S)

    async def _ask(
        self, ask: "Callable[[OrchestratorServiceAsyncStub], Awaitable[Answer]]", *, anywhere: bool = False
    ) -> "Answer":
        """What the first endpoint says that is not out of reach or, of what may be `anywhere`, does not know it."""
        errors: list[StagemeshError] = []
        for number in order(self._latest, len(self.endpoints)):
            try:
                return await ask(self._stubs[number])
            except grpc.aio.AioRpcError as exc:
                peer = self.endpoints[number]
                errors.append(from_rpc_error(exc, peer=peer))
                if not leads_on(exc.code(), errors[-1], peer=peer, anywhere=anywhere):
                    raise errors[-1] from exc
        raise surest(errors)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()
