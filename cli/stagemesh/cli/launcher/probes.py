"""Probes of the processes of a pipeline, and the status of its external stages."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from http import HTTPStatus
from http.client import HTTPConnection, HTTPException
from itertools import chain
from typing import Any, NamedTuple, TypeAlias

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from stagemesh.common.errors import NotReadyError
from stagemesh.common.plugins.descriptors import INPUT
from stagemesh.pipeline import Pipeline, Stage
from stagemesh.v1 import chunk_pb2, orchestrator_pb2, stage_pb2
from stagemesh.v1.orchestrator_pb2_grpc import OrchestratorServiceStub
from stagemesh.v1.stage_pb2_grpc import StageServiceStub

ORCHESTRATOR = "orchestrator"
"""The name of the orchestrator's process in ProcessStatus."""

_TIMEOUT_S = 1.0


class ProcessState(Enum):
    """The state of a process. The value of each member is the word that is shown to users."""

    WAITING = "waiting"
    STARTING = "starting"
    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"
    FAILED = "failed"
    ASLEEP = "asleep"
    RESTARTING = "restarting"
    STOPPED = "stopped"


@dataclass(frozen=True)
class ProcessStatus:
    """A snapshot of the state of a process, or of an external stage, whose processes the launcher does not start.

    - `name` is the name of the replica that the process serves, "orchestrator", "media", "gateway", or
      "STAGE (external)".
    - `stage` is the name of the replica's stage, or "" for a process that serves no stage.
    - `endpoint` is the address of the process, or the addresses of the external stage.
    - `process_id` is None if no process is running, and for external stages.
    """

    name: str
    stage: str
    endpoint: str
    state: ProcessState
    detail: str = ""
    process_id: int | None = None


_REPLICA_STATES = ("LOADING", "READY", "DRAINING", "FAILED", "ASLEEP")
_STATES = {stage_pb2.ReplicaState.Value(f"REPLICA_STATE_{name}"): ProcessState[name] for name in _REPLICA_STATES}
_TRANSIENT = frozenset({grpc.StatusCode.UNAVAILABLE.value[0], grpc.StatusCode.DEADLINE_EXCEEDED.value[0]})


class Observation(NamedTuple):
    """The state that a service reports about itself, with a human-readable detail. The detail may be empty."""

    state: ProcessState
    detail: str


Probe: TypeAlias = Callable[[grpc.aio.Channel], Awaitable[Observation | None]]
"""An async function that returns the state of the service at the other end of a gRPC channel.

A probe of a service without gRPC ignores the channel. Returns None if the service does not answer.
"""


async def probe_stage(channel: grpc.aio.Channel) -> Observation | None:
    """Returns the state that a stage replica reports in its answer to the Describe RPC.

    Returns None if the replica does not answer within 1 second.
    """
    try:
        answer = await StageServiceStub(channel).Describe(stage_pb2.DescribeRequest(), timeout=_TIMEOUT_S)
    except grpc.aio.AioRpcError:
        return None
    return Observation(_STATES.get(answer.state, ProcessState.LOADING), answer.detail)


async def probe_health(channel: grpc.aio.Channel) -> Observation | None:
    """Returns the state of a service according to its gRPC health check.

    The state is READY if the health check reports SERVING, and LOADING otherwise. Returns None if the service does not
    answer within 1 second.
    """
    # The stubs of grpc_health have no types.
    stub: Any = health_pb2_grpc.HealthStub
    try:
        answer = await stub(channel).Check(health_pb2.HealthCheckRequest(), timeout=_TIMEOUT_S)
    except grpc.aio.AioRpcError:
        return None
    serving = answer.status == health_pb2.HealthCheckResponse.SERVING
    return Observation(ProcessState.READY if serving else ProcessState.LOADING, "")


def probe_http(endpoint: str) -> Probe:
    """Returns a probe of the HTTP service at `endpoint` ("host:port").

    The state is READY if the service answers `GET /health` with status 200, and LOADING if it answers with another
    status. The probe returns None if the service does not answer within 1 second.
    """
    host, _, port = endpoint.rpartition(":")

    def read_status() -> int:
        connection = HTTPConnection(host.strip("[]"), int(port), timeout=_TIMEOUT_S)
        try:
            connection.request("GET", "/health")
            return connection.getresponse().status
        finally:
            connection.close()

    async def probe(channel: grpc.aio.Channel) -> Observation | None:
        del channel
        try:
            status = await asyncio.to_thread(read_status)
        except (OSError, HTTPException):
            return None
        return Observation(ProcessState.READY if status == HTTPStatus.OK else ProcessState.LOADING, "")

    return probe


