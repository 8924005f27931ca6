"""AdminService: proto in, a call, proto out."""

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from stagemesh.common.errors import InvalidRequestError
from stagemesh.orchestrator.admin.directory import Directory
from stagemesh.orchestrator.admin.edge_probe import probe_edge
from stagemesh.orchestrator.admin.inspection import Inspector
from stagemesh.orchestrator.admin.lifecycle import Lifecycle
from stagemesh.orchestrator.admin.loads import ask_loads
from stagemesh.orchestrator.admin.paging import Page, page_of
from stagemesh.orchestrator.admin.statuses import Statuses, replica_status
from stagemesh.orchestrator.describe import describe_edge
from stagemesh.orchestrator.fleet.replica import ReplicaState
from stagemesh.orchestrator.orchestrator import Orchestrator
from stagemesh.orchestrator.request.timeline import RequestState
from stagemesh.rpc.handlers import answering, streaming, time_left_s
from stagemesh.v1 import admin_pb2, admin_pb2_grpc

if TYPE_CHECKING:
    import grpc

_Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
_T = TypeVar("_T")

_DEFAULT_INTERVAL_S, _MIN_INTERVAL_S = 1.0, 0.2
_DEFAULT_SLOWEST = 10
_LONGEST_S = 3600.0
# An answer that says why nothing came of it is to come before the caller gives up.
_MARGIN_S = 0.5


