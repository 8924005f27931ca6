"""Builds the status messages of AdminService."""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from heapq import nlargest

from stagemesh.common.errors import StagemeshError
from stagemesh.connectors.stream.wire import error_to_wire
from stagemesh.orchestrator.admin.directory import Directory
from stagemesh.orchestrator.admin.inspection import InspectedRequest, Inspector
from stagemesh.orchestrator.admission.snapshot import CallerLoad
from stagemesh.orchestrator.describe import describe_edge
from stagemesh.orchestrator.fleet.replica import Replica, ReplicaState
from stagemesh.orchestrator.orchestrator import Orchestrator
from stagemesh.orchestrator.request.timeline import RequestState, Timeline
from stagemesh.orchestrator.request.totals import EdgeTotals, StageTotals, Totals
from stagemesh.orchestrator.spec import Edge, Stage
from stagemesh.v1 import admin_pb2, stage_pb2

Load = stage_pb2.WatchLoadResponse

_NO_LOAD = Load()
_MAX_CALLERS = 100
_LOAD_TIMEOUT_S = 1.0
_REPORTING_LOAD = frozenset({ReplicaState.READY, ReplicaState.DRAINING, ReplicaState.ASLEEP, ReplicaState.LOADING})


class Statuses:
    """Builds messages from the current state."""

    def __init__(
        self,
        orchestrator: Orchestrator,
        directory: Directory,
        inspector: Inspector,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._orchestrator = orchestrator
        self._directory = directory
        self._inspector = inspector
        self._clock = clock
        self._began_s = clock()

    def totals(self) -> Totals:
        """Returns the totals over all requests, including the running ones so far."""
        running = self._orchestrator.requests.running
        return self._orchestrator.totals.together_with(known.record.timeline for known in running)

    def pipeline(self, totals: Totals) -> admin_pb2.PipelineStatus:
        """Returns the status of the pipeline."""
        pipeline, admission = self._directory.pipeline, self._orchestrator.admission.snapshot()
        return admin_pb2.PipelineStatus(
            name=pipeline.name,
            generation=pipeline.generation,
            ready=self._directory.ready,
            uptime_s=self._clock() - self._began_s,
            queued=admission.queued,
            in_flight=admission.in_flight,
            max_in_flight=pipeline.limits.max_in_flight,
            finished=totals.requests[RequestState.FINISHED],
            failed=totals.requests[RequestState.FAILED],
            cancelled=totals.requests[RequestState.CANCELLED],
            in_flight_bytes=admission.in_flight_bytes,
            queued_bytes=admission.queued_bytes,
            expected_wait_s=admission.expected_wait_s,
            returning=admission.returning,
            callers=map(_caller, nlargest(_MAX_CALLERS, admission.callers, key=_requests_of)),
        )

    def stages(self, totals: Totals, loads: Mapping[str, Load]) -> list[admin_pb2.StageStatus]:
        """Returns the status of each stage, producers before consumers."""
        return [self._stage(stage, totals, loads) for stage in self._directory.pipeline.stages.values()]

    def replicas(self, replicas: Sequence[Replica], loads: Mapping[str, Load]) -> list[admin_pb2.ReplicaStatus]:
        """Returns the status of each of these replicas."""
        return [replica_status(replica, loads.get(replica.name)) for replica in replicas]

    def edges(self, totals: Totals) -> list[admin_pb2.EdgeStatus]:
        """Returns the status of each edge."""
        return [self._edge(edge, totals) for edge in self._directory.pipeline.edges]

    def snapshot(self, loads: Mapping[str, Load], *, slowest: int) -> admin_pb2.WatchPipelineResponse:
        """Returns the status of the whole pipeline with its slowest requests."""
        totals = self.totals()
        return admin_pb2.WatchPipelineResponse(
            clock_s=self._clock(),
            pipeline=self.pipeline(totals),
            stages=self.stages(totals, loads),
            replicas=self.replicas(self._directory.replicas, loads),
            edges=self.edges(totals),
            slowest=[self.request(timeline) for timeline in self._inspector.slowest(slowest)],
        )

    def request(self, timeline: Timeline) -> admin_pb2.RequestStatus:
        """Returns the summary of a request."""
        return admin_pb2.RequestStatus(
            request_id=timeline.request_id,
            state=admin_pb2.RequestState.Value(f"REQUEST_STATE_{timeline.state.value}"),
            received_at_s=timeline.received_at_s,
            age_s=timeline.age_s,
            left_s=0.0 if timeline.state.is_over else max(0.0, timeline.timeout_s - timeline.age_s),
            priority=timeline.priority,
            outputs=timeline.outputs,
            pieces=sum(step.outputs for step in timeline.steps),
            size_bytes=self._inspector.kept_bytes(timeline.request_id),
            at_work=dict.fromkeys(step.stage for step in timeline.at_work),
            error=error_to_wire(timeline.error) if timeline.error is not None else None,
        )

    def request_in_full(self, request: InspectedRequest) -> admin_pb2.GetRequestResponse:
        """Returns a request with all of its steps and flows."""
        return admin_pb2.GetRequestResponse(
            request=self.request(request.timeline),
            planned_s=request.timeline.planned_s,
            steps=request.steps,
            flows=request.flows,
        )

    def _stage(self, stage: Stage, totals: Totals, loads: Mapping[str, Load]) -> admin_pb2.StageStatus:
        replicas = self._directory.replicas_of(stage.name)
        of_stage = [loads.get(replica.name, _NO_LOAD) for replica in replicas]
        done = totals.stages.get(stage.name, StageTotals())
        return admin_pb2.StageStatus(
            name=stage.name,
            engine=stage.engine,
            model=stage.model_name,
            replicas=len(replicas),
            ready=sum(replica.state is ReplicaState.READY for replica in replicas),
            running=sum(load.running for load in of_stage),
            queued=sum(load.queued for load in of_stage),
            work_s=max((load.work_s for load in of_stage), default=0.0),
            arena_used_bytes=sum(load.arena_used_bytes for load in of_stage),
            arena_size_bytes=sum(load.arena_size_bytes for load in of_stage),
            credit_bytes=sum(load.credit_bytes for load in of_stage),
            outputs=done.outputs,
            steps=done.steps,
            finished=done.finished,
            failed=done.failed,
        )

    def _edge(self, edge: Edge, totals: Totals) -> admin_pb2.EdgeStatus:
        carried = totals.edges.get(edge.name, EdgeTotals())
        described = describe_edge(edge, self._directory.links_of(edge))
        return admin_pb2.EdgeStatus(edge=described, chunks=carried.chunks, size_bytes=carried.size_bytes)


async def ask_loads(replicas: Sequence[Replica]) -> Mapping[str, Load]:
    """Returns the load of each replica that answers within a second, by name."""
    asked = [replica for replica in replicas if replica.state in _REPORTING_LOAD]
    answers = await asyncio.gather(*(_ask_load(replica) for replica in asked))
    return {replica.name: load for replica, load in zip(asked, answers, strict=True) if load is not None}


async def _ask_load(replica: Replica) -> Load | None:
    try:
        return await replica.client.load(timeout_s=_LOAD_TIMEOUT_S)
    except StagemeshError:
        return None


def replica_status(replica: Replica, load: Load | None = None) -> admin_pb2.ReplicaStatus:
    """Returns the status of a replica, without its load if that is None."""
    return admin_pb2.ReplicaStatus(
        name=replica.name,
        stage=replica.stage,
        endpoint=replica.endpoint,
        state=replica.state.wire,
        detail=replica.detail,
        planned=replica.running,
        load=load,
    )


def _requests_of(caller: CallerLoad) -> int:
    return caller.in_flight + caller.queued


def _caller(caller: CallerLoad) -> admin_pb2.CallerStatus:
    return admin_pb2.CallerStatus(
        caller=caller.caller,
        in_flight=caller.in_flight,
        in_flight_bytes=caller.in_flight_bytes,
        queued=caller.queued,
        queued_bytes=caller.queued_bytes,
    )
