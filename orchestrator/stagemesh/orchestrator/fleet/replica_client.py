"""Calls from the orchestrator to one replica of a stage."""

from collections.abc import AsyncGenerator, Awaitable
from typing import Any, TypeAlias, TypeVar, cast

import grpc
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2
from grpc_health.v1.health_pb2_grpc import HealthStub

from stagemesh.common.errors import UnavailableError, UnsupportedError
from stagemesh.common.plugins.connectors import AUTO, GRPC, ConnectorName, number_of
from stagemesh.common.wire.versions import own_protocol
from stagemesh.connectors.packets import ConsumerAddress
from stagemesh.connectors.stream.connector_agreement import EdgeProbe, probe_from_wire
from stagemesh.orchestrator.fleet.replica_loss import STEP_PING_S, STEP_PING_TIMEOUT_S, ReplicaErrors
from stagemesh.orchestrator.fleet.step_stream import StepStream, TakeEvent
from stagemesh.rpc.channels import MAX_MESSAGE_BYTES, is_listening, open_channel
from stagemesh.rpc.credentials import PROCESS
from stagemesh.v1 import control_pb2, stage_pb2

CONTROL_NAME = control_pb2.DESCRIPTOR.services_by_name["StageControlService"].full_name
_LOAD_INTERVAL_S = 0.5
_IDLE_INTERVAL_S = 30.0

Verdict: TypeAlias = "stage_pb2.RolloutVerdict.ValueType"
"""Whether a rolling update may count a replica as ready."""
_Response = TypeVar("_Response", bound=Message)
_UnaryBytes: TypeAlias = "grpc.aio.UnaryUnaryMultiCallable[bytes, bytes]"
_StreamBytes: TypeAlias = "grpc.aio.UnaryStreamMultiCallable[bytes, bytes]"


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
        self._step_channel = open_channel(
            self._endpoint,
            server_name=self._server_name,
            keepalive_s=STEP_PING_S,
            ping_timeout_s=STEP_PING_TIMEOUT_S,
            pings_without_calls=False,
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
        open_call: _StreamBytes = self._step_channel.unary_stream("/stagemesh.v1.StageService/ExecuteStep", None, None)
        with self._errors.mapped():
            call = open_call(self._errors.check_size(request.SerializeToString()), timeout=timeout_s)
            try:
                async for event in call:
                    take(self._errors.read(stage_pb2.ExecuteStepResponse, event))
            finally:
                call.cancel()

    async def cancel(self, request: stage_pb2.CancelStepRequest, *, timeout_s: float) -> stage_pb2.CancelStepResponse:
        """Cancels a request's steps on the replica. Returns after the engine has released the steps."""
        return await self.control(
            request, stage_pb2.CancelStepResponse, timeout_s=timeout_s, channel=self._step_channel
        )

    async def rebind(self, request: stage_pb2.RebindStepRequest, *, timeout_s: float) -> None:
        """Replaces the upstream or downstream replicas on some edges of a running step.

        Raises NotFoundError (UNKNOWN_STEP) if the step is not running on the replica. Raises NotReadyError (CHUNK_GONE)
        if the replica no longer retains the first chunks of an outgoing edge.
        """
        await self.control(request, stage_pb2.RebindStepResponse, timeout_s=timeout_s, channel=self._step_channel)

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
            return probe_from_wire(await self.control(request, stage_pb2.ProbeEdgeResponse, timeout_s=timeout_s))
        except UnsupportedError:
            if connector not in (AUTO, GRPC):
                raise
            return EdgeProbe(GRPC, {})

    async def describe(self, *, timeout_s: float) -> stage_pb2.DescribeResponse:
        """Returns the replica's state, identity and location.

        If the replica cannot be reached, the next call uses the certificates of this process that have been renewed.
        """
        try:
            request = stage_pb2.DescribeRequest(protocol=own_protocol())
            described = await self.control(request, stage_pb2.DescribeResponse, timeout_s=timeout_s)
        except UnavailableError:
            # A channel never reads its certificates again. The calls that still run end.
            if PROCESS.credentials.version != self._certificates:
                await self.close()
                self._open()
            raise
        if described.protocol.HasField("max_message_bytes"):
            self._errors.max_message_bytes = min(MAX_MESSAGE_BYTES, described.protocol.max_message_bytes)
        return described

    async def watch_load(self, verdict: Verdict) -> AsyncGenerator[stage_pb2.WatchLoadResponse]:
        """Yields load reports of the replica periodically, less often if the replica is idle.

        Iterate within `aclosing`. `verdict` holds until the iteration ends.
        """
        request = stage_pb2.WatchLoadRequest(
            interval_s=_LOAD_INTERVAL_S, idle_interval_s=_IDLE_INTERVAL_S, verdict=verdict
        )
        open_call: _StreamBytes = self._channel.unary_stream("/stagemesh.v1.StageService/WatchLoad", None, None)
        with self._errors.mapped():
            call = open_call(request.SerializeToString())
            try:
                async for report in call:
                    yield self._errors.read(stage_pb2.WatchLoadResponse, report)
            finally:
                call.cancel()

    async def wait_while_serving(self) -> None:
        """Waits until the replica reports that it no longer accepts steps.

        Raises a StagemeshError if the replica becomes unreachable.
        """
        with self._errors.mapped():
            call = self._health_watch = cast("Any", HealthStub)(self._channel).Watch(health_pb2.HealthCheckRequest())
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

    async def control(
        self, request: Message, response: type[_Response], *, timeout_s: float, channel: grpc.aio.Channel | None = None
    ) -> _Response:
        """Calls the method of StageControlService or StageService whose request is `request`. Returns its response."""
        (service,) = request.DESCRIPTOR.file.services_by_name.values()
        path = f"/{service.full_name}/{request.DESCRIPTOR.name.removesuffix('Request')}"
        data = await self.forward(path, request.SerializeToString(), timeout_s=timeout_s, channel=channel)
        return self._errors.read(response, data)

    async def forward(
        self, path: str, request: bytes, *, timeout_s: float, channel: grpc.aio.Channel | None = None
    ) -> bytes:
        """Calls the unary method with this path. The request and the response are serialized messages."""
        with self._errors.mapped():
            call: _UnaryBytes = (channel or self._channel).unary_unary(path, None, None)
            return await call(request, timeout=timeout_s)

    async def close(self) -> None:
        """Closes the connection, which ends all calls. Idempotent."""
        if self._steps is not None:
            await self._steps.close()
        await self._step_channel.close()
        await self._channel.close()
