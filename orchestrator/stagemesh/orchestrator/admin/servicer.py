"""Implements AdminService: converts its messages, and calls the inspector, the lifecycle and the status builder."""

import asyncio
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import aclosing
from itertools import islice
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeAlias, TypeVar

from stagemesh.common.errors import InvalidRequestError
from stagemesh.orchestrator.admin.directory import Directory
from stagemesh.orchestrator.admin.inspection import Inspector
from stagemesh.orchestrator.admin.lifecycle import Lifecycle
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
_DEFAULT_PAGE, _MAX_PAGE = 100, 1000
_MAX_TOKEN_DIGITS = 19
_MAX_WAIT_S = 3600.0
# The error that explains a failed wait must arrive before the caller's deadline.
_MARGIN_S = 0.5
_REPLICA_STATES = {int(state.value): state for state in ReplicaState}
_REQUEST_STATES = {int(admin_pb2.RequestState.Value(f"REQUEST_STATE_{state.value}")): state for state in RequestState}


class AdminServicer(admin_pb2_grpc.AdminServiceServicer):
    """Serves AdminService for the operators of one orchestrator."""

    def __init__(self, orchestrator: Orchestrator, directory: Directory) -> None:
        self._directory = directory
        self._inspector = Inspector(orchestrator, directory)
        self._lifecycle = Lifecycle(directory)
        self._statuses = Statuses(orchestrator, directory, self._inspector)

    async def ListPipelines(  # noqa: N802
        self, request: admin_pb2.ListPipelinesRequest, context: _Context
    ) -> admin_pb2.ListPipelinesResponse:
        async with answering(context):
            page = _page(enumerate([self._statuses.pipeline(self._statuses.totals())]), request)
            return admin_pb2.ListPipelinesResponse(pipelines=page.items, next_page_token=page.next_token)

    async def ListStages(  # noqa: N802
        self, request: admin_pb2.ListStagesRequest, context: _Context
    ) -> admin_pb2.ListStagesResponse:
        async with answering(context):
            page = _page(enumerate(self._statuses.stages(self._statuses.totals())), request)
            return admin_pb2.ListStagesResponse(stages=page.items, next_page_token=page.next_token)

    async def ListReplicas(  # noqa: N802
        self, request: admin_pb2.ListReplicasRequest, context: _Context
    ) -> admin_pb2.ListReplicasResponse:
        async with answering(context):
            replicas = self._directory.replicas_of(request.stage) if request.stage else self._directory.replicas
            if request.state:
                wanted = _from_wire(request.state, _REPLICA_STATES, "replica")
                replicas = [replica for replica in replicas if replica.state is wanted]
            page = _page(enumerate(replicas), request)
            return admin_pb2.ListReplicasResponse(
                replicas=map(replica_status, page.items), next_page_token=page.next_token
            )

    async def ListEdges(  # noqa: N802
        self, request: admin_pb2.ListEdgesRequest, context: _Context
    ) -> admin_pb2.ListEdgesResponse:
        async with answering(context):
            page = _page(enumerate(self._statuses.edges(self._statuses.totals())), request)
            return admin_pb2.ListEdgesResponse(edges=page.items, next_page_token=page.next_token)

    async def ListRequests(  # noqa: N802
        self, request: admin_pb2.ListRequestsRequest, context: _Context
    ) -> admin_pb2.ListRequestsResponse:
        async with answering(context):
            states = {_from_wire(value, _REQUEST_STATES, "request") for value in request.states}
            page = _page(self._inspector.requests(states=states, target=request.target), request)
            return admin_pb2.ListRequestsResponse(
                requests=map(self._statuses.request, page.items), next_page_token=page.next_token
            )

    async def GetRequest(  # noqa: N802
        self, request: admin_pb2.GetRequestRequest, context: _Context
    ) -> admin_pb2.GetRequestResponse:
        async with answering(context, request_id=request.request_id):
            return self._statuses.request_in_full(await self._inspector.inspect(request.request_id))

    @streaming
    async def WatchPipeline(  # noqa: N802
        self, request: admin_pb2.WatchPipelineRequest, context: _Context
    ) -> AsyncIterator[admin_pb2.WatchPipelineResponse]:
        async with answering(context):
            interval_s = request.interval_s or _DEFAULT_INTERVAL_S
            if not interval_s >= _MIN_INTERVAL_S:
                raise InvalidRequestError(
                    f"interval_s is {interval_s:g}; it must be at least {_MIN_INTERVAL_S:g}, or 0 for 1 s"
                )
            while True:
                yield self._statuses.snapshot(slowest=request.slowest or _DEFAULT_SLOWEST)
                await asyncio.sleep(interval_s)

    async def DrainReplicas(  # noqa: N802
        self, request: admin_pb2.DrainReplicasRequest, context: _Context
    ) -> admin_pb2.DrainReplicasResponse:
        async with answering(context):
            move_after_s = request.move_after_s if request.HasField("move_after_s") else None
            replicas = await self._lifecycle.drain(request.target, force=request.force, move_after_s=move_after_s)
            if request.wait:
                await self._lifecycle.wait_idle(replicas, timeout_s=_time_to_wait_s(context))
            return admin_pb2.DrainReplicasResponse(replicas=map(replica_status, replicas))

    async def ResumeReplicas(  # noqa: N802
        self, request: admin_pb2.ResumeReplicasRequest, context: _Context
    ) -> admin_pb2.ResumeReplicasResponse:
        async with answering(context):
            replicas = await self._lifecycle.resume(request.target)
            return admin_pb2.ResumeReplicasResponse(replicas=map(replica_status, replicas))

    @streaming
    async def RestartReplicas(  # noqa: N802
        self, request: admin_pb2.RestartReplicasRequest, context: _Context
    ) -> AsyncIterator[admin_pb2.RestartReplicasResponse]:
        async with answering(context):
            events = self._lifecycle.restart(request.target, force=request.force, drain_s=request.drain_s)
            async with aclosing(events):
                async for event in events:
                    phase = admin_pb2.RestartPhase.Value(f"RESTART_PHASE_{event.phase.value}")
                    yield admin_pb2.RestartReplicasResponse(replica=event.replica, phase=phase, running=event.running)

    async def CancelRequest(  # noqa: N802
        self, request: admin_pb2.AdminServiceCancelRequestRequest, context: _Context
    ) -> admin_pb2.AdminServiceCancelRequestResponse:
        async with answering(context, request_id=request.request_id):
            await self._inspector.cancel(request.request_id)
            return admin_pb2.AdminServiceCancelRequestResponse()

    async def ProbeEdge(  # noqa: N802
        self, request: admin_pb2.AdminServiceProbeEdgeRequest, context: _Context
    ) -> admin_pb2.AdminServiceProbeEdgeResponse:
        async with answering(context, edge=request.edge):
            edge = self._directory.edge(request.edge)
            links = await self._directory.probe_edge(edge, producer=request.producer, consumer=request.consumer)
            return admin_pb2.AdminServiceProbeEdgeResponse(edge=describe_edge(edge, links))


