"""The client for programs without asyncio; safe to share between threads."""

import time
from collections.abc import Generator
from types import TracebackType
from typing import Self, Unpack

import grpc

from stagemesh.client.decoding import decode_event
from stagemesh.client.descriptions import PipelineInfo, decode_pipeline
from stagemesh.client.events import Event
from stagemesh.client.media import Content
from stagemesh.client.requests import GenerateArguments, build_request
from stagemesh.client.results import Result, ResultBuilder
from stagemesh.client.retries import Attempts, RetryPolicy
from stagemesh.connectors.channels import CHANNEL_OPTIONS
from stagemesh.connectors.status import from_rpc_error
from stagemesh.v1 import orchestrator_pb2
from stagemesh.v1.orchestrator_pb2_grpc import OrchestratorServiceStub

CONTROL_TIMEOUT_S = 10.0


class Generation:
    """One request on its way. Nothing is sent before it is iterated, which can be done once.

    Leaving the loop early cancels the request on every stage.
    """

    def __init__(self, client: "Client", *, request: orchestrator_pb2.GenerateRequest, timeout_s: float | None) -> None:
        self._client = client
        self._request = request
        self._timeout_s = timeout_s

    @property
    def request_id(self) -> str:
        """The request's name everywhere."""
        return self._request.request_id

    # A generator made for each loop: breaking out drops it, and its end cancels the call.
    def __iter__(self) -> Generator[Event]:
        attempts = Attempts(self._client.retry_policy, timeout_s=self._timeout_s)
        while True:
            begun = False
            call = self._client.stub.Generate(self._request, timeout=attempts.begin())
            try:
                for response in call:
                    begun = begun or response.WhichOneof("event") != "queued"
                    event = decode_event(response)
                    if event is not None:
                        yield event
            except grpc.RpcError as exc:
                error = from_rpc_error(exc, peer=self._client.endpoint)
                pause_s = None if begun else attempts.pause_s(error)
                if pause_s is None:
                    raise error from exc
            else:
                return
            finally:
                call.cancel()
            time.sleep(pause_s)

    def result(self) -> Result:
        """Runs the request to its end."""
        builder = ResultBuilder()
        for event in self:
            builder.add(event)
        return builder.build()


class Client:
    """A connection to an orchestrator at "host:port", good for any number of requests at once.

    Every method raises a StagemeshError that says what happened and what to do.
    """

    def __init__(self, endpoint: str, *, retry_policy: RetryPolicy | None = None) -> None:
        self.endpoint = endpoint
        self.retry_policy = retry_policy or RetryPolicy()
        self._channel = grpc.insecure_channel(endpoint, options=CHANNEL_OPTIONS)
        self.stub = OrchestratorServiceStub(self._channel)

    def generate(
        self, prompt: Content | None = None, *, timeout_s: float | None = None, **arguments: Unpack[GenerateArguments]
    ) -> Generation:
        """A request for `prompt`, text or text and media, to be read with `for` or `….result()`.

        It is sent again, under the same request_id, while the server cannot be reached or asks to come back, and never
        once it has begun. Raises InvalidRequestError for arguments that cannot be sent.
        """
        return Generation(self, request=build_request(prompt, arguments), timeout_s=timeout_s)

    def cancel(self, request_id: str) -> None:
        """Stops a request; returns once every stage has let go. Raises NotFoundError where it does not run."""
        request = orchestrator_pb2.CancelRequestRequest(request_id=request_id)
        try:
            self.stub.CancelRequest(request, timeout=CONTROL_TIMEOUT_S)
        except grpc.RpcError as exc:
            raise from_rpc_error(exc, peer=self.endpoint) from exc

    def describe(self, pipeline: str = "") -> PipelineInfo:
        """The pipeline, its stages and its replicas as they are now."""
        request = orchestrator_pb2.DescribePipelineRequest(pipeline=pipeline)
        try:
            return decode_pipeline(self.stub.DescribePipeline(request, timeout=CONTROL_TIMEOUT_S))
        except grpc.RpcError as exc:
            raise from_rpc_error(exc, peer=self.endpoint) from exc

    def close(self) -> None:
        """Cancels what runs and disconnects. Closing twice is harmless."""
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
