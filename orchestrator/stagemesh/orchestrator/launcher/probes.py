"""How a launcher learns where a process stands: it asks the service itself."""

from typing import NamedTuple, Protocol

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2

from stagemesh.orchestrator.launcher.process_states import ProcessState
from stagemesh.rpc.channels import open_channel
from stagemesh.v1 import stage_pb2
from stagemesh.v1.stage_pb2_grpc import StageServiceStub

_TIMEOUT_S = 1.0
_STATES = {
    stage_pb2.REPLICA_STATE_LOADING: ProcessState.LOADING,
    stage_pb2.REPLICA_STATE_READY: ProcessState.READY,
    stage_pb2.REPLICA_STATE_DRAINING: ProcessState.DRAINING,
    stage_pb2.REPLICA_STATE_FAILED: ProcessState.FAILED,
    stage_pb2.REPLICA_STATE_ASLEEP: ProcessState.ASLEEP,
}


class Observation(NamedTuple):
    """What a service says of itself."""

    state: ProcessState
    detail: str


class Probe(Protocol):
    """A way to ask."""

    async def look(self) -> Observation | None:
        """What the service says now; None while it does not answer."""

    async def close(self) -> None:
        """Disconnects."""


class StageProbe:
    """Asks a stage replica by Describe."""

    def __init__(self, endpoint: str) -> None:
        self._channel = open_channel(endpoint)
        self._stub = StageServiceStub(self._channel)

    async def look(self) -> Observation | None:
        """The replica's state and what it is doing."""
        try:
            answer = await self._stub.Describe(stage_pb2.DescribeRequest(), timeout=_TIMEOUT_S)
        except grpc.aio.AioRpcError:
            return None
        return Observation(_STATES.get(answer.state, ProcessState.LOADING), answer.detail)

    async def close(self) -> None:
        """Disconnects."""
        await self._channel.close()


class HealthProbe:
    """Asks any service by grpc.health."""

    def __init__(self, endpoint: str) -> None:
        self._channel = open_channel(endpoint)
        # Called by name: the stubs of grpc_health have no types.
        self._check = self._channel.unary_unary(
            "/grpc.health.v1.Health/Check",
            request_serializer=health_pb2.HealthCheckRequest.SerializeToString,
            response_deserializer=health_pb2.HealthCheckResponse.FromString,
        )

    async def look(self) -> Observation | None:
        """READY where it serves, LOADING where it does not yet."""
        try:
            answer = await self._check(health_pb2.HealthCheckRequest(), timeout=_TIMEOUT_S)
        except grpc.aio.AioRpcError:
            return None
        serving = answer.status == health_pb2.HealthCheckResponse.SERVING
        return Observation(ProcessState.READY if serving else ProcessState.LOADING, "")

    async def close(self) -> None:
        """Disconnects."""
        await self._channel.close()
