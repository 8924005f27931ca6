"""The client for programs without asyncio. Threads can share it."""

import time
from collections.abc import Callable, Generator
from contextlib import suppress
from types import TracebackType
from typing import Self, TypeVar, Unpack

import grpc

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

Answer = TypeVar("Answer")


class Generation(BaseGeneration["Client"]):
    """A request and its events. The request is sent when the iteration over the events starts.

    The events can be iterated over once. A second iteration raises RuntimeError. Leaving the loop early cancels the
    request on every stage.
    """

    # Each loop gets a generator of its own: `break` drops the generator, whose end cancels the call.
    def __iter__(self) -> Generator[Event]:
        with self._open_session() as session:
            while True:
                endpoint, request, timeout_s = session.next_call()
                call = self._client.stubs[endpoint].Generate(request, timeout=timeout_s)
                try:
                    for response in call:
                        event = session.take(response)
                        if event is not None:
                            yield event
                except grpc.RpcError as exc:
                    pause_s = session.pause_s(exc)
                else:
                    return
                finally:
                    call.cancel()
                time.sleep(pause_s)

    def result(self) -> Result:
        """Sends the request, waits until it finishes, and returns all of its outputs."""
        builder = ResultBuilder()
        for event in self:
            builder.add(event)
        return builder.build()


class Client(BaseClient):
    """A client for the orchestrators of one pipeline, whose addresses are given as "host:port".

    Runs any number of requests concurrently. A call that fails raises a StagemeshError, whose message states what
    happened and what to do.
    """

    def __init__(self, *endpoints: str, retry_policy: RetryPolicy | None = None) -> None:
        super().__init__(*endpoints, retry_policy=retry_policy)
        self._channels = [grpc.insecure_channel(endpoint, options=CHANNEL_OPTIONS) for endpoint in endpoints]
        self.stubs = [OrchestratorServiceStub(channel) for channel in self._channels]
        self._leaving: set[grpc.Future[orchestrator_pb2.CancelRequestResponse]] = set()

    def generate(
        self, prompt: Content | None = None, *, timeout_s: float | None = None, **arguments: Unpack[GenerateArguments]
    ) -> Generation:
        """Returns a request for `prompt`, which is text, or text with media.

        Receive the request's events with `for`, or all of its outputs with `result()`. The client retries and resumes
        the request in the same way as `AsyncClient`.

        Raises InvalidRequestError if an argument cannot be sent.
        """
        return Generation(self, request=build_request(prompt, arguments), timeout_s=timeout_s)

    def cancel(self, request_id: str) -> None:
        """Stops a request. Returns after every stage has released the request.

        Raises NotFoundError if the request is not running.
        """
        request = orchestrator_pb2.CancelRequestRequest(request_id=request_id)
        self._call(lambda stub: stub.CancelRequest(request, timeout=CONTROL_TIMEOUT_S), anywhere=True)

    def describe(self, pipeline: str = "") -> orchestrator_pb2.DescribePipelineResponse:
        """Returns the pipeline's current stages, replicas, edges and outputs.

        An empty `pipeline` selects the only pipeline of the server.
        """
        request = orchestrator_pb2.DescribePipelineRequest(pipeline=pipeline)
        return self._call(lambda stub: stub.DescribePipeline(request, timeout=CONTROL_TIMEOUT_S))

    def _call(self, method: Callable[[OrchestratorServiceStub], Answer], *, anywhere: bool = False) -> Answer:
        """Calls the endpoints in turn, and returns the answer of the first reachable endpoint.

        If `anywhere` is True, also skips endpoints that answer NOT_FOUND.
        """
        search = EndpointSearch(self.endpoints, self.latest, anywhere=anywhere)
        for endpoint in search:
            try:
                return method(self.stubs[endpoint])
            except grpc.RpcError as exc:
                search.record(endpoint, exc)
        raise search.error

    def close(self) -> None:
        """Cancels the running requests and closes the connections. Closing twice is harmless."""
        self._leave_all()
        for future in list(self._leaving):
            with suppress(grpc.FutureCancelledError):
                future.exception()
        for channel in self._channels:
            channel.close()

    def _send_leave(self, endpoint: int, request: orchestrator_pb2.CancelRequestRequest) -> None:
        future = self.stubs[endpoint].CancelRequest.future(request, timeout=LEAVE_TIMEOUT_S)
        self._leaving.add(future)
        future.add_done_callback(self._leaving.discard)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
