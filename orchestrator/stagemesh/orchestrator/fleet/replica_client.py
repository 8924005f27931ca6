"""Calls from the orchestrator to one replica of a stage."""

from collections.abc import AsyncGenerator, Awaitable, Callable
from functools import partial
from types import SimpleNamespace
from typing import Any, TypeAlias, TypeVar, cast

import grpc
from google.protobuf.message import DecodeError, Message
from grpc_health.v1 import health_pb2

from stagemesh.common.errors import UnavailableError, UnsupportedError
from stagemesh.common.plugins.connectors import AUTO, GRPC, ConnectorName, number_of
from stagemesh.common.wire.encoding import parse_message
from stagemesh.common.wire.versions import own_protocol
from stagemesh.connectors.packets import ConsumerAddress
from stagemesh.connectors.stream.connector_agreement import EdgeProbe, probe_from_wire
from stagemesh.orchestrator.fleet.replica_loss import STEP_PING_S, STEP_PING_TIMEOUT_S, ReplicaErrors
from stagemesh.orchestrator.fleet.step_stream import StepStream, TakeEvent
from stagemesh.rpc.channels import MAX_ANSWER_FIELDS, is_listening, open_channel
from stagemesh.rpc.credentials import PROCESS
from stagemesh.v1 import control_pb2, stage_pb2, stage_pb2_grpc

CONTROL_NAME = control_pb2.DESCRIPTOR.services_by_name["StageControlService"].full_name
_LOAD_INTERVAL_S = 0.5
_IDLE_INTERVAL_S = 30.0

Verdict: TypeAlias = "stage_pb2.RolloutVerdict.ValueType"
"""Whether a rolling update may count a replica as ready."""
_Response = TypeVar("_Response", bound=Message)
_UnaryBytes: TypeAlias = "grpc.aio.UnaryUnaryMultiCallable[bytes, bytes]"