class AdminServicer(admin_pb2_grpc.AdminServiceServicer):
    """Serves one orchestrator's operators."""

    def __init__(self, orchestrator: Orchestrator, directory: Directory) -> None:
        self._directory = directory
        self._inspector = Inspector(orchestrator, directory)
        self._lifecycle = Lifecycle(directory)
        self._statuses = Statuses(orchestrator, directory, self._inspector)

    async def ListPipelines(  # noqa: N802
        self, request: admin_pb2.ListPipelinesRequest, context: _Context
    ) -> admin_pb2.ListPipelinesResponse:
        """See the proto."""
        async with answering(context):
            page = _page([self._statuses.pipeline(self._statuses.totals())], request)
            return admin_pb2.ListPipelinesResponse(pipelines=page.items, next_page_token=page.next_token)

    async def ListStages(  # noqa: N802
        self, request: admin_pb2.ListStagesRequest, context: _Context
    ) -> admin_pb2.ListStagesResponse:
        """See the proto."""
        async with answering(context):
            loads = await ask_loads(self._directory.replicas)
            page = _page(self._statuses.stages(self._statuses.totals(), loads), request)
            return admin_pb2.ListStagesResponse(stages=page.items, next_page_token=page.next_token)

    async def ListReplicas(  # noqa: N802
        self, request: admin_pb2.ListReplicasRequest, context: _Context
    ) -> admin_pb2.ListReplicasResponse:
        """See the proto."""
        async with answering(context):
            replicas = self._directory.stage_replicas(request.stage) if request.stage else self._directory.replicas
            if request.state:
                wanted = _replica_state(request.state)
                replicas = [replica for replica in replicas if replica.state is wanted]
            page = _page(replicas, request)
            shown = self._statuses.replicas(page.items, await ask_loads(page.items))
            return admin_pb2.ListReplicasResponse(replicas=shown, next_page_token=page.next_token)

    async def ListEdges(  # noqa: N802
        self, request: admin_pb2.ListEdgesRequest, context: _Context
    ) -> admin_pb2.ListEdgesResponse:
        """See the proto."""
        async with answering(context):
            page = _page(self._statuses.edges(self._statuses.totals()), request)
            return admin_pb2.ListEdgesResponse(edges=page.items, next_page_token=page.next_token)

    async def ListRequests(  # noqa: N802
        self, request: admin_pb2.ListRequestsRequest, context: _Context
    ) -> admin_pb2.ListRequestsResponse:
        """See the proto."""
        async with answering(context):
            states = {_request_state(value) for value in request.states}
            found = self._inspector.requests(states=states, target=request.target)
            page = page_of(found, size=request.page_size, token=request.page_token)
            return admin_pb2.ListRequestsResponse(
                requests=map(self._statuses.request, page.items), next_page_token=page.next_token
            )

    async def GetRequest(  # noqa: N802
        self, request: admin_pb2.GetRequestRequest, context: _Context
    ) -> admin_pb2.GetRequestResponse:
        """See the proto."""
        async with answering(context, request_id=request.request_id):
            return self._statuses.request_in_full(await self._inspector.inspect(request.request_id))

    @streaming
    async def WatchPipeline(  # noqa: N802
        self, request: admin_pb2.WatchPipelineRequest, context: _Context
    ) -> AsyncIterator[admin_pb2.WatchPipelineResponse]:
        """See the proto."""
        async with answering(context):
            interval_s = request.interval_s or _DEFAULT_INTERVAL_S
            if not interval_s >= _MIN_INTERVAL_S:
                raise InvalidRequestError(
                    f"interval_s is {interval_s:g}; it must be {_MIN_INTERVAL_S:g} or more, or 0 for 1"
                )
            while True:
                loads = await ask_loads(self._directory.replicas)
                yield self._statuses.snapshot(loads, slowest=request.slowest or _DEFAULT_SLOWEST)
                await asyncio.sleep(interval_s)

    async def DrainReplicas(  # noqa: N802
        self, request: admin_pb2.DrainReplicasRequest, context: _Context
    ) -> admin_pb2.DrainReplicasResponse:
        """See the proto."""
        async with answering(context):
            move_after_s = request.move_after_s if request.HasField("move_after_s") else None
            replicas = await self._lifecycle.drain(request.target, force=request.force, move_after_s=move_after_s)
            if request.wait:
                await self._lifecycle.wait_idle(replicas, timeout_s=_time_to_wait_s(context))
            return admin_pb2.DrainReplicasResponse(replicas=map(replica_status, replicas))

    async def ResumeReplicas(  # noqa: N802
        self, request: admin_pb2.ResumeReplicasRequest, context: _Context
    ) -> admin_pb2.ResumeReplicasResponse:
        """See the proto."""
        async with answering(context):
            replicas = await self._lifecycle.resume(request.target)
            return admin_pb2.ResumeReplicasResponse(replicas=map(replica_status, replicas))

    @streaming
    async def RestartReplicas(  # noqa: N802
        self, request: admin_pb2.RestartReplicasRequest, context: _Context
    ) -> AsyncIterator[admin_pb2.RestartReplicasResponse]:
        """See the proto."""
        async with answering(context):
            events = self._lifecycle.restart(request.target, force=request.force, drain_s=request.drain_s)
            async with aclosing(events):
                async for event in events:
                    phase = admin_pb2.RestartPhase.Value(f"RESTART_PHASE_{event.phase.value}")
                    yield admin_pb2.RestartReplicasResponse(replica=event.replica, phase=phase, running=event.running)

    async def CancelRequest(  # noqa: N802
        self, request: admin_pb2.AdminServiceCancelRequestRequest, context: _Context
    ) -> admin_pb2.AdminServiceCancelRequestResponse:
        """See the proto."""
        async with answering(context, request_id=request.request_id):
            await self._inspector.cancel(request.request_id)
            return admin_pb2.AdminServiceCancelRequestResponse()

    async def ProbeEdge(  # noqa: N802
        self, request: admin_pb2.AdminServiceProbeEdgeRequest, context: _Context
    ) -> admin_pb2.AdminServiceProbeEdgeResponse:
        """See the proto."""
        async with answering(context, edge=request.edge):
            edge = self._directory.edge(request.edge)
            links = await probe_edge(self._directory, edge, producer=request.producer, consumer=request.consumer)
            return admin_pb2.AdminServiceProbeEdgeResponse(edge=describe_edge(edge, links))


def _page(items: Iterable[_T], request: Any) -> Page[_T]:
    return page_of(enumerate(items), size=request.page_size, token=request.page_token)


def _replica_state(value: int) -> ReplicaState:
    known = {int(state.wire): state for state in ReplicaState}
    if value not in known:
        raise InvalidRequestError(f"state {value} is none of a replica")
    return known[value]


def _request_state(value: int) -> RequestState:
    known = {int(admin_pb2.RequestState.Value(f"REQUEST_STATE_{state.value}")): state for state in RequestState}
    if value not in known:
        raise InvalidRequestError(f"state {value} is none of a request")
    return known[value]


def _time_to_wait_s(context: _Context) -> float:
    left_s = time_left_s(context)
    return _LONGEST_S if left_s is None else max(0.0, left_s - min(_MARGIN_S, left_s / 4))
