"""The client for asyncio programs."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import suppress
from types import TracebackType
from typing import TYPE_CHECKING, Self, TypeVar, Unpack

import grpc
import grpc.aio

from stagemesh.client.base_client import (
    CHANNEL_OPTIONS,
    CONTROL_TIMEOUT_S,
    LEAVE_TIMEOUT_S,
    BaseClient,
    BaseGeneration,
    EndpointSearch,
)
from stagemesh.client.events import Event
from stagemesh.client.media import Content
from stagemesh.client.requests import GenerateArguments, build_request
from stagemesh.client.results import Result, ResultBuilder
from stagemesh.client.retries import RetryPolicy
from stagemesh.v1 import orchestrator_pb2
from stagemesh.v1.orchestrator_pb2_grpc import OrchestratorServiceStub

if TYPE_CHECKING:
    from stagemesh.v1.orchestrator_pb2_grpc import OrchestratorServiceAsyncStub

Answer = TypeVar("Answer")


class AsyncGeneration(BaseGeneration["AsyncClient"]):
    """A request and its events. The request is sent when the iteration over the events starts.

    The events can be iterated over once. A second iteration raises RuntimeError. Leaving the loop early cancels the
    request on every stage.
    """

    # Each loop gets an async generator of its own: `break` drops the generator, whose end cancels the call.
    async def __aiter__(self) -> AsyncGenerator[Event]:
        with self._open_session() as session:
            while True:
                endpoint, request, timeout_s = session.next_call()
                call = self._client.stubs[endpoint].Generate(request, timeout=timeout_s)
                try:
                    async for response in call:
                        event = session.take(response)
                        if event is not None:
                            yield event
                except grpc.aio.AioRpcError as exc:
                    pause_s = session.pause_s(exc)
                else:
                    return
                finally:
                    call.cancel()
                await asyncio.sleep(pause_s)

    async def result(self) -> Result:
        """Sends the request, waits until it finishes, and returns all of its outputs."""
        builder = ResultBuilder()
        async for event in self:
            builder.add(event)
        return builder.build()


class AsyncClient(BaseClient):
    """A client for the orchestrators of one pipeline, whose addresses are given as "host:port".

    Runs any number of requests concurrently. A call that fails raises a StagemeshError, whose message states what
    happened and what to do.
    """

    def __init__(self, *endpoints: str, retry_policy: RetryPolicy | None = None) -> None:
        super().__init__(*endpoints, retry_policy=retry_policy)
        self._channels = [grpc.aio.insecure_channel(endpoint, options=CHANNEL_OPTIONS) for endpoint in endpoints]
        self.stubs = [OrchestratorServiceStub(channel) for channel in self._channels]
        self._leaving: set[asyncio.Task[None]] = set()

    def generate(
        self, prompt: Content | None = None, *, timeout_s: float | None = None, **arguments: Unpack[GenerateArguments]
    ) -> AsyncGeneration:
        """Returns a request for `prompt`, which is text, or text with media.

        Receive the request's events with `async for`, or all of its outputs with `await request.result()`.

        The client sends the request again, with the same request_id, while the server is unreachable or asks for a
        retry. If the connection or the orchestrator fails after the request has started, the client resumes after the
        outputs that it has already received. It uses the next endpoint if there are several. The caller receives every
        event exactly once.

        Raises InvalidRequestError if an argument cannot be sent.
        """
        return AsyncGeneration(self, request=build_request(prompt, arguments), timeout_s=timeout_s)

    async def cancel(self, request_id: str) -> None:
        """Stops a request. Returns after every stage has released the request.

        Raises NotFoundError if the request is not running.
        """
        request = orchestrator_pb2.CancelRequestRequest(request_id=request_id)
        await self._call(lambda stub: stub.CancelRequest(request, timeout=CONTROL_TIMEOUT_S), anywhere=True)

    async def describe(self, pipeline: str = "") -> orchestrator_pb2.DescribePipelineResponse:
        """Returns the pipeline's current stages, replicas, edges and outputs.

        An empty `pipeline` selects the only pipeline of the server.
        """
        request = orchestrator_pb2.DescribePipelineRequest(pipeline=pipeline)
        return await self._call(lambda stub: stub.DescribePipeline(request, timeout=CONTROL_TIMEOUT_S))

    async def _call(
        self, method: "Callable[[OrchestratorServiceAsyncStub], Awaitable[Answer]]", *, anywhere: bool = False
    ) -> Answer:
        """Calls the endpoints in turn, and returns the answer of the first reachable endpoint.

        If `anywhere` is True, also skips endpoints that answer NOT_FOUND.
        """
        search = EndpointSearch(self.endpoints, self.latest, anywhere=anywhere)
        for endpoint in search:
            try:
                return await method(self.stubs[endpoint])
            except grpc.aio.AioRpcError as exc:
                search.record(endpoint, exc)
        raise search.error

    async def close(self) -> None:
        """Cancels the running requests and closes the connections. Closing twice is harmless."""
        self._leave_all()
        if self._leaving:
            await asyncio.wait(self._leaving)
        for channel in self._channels:
            await channel.close()

    def _send_leave(self, endpoint: int, request: orchestrator_pb2.CancelRequestRequest) -> None:
        async def send() -> None:
            with suppress(grpc.aio.AioRpcError):
                await self.stubs[endpoint].CancelRequest(request, timeout=LEAVE_TIMEOUT_S)

        task = asyncio.create_task(send())
        self._leaving.add(task)
        task.add_done_callback(self._leaving.discard)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()
