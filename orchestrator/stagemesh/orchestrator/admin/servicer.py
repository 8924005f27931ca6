"""Serves AdminService on a separate port, and forwards StageControlService calls to replicas.

The servicer converts messages and pages lists. `Inspector` and `Lifecycle` do the work.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, TypeVar, cast

import grpc
from google.protobuf.message import Message

from stagemesh.common.errors import InvalidRequestError, UnsupportedError
from stagemesh.common.process.stage_process import ReplicaState
from stagemesh.common.wire.versions import check_version, own_protocol
from stagemesh.orchestrator.admin.adapters import Adapters
from stagemesh.orchestrator.admin.directory import Directory, process_reports, set_log_levels
from stagemesh.orchestrator.admin.inspection import Inspector
from stagemesh.orchestrator.admin.lifecycle import Lifecycle
from stagemesh.orchestrator.descriptions import describe_edge, replica_status
from stagemesh.orchestrator.fleet.membership import SERVICE_NAME as MEMBERSHIP_NAME
from stagemesh.orchestrator.fleet.membership import MembershipServicer, RegistrationSource
from stagemesh.orchestrator.fleet.replica_client import CONTROL_NAME
from stagemesh.orchestrator.orchestrator import Orchestrator
from stagemesh.orchestrator.request.timeline import RequestState
from stagemesh.rpc.callers import OPERATOR, STAGE
from stagemesh.rpc.handlers import Context, answered, answering, streaming, time_left_s
from stagemesh.rpc.pages import Key, page_of
from stagemesh.rpc.server import Server
from stagemesh.v1 import admin_pb2, admin_pb2_grpc, control_pb2, membership_pb2_grpc

SERVICE_NAME = admin_pb2.DESCRIPTOR.services_by_name["AdminService"].full_name
REPLICA_KEY = "stagemesh-replica"
"""The metadata key for the name of the replica to which a StageControlService call is forwarded."""

_MAX_CALL_S = 3600.0
# The methods that are not forwarded. Their replacements in AdminService also consider the stage's other replicas.
_REPLACED_BY = {
    "Drain": "DrainReplicas",
    "Resume": "ResumeReplicas",
    "Shutdown": "RestartReplicas",
    "LoadAdapter": "LoadAdapter",
    "UnloadAdapter": "UnloadAdapter",
}

_T = TypeVar("_T")

_DEFAULT_INTERVAL_S, _MIN_INTERVAL_S = 1.0, 0.2
_DEFAULT_SLOWEST = 10
_MAX_WAIT_S = 3600.0
# Lets registered replicas receive the reason before the server stops.
_GRACE_S = 0.5
# The error that explains a failed wait must arrive before the caller's deadline.
_MARGIN_S = 0.5
_REPLICA_STATES = {int(state.value): state for state in ReplicaState}
_REQUEST_STATES = {int(admin_pb2.RequestState.Value(f"REQUEST_STATE_{state.value}")): state for state in RequestState}


@answered
class AdminServicer(admin_pb2_grpc.AdminServiceServicer):
    """Implements the RPCs of AdminService for the operators of one orchestrator."""

    def __init__(self, orchestrator: Orchestrator, directory: Directory) -> None:
        self._directory = directory
        self._inspector = Inspector(orchestrator, directory)
        self._lifecycle = Lifecycle(directory)
        self._adapters = Adapters(directory, orchestrator.fleet.adapters)

    async def DescribeServer(
        self, request: admin_pb2.DescribeServerRequest, context: Context
    ) -> admin_pb2.DescribeServerResponse:
        if request.HasField("protocol"):
            check_version(request.protocol, peer="the caller", own_name="this orchestrator")
        return admin_pb2.DescribeServerResponse(protocol=own_protocol())

    async def ListPipelines(
        self, request: admin_pb2.ListPipelinesRequest, context: Context
    ) -> admin_pb2.ListPipelinesResponse:
        statuses = [self._inspector.pipeline(self._inspector.totals())]
        return page_of(admin_pb2.ListPipelinesResponse, request, field="pipelines", items=_numbered(statuses))

    async def ListStages(self, request: admin_pb2.ListStagesRequest, context: Context) -> admin_pb2.ListStagesResponse:
        statuses = self._inspector.stages(self._inspector.totals())
        return page_of(admin_pb2.ListStagesResponse, request, field="stages", items=_numbered(statuses))

    async def ListReplicas(
        self, request: admin_pb2.ListReplicasRequest, context: Context
    ) -> admin_pb2.ListReplicasResponse:
        replicas = self._directory.replicas_of(request.stage) if request.stage else self._directory.replicas
        if request.state:
            wanted = _from_wire(request.state, _REPLICA_STATES, "replica")
            replicas = [replica for replica in replicas if replica.state is wanted]
        statuses = ((self._directory.key_of(replica), replica_status(replica)) for replica in replicas)
        return page_of(admin_pb2.ListReplicasResponse, request, field="replicas", items=statuses)

    async def ListEdges(self, request: admin_pb2.ListEdgesRequest, context: Context) -> admin_pb2.ListEdgesResponse:
        statuses = self._inspector.edges(self._inspector.totals())
        return page_of(admin_pb2.ListEdgesResponse, request, field="edges", items=_numbered(statuses))

    async def ListRequests(
        self, request: admin_pb2.ListRequestsRequest, context: Context
    ) -> admin_pb2.ListRequestsResponse:
        states = {_from_wire(value, _REQUEST_STATES, "request") for value in request.states}
        found = self._inspector.requests(states=states, target=request.target)
        statuses = (((number,), status) for number, status in found)
        return page_of(admin_pb2.ListRequestsResponse, request, field="requests", items=statuses)

    async def GetRequest(self, request: admin_pb2.GetRequestRequest, context: Context) -> admin_pb2.GetRequestResponse:
        return await self._inspector.inspect(request.request_id)

    @streaming
    async def WatchPipeline(
        self, request: admin_pb2.WatchPipelineRequest, context: Context
    ) -> AsyncIterator[admin_pb2.WatchPipelineResponse]:
        interval_s = request.interval_s or _DEFAULT_INTERVAL_S
        if not interval_s >= _MIN_INTERVAL_S:
            raise InvalidRequestError(f"interval_s is {interval_s:g}; use at least {_MIN_INTERVAL_S:g}, or 0 for 1 s")
        while True:
            yield self._inspector.snapshot(slowest=request.slowest or _DEFAULT_SLOWEST)
            await asyncio.sleep(interval_s)

    async def DrainReplicas(
        self, request: admin_pb2.DrainReplicasRequest, context: Context
    ) -> admin_pb2.DrainReplicasResponse:
        move_after_s = request.move_after_s if request.HasField("move_after_s") else None
        replicas = await self._lifecycle.drain(request.target, force=request.force, move_after_s=move_after_s)
        if request.wait:
            await self._lifecycle.wait_idle(replicas, timeout_s=_time_to_wait_s(context))
        return admin_pb2.DrainReplicasResponse(replicas=map(replica_status, replicas))

    async def ResumeReplicas(
        self, request: admin_pb2.ResumeReplicasRequest, context: Context
    ) -> admin_pb2.ResumeReplicasResponse:
        replicas = await self._lifecycle.resume(request.target)
        return admin_pb2.ResumeReplicasResponse(replicas=map(replica_status, replicas))

    @streaming
    def RestartReplicas(
        self, request: admin_pb2.RestartReplicasRequest, context: Context
    ) -> AsyncIterator[admin_pb2.RestartReplicasResponse]:
        return self._lifecycle.restart(request.target, force=request.force, drain_s=request.drain_s)

    async def LoadAdapter(
        self, request: admin_pb2.AdminServiceLoadAdapterRequest, context: Context
    ) -> admin_pb2.AdminServiceLoadAdapterResponse:
        outcomes = await self._adapters.load(
            request.stage, request.name, request.path, timeout_s=_time_to_wait_s(context)
        )
        return admin_pb2.AdminServiceLoadAdapterResponse(replicas=outcomes)

    async def UnloadAdapter(
        self, request: admin_pb2.AdminServiceUnloadAdapterRequest, context: Context
    ) -> admin_pb2.AdminServiceUnloadAdapterResponse:
        outcomes = await self._adapters.unload(
            request.stage, request.name, request.when_busy, timeout_s=_time_to_wait_s(context)
        )
        return admin_pb2.AdminServiceUnloadAdapterResponse(replicas=outcomes)

    async def ListAdapters(
        self, request: admin_pb2.AdminServiceListAdaptersRequest, context: Context
    ) -> admin_pb2.AdminServiceListAdaptersResponse:
        found = [((adapter.name,), adapter) for adapter in await self._adapters.list(request.stage)]
        return page_of(admin_pb2.AdminServiceListAdaptersResponse, request, field="adapters", items=found)

    async def SetLogLevel(
        self, request: admin_pb2.AdminServiceSetLogLevelRequest, context: Context
    ) -> admin_pb2.AdminServiceSetLogLevelResponse:
        level = control_pb2.SetLogLevelRequest(level=request.level, logger=request.logger)
        outcomes = await set_log_levels(self._directory, request.target, level)
        return admin_pb2.AdminServiceSetLogLevelResponse(processes=outcomes)

    async def DescribeHosts(
        self, request: admin_pb2.DescribeHostsRequest, context: Context
    ) -> admin_pb2.DescribeHostsResponse:
        return admin_pb2.DescribeHostsResponse(processes=await process_reports(self._directory))

    async def CancelRequest(
        self, request: admin_pb2.AdminServiceCancelRequestRequest, context: Context
    ) -> admin_pb2.AdminServiceCancelRequestResponse:
        await self._inspector.cancel(request.request_id)
        return admin_pb2.AdminServiceCancelRequestResponse()

    async def ProbeEdge(
        self, request: admin_pb2.AdminServiceProbeEdgeRequest, context: Context
    ) -> admin_pb2.AdminServiceProbeEdgeResponse:
        edge = self._directory.edge(request.edge)
        links = await self._directory.probe_edge(edge, producer=request.producer, consumer=request.consumer)
        return admin_pb2.AdminServiceProbeEdgeResponse(edge=describe_edge(edge, links))


@asynccontextmanager
async def serving_admin(
    orchestrator: Orchestrator, registration: RegistrationSource | None, listen: str
) -> AsyncGenerator[int]:
    """Serves operators and stages at the address `listen` ("host:port") while the block runs. Yields the port number.

    Operators call AdminService. Stages call MembershipService, which rejects them if `registration` is None. All health
    checks report SERVING.
    """
    server = Server(listen, roles={OPERATOR, STAGE})
    directory = Directory(orchestrator.pipeline, orchestrator.fleet)
    server.add(SERVICE_NAME, admin_pb2_grpc.add_AdminServiceServicer_to_server, AdminServicer(orchestrator, directory))
    server.grpc.add_generic_rpc_handlers((_ControlForwarder(directory),))
    server.reflect(CONTROL_NAME)
    server.add(
        MEMBERSHIP_NAME, membership_pb2_grpc.add_MembershipServiceServicer_to_server, MembershipServicer(registration)
    )
    server.set_health("", SERVICE_NAME, CONTROL_NAME, MEMBERSHIP_NAME, serving=True)
    async with server.serving(grace_s=_GRACE_S) as port:
        yield port


class _ControlForwarder(grpc.GenericRpcHandler):
    """Forwards each StageControlService call to the replica that the call's metadata names.

    Does not parse messages. Rejects Drain, Resume and Shutdown, because AdminService has its own methods for these
    operations.
    """

    def __init__(self, directory: Directory) -> None:
        self._directory = directory

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
        path = handler_call_details.method
        if not path.startswith(f"/{CONTROL_NAME}/"):
            return None
        forward: Callable[..., Any] = partial(self._forward, path)
        return cast("Any", grpc.unary_unary_rpc_method_handler(forward))

    async def _forward(self, path: str, request: bytes, context: Any) -> bytes:
        method = path.rpartition("/")[2]
        metadata: Sequence[tuple[str, str | bytes]] = context.invocation_metadata() or ()
        name = next((str(value) for key, value in metadata if key == REPLICA_KEY), "")
        async with answering(context, **({"replica": name} if name else {})):
            if not name:
                raise InvalidRequestError(
                    f"the call does not name a replica; add its name to the metadata with the key {REPLICA_KEY!r}",
                    reason="NO_TARGET",
                )
            if method in _REPLACED_BY:
                raise UnsupportedError(f"{method} is not forwarded; call AdminService.{_REPLACED_BY[method]}")
            replica = self._directory.replica(name)
            left_s = time_left_s(context)
            return await replica.client.forward(path, request, timeout_s=_MAX_CALL_S if left_s is None else left_s)
        raise AssertionError("answering ends every call that fails")


def _numbered(items: Iterable[Message]) -> Iterator[tuple[Key, Message]]:
    """Returns the items of a list that never changes, each with its number as its key."""
    return (((number,), item) for number, item in enumerate(items))


def _from_wire(value: int, states: Mapping[int, _T], kind: str) -> _T:
    if value not in states:
        raise InvalidRequestError(f"unknown {kind} state {value}; states: {', '.join(map(str, sorted(states)))}")
    return states[value]


def _time_to_wait_s(context: Context) -> float:
    left_s = time_left_s(context)
    return _MAX_WAIT_S if left_s is None else max(0.0, left_s - min(_MARGIN_S, left_s / 4))