class ReplicaClient:
    """Calls the replica at one address. The calls raise the errors of `stagemesh.common.errors`.

    The steps have a channel of their own, on which a lost replica is detected sooner. Its frequent pings would use a
    few percent of a core in an orchestrator with a hundred idle replicas, so that it has pings only while steps run.
    """

    def __init__(self, *, stage: str, replica: str, endpoint: str, server_name: str = "") -> None:
        """Creates a client for the replica at `endpoint` ("host:port").

        `server_name` is the name in the replica's TLS certificate, or empty if it is the host in `endpoint`.
        """
        self._endpoint, self._server_name = endpoint, server_name
        self._errors = ReplicaErrors(stage=stage, replica=replica, endpoint=endpoint)
        self._steps: StepStream | None = None
        self._health_watch: grpc.aio.Call | None = None
        self._open()

    def _open(self) -> None:
        self._certificates = PROCESS.credentials.version
        self._channel = open_channel(self._endpoint, server_name=self._server_name)
        self._stub = stage_pb2_grpc.StageServiceStub(_with_limited_answers(self._channel))
        self._step_channel = open_channel(
            self._endpoint,
            server_name=self._server_name,
            keepalive_s=STEP_PING_S,
            ping_timeout_s=STEP_PING_TIMEOUT_S,
            pings_without_calls=False,
        )
        self._step_stub = stage_pb2_grpc.StageServiceStub(_with_limited_answers(self._step_channel))
        self._watch_health = self._channel.unary_stream(
            "/grpc.health.v1.Health/Watch",
            health_pb2.HealthCheckRequest.SerializeToString,
            health_pb2.HealthCheckResponse.FromString,
        )

    def execute(self, request: stage_pb2.ExecuteStepRequest, *, timeout_s: float, take: TakeEvent) -> Awaitable[None]:
        """Executes a step until it ends, and calls `take` with each event. Cancelling this call cancels the step.

        Steps share one ExecuteSteps stream. Each is a call of ExecuteStep if the replica does not serve ExecuteSteps.

        Raises the error with which the step failed, or the error that `take` raised. Raises UnavailableError
        (REPLICA_LOST) if the replica terminates or becomes unreachable.
        """
        if self._steps is not None and self._steps.is_unserved:
            return self._execute_alone(request, timeout_s, take)
        if self._steps is None or self._steps.is_closed:
            with self._errors.mapped():
                self._steps = StepStream(self._step_channel, self._errors, execute_alone=self._execute_alone)
        return self._steps.execute(request, timeout_s=timeout_s, take=take)

    async def _execute_alone(self, request: stage_pb2.ExecuteStepRequest, timeout_s: float, take: TakeEvent) -> None:
        """Executes a step by ExecuteStep. The arguments and the errors are those of `execute`."""
        with self._errors.mapped():
            call = self._step_stub.ExecuteStep(request, timeout=timeout_s)
            try:
                async for event in call:
                    take(event)
            finally:
                call.cancel()

    async def cancel(self, request: stage_pb2.CancelStepRequest, *, timeout_s: float) -> stage_pb2.CancelStepResponse:
        """Cancels a request's steps on the replica. Returns after the engine has released the steps."""
        with self._errors.mapped():
            return _readable(await self._step_stub.CancelStep(request, timeout=timeout_s))

    async def rebind(self, request: stage_pb2.RebindStepRequest, *, timeout_s: float) -> None:
        """Replaces the upstream or downstream replicas on some edges of a running step.

        Raises NotFoundError (UNKNOWN_STEP) if the step is not running on the replica. Raises NotReadyError (CHUNK_GONE)
        if the replica no longer retains the first chunks of an outgoing edge.
        """
        with self._errors.mapped():
            await self._step_stub.RebindStep(request, timeout=timeout_s)

    async def probe_edge(
        self, edge: str, consumer: ConsumerAddress, connector: ConnectorName, *, timeout_s: float
    ) -> EdgeProbe:
        """Returns the connector that the replica would use to send data to `consumer`.

        `connector` is the connector that the pipeline file names for the edge. If no connector works, raises a
        StagemeshError that contains the reason. A replica that does not serve ProbeEdge sends by the grpc connector.
        """
        name, endpoint, server_name = consumer
        request = stage_pb2.ProbeEdgeRequest(
            edge=edge, consumer=name, endpoint=endpoint, server_name=server_name, connector=number_of(connector)
        )
        try:
            with self._errors.mapped():
                return probe_from_wire(await self._stub.ProbeEdge(request, timeout=timeout_s))
        except UnsupportedError:
            if connector not in (AUTO, GRPC):
                raise
            return EdgeProbe(GRPC, {})

    async def describe(self, *, timeout_s: float) -> stage_pb2.DescribeResponse:
        """Returns the replica's state, identity and location.

        If the replica cannot be reached, the next call uses the certificates of this process that have been renewed.
        """
        try:
            with self._errors.mapped():
                request = stage_pb2.DescribeRequest(protocol=own_protocol())
                return _readable(await self._stub.Describe(request, timeout=timeout_s))
        except UnavailableError:
            # A channel never reads its certificates again. The calls that still run end.
            if PROCESS.credentials.version != self._certificates:
                await self.close()
                self._open()
            raise

    async def watch_load(self, verdict: Verdict) -> AsyncGenerator[stage_pb2.WatchLoadResponse]:
        """Yields load reports of the replica periodically, less often if the replica is idle.

        Iterate within `aclosing`. `verdict` holds until the iteration ends.
        """
        request = stage_pb2.WatchLoadRequest(
            interval_s=_LOAD_INTERVAL_S, idle_interval_s=_IDLE_INTERVAL_S, verdict=verdict
        )
        with self._errors.mapped():
            call = self._stub.WatchLoad(request)
            try:
                async for report in call:
                    yield _readable(report)
            finally:
                call.cancel()

    async def wait_while_serving(self) -> None:
        """Waits until the replica reports that it no longer accepts steps.

        Raises a StagemeshError if the replica becomes unreachable.
        """
        with self._errors.mapped():
            call = self._health_watch = self._watch_health(health_pb2.HealthCheckRequest())
            try:
                async for answer in call:
                    if answer.status != health_pb2.HealthCheckResponse.SERVING:
                        return
            finally:
                call.cancel()

    def end_health_watch(self) -> None:
        """Ends `wait_while_serving` with an error, so that its caller asks the replica for its state. Idempotent."""
        if self._health_watch is not None:
            self._health_watch.cancel()

    async def is_port_closed(self) -> bool:
        """Returns whether it is certain that no process listens at the address."""
        return await is_listening(self._endpoint) is False

    async def control(self, request: Message, response: type[_Response], *, timeout_s: float) -> _Response:
        """Calls the method of StageControlService whose request is `request`, and returns its response."""
        path = f"/{CONTROL_NAME}/{request.DESCRIPTOR.name.removesuffix('Request')}"
        with self._errors.mapped():
            call = _with_limited_answers(self._channel).unary_unary(path, response_deserializer=response.FromString)
            return _readable(await call(request.SerializeToString(), timeout=timeout_s))

    async def forward(self, method: str, request: bytes, *, timeout_s: float) -> bytes:
        """Calls the method `method` of StageControlService. The request and the response are serialized messages."""
        call: _UnaryBytes = self._channel.unary_unary(f"/{CONTROL_NAME}/{method}", None, None)
        with self._errors.mapped():
            return await call(request, timeout=timeout_s)

    async def close(self) -> None:
        """Closes the connection, which ends all calls. Idempotent."""
        if self._steps is not None:
            await self._steps.close()
        await self._step_channel.close()
        await self._channel.close()


def _with_limited_answers(channel: grpc.aio.Channel) -> grpc.aio.Channel:
    """Returns a channel for stubs, which cannot read an answer with more than `MAX_ANSWER_FIELDS` fields."""

    def limited(open_call: Callable[..., Any], path: str, *, response_deserializer: Any, **options: Any) -> Any:
        parse = partial(parse_message, response_deserializer.__self__, max_fields=MAX_ANSWER_FIELDS)
        return open_call(path, response_deserializer=parse, **options)

    kinds = ("unary_unary", "unary_stream", "stream_stream")
    return cast(
        "grpc.aio.Channel", SimpleNamespace(**{kind: partial(limited, getattr(channel, kind)) for kind in kinds})
    )


def _readable(answer: _Response | None) -> _Response:
    """Returns an answer. Raises DecodeError if gRPC could not parse it, for which gRPC returns None."""
    if answer is None:
        raise DecodeError("the answer is malformed")
    return answer
