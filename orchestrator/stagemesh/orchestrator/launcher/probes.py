"""Asks the launcher's processes for their states, and the orchestrator for the connectors of its edges."""

from collections.abc import Awaitable, Callable
from itertools import chain
from typing import NamedTuple, TypeAlias

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2

from stagemesh.common.errors import NotReadyError
from stagemesh.orchestrator.launcher.process_states import ProcessState
from stagemesh.v1 import chunk_pb2, orchestrator_pb2, stage_pb2
from stagemesh.v1.orchestrator_pb2_grpc import OrchestratorServiceStub
from stagemesh.v1.stage_pb2_grpc import StageServiceStub

_TIMEOUT_S = 1.0
_STATES = {
    stage_pb2.REPLICA_STATE_LOADING: ProcessState.LOADING,
    stage_pb2.REPLICA_STATE_READY: ProcessState.READY,
    stage_pb2.REPLICA_STATE_DRAINING: ProcessState.DRAINING,
    stage_pb2.REPLICA_STATE_FAILED: ProcessState.FAILED,
    stage_pb2.REPLICA_STATE_ASLEEP: ProcessState.ASLEEP,
}
_TRANSIENT = frozenset({grpc.StatusCode.UNAVAILABLE.value[0], grpc.StatusCode.DEADLINE_EXCEEDED.value[0]})


class Observation(NamedTuple):
    """The state that a service reports, and a human-readable detail, which may be empty."""

    state: ProcessState
    detail: str


Probe: TypeAlias = Callable[[grpc.aio.Channel], Awaitable[Observation | None]]
"""A function that asks a service for its state over a channel. It returns None if the service does not answer."""


async def probe_stage(channel: grpc.aio.Channel) -> Observation | None:
    """Asks a stage replica for its state with Describe. Returns None if it does not answer."""
    try:
        answer = await StageServiceStub(channel).Describe(stage_pb2.DescribeRequest(), timeout=_TIMEOUT_S)
    except grpc.aio.AioRpcError:
        return None
    return Observation(_STATES.get(answer.state, ProcessState.LOADING), answer.detail)


async def probe_health(channel: grpc.aio.Channel) -> Observation | None:
    """Asks any service for its health with grpc.health. Returns None if it does not answer.

    The state is READY if the service is serving, and LOADING otherwise.
    """
    # The stubs of grpc_health have no types.
    check = channel.unary_unary(
        "/grpc.health.v1.Health/Check",
        request_serializer=health_pb2.HealthCheckRequest.SerializeToString,
        response_deserializer=health_pb2.HealthCheckResponse.FromString,
    )
    try:
        answer = await check(health_pb2.HealthCheckRequest(), timeout=_TIMEOUT_S)
    except grpc.aio.AioRpcError:
        return None
    serving = answer.status == health_pb2.HealthCheckResponse.SERVING
    return Observation(ProcessState.READY if serving else ProcessState.LOADING, "")


async def probe_edges(channel: grpc.aio.Channel) -> tuple[orchestrator_pb2.EdgeDescription, ...] | None:
    """Asks the orchestrator for its edges.

    Returns None until all replicas are ready and the connector of every link is known. Raises NotReadyError
    (CONNECTOR_UNAVAILABLE) if a connector that the pipeline file names cannot work.
    """
    try:
        request = orchestrator_pb2.DescribePipelineRequest()
        described = await OrchestratorServiceStub(channel).DescribePipeline(request, timeout=_TIMEOUT_S)
    except grpc.aio.AioRpcError:
        return None
    for edge in described.edges:
        _check_links(edge)
    replicas = chain.from_iterable(stage.replicas for stage in described.stages)
    ready = all(replica.state == stage_pb2.REPLICA_STATE_READY for replica in replicas)
    if ready and all(_is_known(edge) for edge in described.edges):
        return tuple(described.edges)
    return None


def _check_links(edge: orchestrator_pb2.EdgeDescription) -> None:
    for link in edge.links:
        error = link.error
        if edge.connector != chunk_pb2.CONNECTOR_AUTO and error.code and error.code not in _TRANSIENT:
            raise NotReadyError(error.message, reason="CONNECTOR_UNAVAILABLE", metadata=dict(error.metadata))


def _is_known(edge: orchestrator_pb2.EdgeDescription) -> bool:
    """Returns whether all links have a connector. With `auto`, a link also counts if its probe failed."""
    is_auto = edge.connector == chunk_pb2.CONNECTOR_AUTO
    return bool(edge.links) and all(link.connector or (is_auto and link.HasField("error")) for link in edge.links)