async def probe_edges(channel: grpc.aio.Channel) -> tuple[orchestrator_pb2.EdgeDescription, ...] | None:
    """Returns the descriptions of the pipeline's edges if all replicas are ready and all connectors are known.

    `channel` leads to the orchestrator. Returns None if a replica is not ready, if the connector between two replicas
    is not known yet, or if the orchestrator does not answer within 1 second. Raises NotReadyError
    (CONNECTOR_UNAVAILABLE) if a connector that the pipeline file names cannot work.
    """
    if (described := await _describe(channel)) is None:
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
    """Returns whether the connector of an edge is known for each pair of replicas that the edge connects.

    If the pipeline file sets the connector to `auto`, a pair of replicas whose probe failed also counts as known.
    Returns False if the edge does not connect any replicas yet. The connector of an edge from "@input" is always known.
    """
    if edge.from_stage == INPUT:
        return True
    is_auto = edge.connector == chunk_pb2.CONNECTOR_AUTO
    return bool(edge.links) and all(link.connector or (is_auto and link.HasField("error")) for link in edge.links)


_POLL_S = 0.5


class ExternalStages:
    """The external stages of a pipeline that a launcher runs, and their last statuses."""

    def __init__(self, pipeline: Pipeline, *, admin_endpoint: str) -> None:
        """`admin_endpoint` is the address at which replicas register with the orchestrator."""
        self._pipeline, self._admin_endpoint = pipeline, admin_endpoint
        self._stages = [stage for stage in pipeline.stages.values() if stage.is_external]
        self.statuses = {stage.name: self._waiting(stage) for stage in self._stages}
        """The status of each external stage, by the name of the stage."""

    @property
    def register(self) -> bool:
        """Whether the replicas of any of these stages must register, because the pipeline file has no addresses."""
        return any(not stage.addresses for stage in self._stages)

    async def watch(self, channel: grpc.aio.Channel, report: Callable[[ProcessStatus], None]) -> None:
        """Calls `report` with the status of each stage, now and after each change, until this call is cancelled.

        `channel` leads to the orchestrator. Returns at once if the pipeline has no external stage.
        """
        for status in self.statuses.values():
            report(status)
        while self._stages:
            described = await _describe(channel)
            replicas_of = {stage.name: stage.replicas for stage in described.stages} if described else {}
            for stage in self._stages:
                replicas = replicas_of.get(stage.name)
                status = self._status(stage, replicas) if replicas else self._waiting(stage)
                if status != self.statuses[stage.name]:
                    self.statuses[stage.name] = status
                    report(status)
            await asyncio.sleep(_POLL_S)

    def _identity(self, stage: Stage) -> str:
        return f"pipeline {self._pipeline.name}, generation {self._pipeline.generation}, stage {stage.name}"

    def _waiting(self, stage: Stage) -> ProcessStatus:
        """Returns the status of a stage without replicas. Its detail says how a replica joins the stage."""
        where = f"at {', '.join(stage.addresses)}" if stage.addresses else f"to register at {self._admin_endpoint}"
        detail = f"waits for a replica {where} as {self._identity(stage)}"
        return _make_status(stage, stage.addresses, ProcessState.WAITING, detail)

    def _status(self, stage: Stage, replicas: Sequence[orchestrator_pb2.ReplicaStatus]) -> ProcessStatus:
        """Returns READY if all replicas of a stage are ready. Otherwise, the detail explains the other replicas."""
        unready = [each for each in replicas if each.state != stage_pb2.REPLICA_STATE_READY]
        has_failed = any(each.state == stage_pb2.REPLICA_STATE_FAILED for each in unready)
        state = ProcessState.FAILED if has_failed else ProcessState.WAITING if unready else ProcessState.READY
        detail = "; ".join(self._explain(stage, each) for each in unready)
        return _make_status(stage, [each.endpoint for each in replicas], state, detail)

    def _explain(self, stage: Stage, replica: orchestrator_pb2.ReplicaStatus) -> str:
        if replica.state == stage_pb2.REPLICA_STATE_UNREACHABLE:
            return f"{replica.endpoint} does not answer; start a replica there as {self._identity(stage)}"
        return f"{replica.name}: {replica.detail or 'is not ready'}"


def _make_status(stage: Stage, endpoints: Sequence[str], state: ProcessState, detail: str = "") -> ProcessStatus:
    return ProcessStatus(f"{stage.name} (external)", stage.name, ", ".join(endpoints), state, detail)


async def _describe(channel: grpc.aio.Channel) -> orchestrator_pb2.DescribePipelineResponse | None:
    request = orchestrator_pb2.DescribePipelineRequest()
    try:
        return await OrchestratorServiceStub(channel).DescribePipeline(request, timeout=_TIMEOUT_S)
    except grpc.aio.AioRpcError:
        return None