class _Page(NamedTuple, Generic[_T]):
    """One page of a list. `next_token` requests the next page, and is empty for the last page."""

    items: list[_T]
    next_token: str


def _page(numbered: Iterable[tuple[int, _T]], request: Any) -> _Page[_T]:
    """Returns the page of a list that a request asks for.

    `numbered` contains the items with their numbers, in ascending order. A page token is the number of the last item of
    the previous page. Raises InvalidRequestError (INVALID_PAGE_TOKEN) for any other token.
    """
    token = str(request.page_token)
    if token and not (token.isascii() and token.isdecimal() and len(token) <= _MAX_TOKEN_DIGITS):
        raise InvalidRequestError(
            f"page_token {token[:40]!r} is not from a previous page; omit it to start with the first page",
            reason="INVALID_PAGE_TOKEN",
        )
    after = int(token or -1)
    size = min(request.page_size or _DEFAULT_PAGE, _MAX_PAGE)
    found = list(islice((pair for pair in numbered if pair[0] > after), size + 1))
    page = found[:size]
    return _Page([item for _, item in page], str(page[-1][0]) if len(found) > size else "")


def _from_wire(value: int, states: Mapping[int, _T], kind: str) -> _T:
    if value not in states:
        raise InvalidRequestError(f"unknown {kind} state {value}; states: {', '.join(map(str, sorted(states)))}")
    return states[value]


def _time_to_wait_s(context: _Context) -> float:
    left_s = time_left_s(context)
    return _MAX_WAIT_S if left_s is None else max(0.0, left_s - min(_MARGIN_S, left_s / 4))
