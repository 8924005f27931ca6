"""Builds the status messages of AdminService."""

import time
from collections.abc import Callable
from heapq import nlargest

from stagemesh.connectors.stream.wire import error_to_wire
from stagemesh.orchestrator.admin.directory import Directory
from stagemesh.orchestrator.admin.inspection import InspectedRequest, Inspector
from stagemesh.orchestrator.admission.snapshot import CallerLoad
from stagemesh.orchestrator.describe import describe_edge
from stagemesh.orchestrator.fleet.replica import Replica, ReplicaState
from stagemesh.orchestrator.orchestrator import Orchestrator
from stagemesh.orchestrator.request.timeline import EdgeTotals, RequestState, StageTotals, Timeline, Totals
from stagemesh.orchestrator.spec import Edge, Stage
from stagemesh.v1 import admin_pb2, stage_pb2

_NO_LOAD = stage_pb2.WatchLoadResponse()
_REPORTING_LOAD = frozenset({ReplicaState.READY, ReplicaState.DRAINING, ReplicaState.ASLEEP, ReplicaState.LOADING})
# An idle replica reports its load every 30 seconds.
_OVERDUE_S = 60.0
_MAX_CALLERS = 100


class Statuses:
    """Builds status messages of AdminService from the current state of the orchestrator."""

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
        """Returns totals over all requests, including the work of running requests so far."""
        running = self._orchestrator.requests.running
        return self._orchestrator.totals.together_with(known.record.timeline for known in running)

    def pipeline(self, totals: Totals) -> admin_pb2.PipelineStatus:
        """Returns the status of the pipeline as a whole, with its admission queue and the load of each caller."""
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

    def stages(self, totals: Totals) -> list[admin_pb2.StageStatus]:
        """Returns the status of each stage. Producers precede consumers."""
        return [self._stage(stage, totals) for stage in self._directory.pipeline.stages.values()]

    def edges(self, totals: Totals) -> list[admin_pb2.EdgeStatus]:
        return [self._edge(edge, totals) for edge in self._directory.pipeline.edges]

    def snapshot(self, *, slowest: int) -> admin_pb2.WatchPipelineResponse:
        """Returns the status of the pipeline, its stages, replicas and edges, and its slowest requests."""
        totals = self.totals()
        return admin_pb2.WatchPipelineResponse(
            clock_s=self._clock(),
            pipeline=self.pipeline(totals),
            stages=self.stages(totals),
            replicas=map(replica_status, self._directory.replicas),
            edges=self.edges(totals),
            slowest=[self.request(timeline) for timeline in self._inspector.slowest(slowest)],
        )

    def request(self, timeline: Timeline) -> admin_pb2.RequestStatus:
        """Returns the summary of a request. Omits the status of its steps and flows."""
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
        """Returns the summary of a request with the status of its steps and flows."""
        return admin_pb2.GetRequestResponse(
            request=self.request(request.timeline),
            planned_s=request.timeline.planned_s,
            steps=request.steps,
            flows=request.flows,
        )

    def _stage(self, stage: Stage, totals: Totals) -> admin_pb2.StageStatus:
        replicas = self._directory.replicas_of(stage.name)
        of_stage = [_load(replica) or _NO_LOAD for replica in replicas]
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


def replica_status(replica: Replica) -> admin_pb2.ReplicaStatus:
    """Returns the status of a replica.

    Includes the newest load report if the replica is loading, ready, draining or asleep.
    """
    load = _load(replica)
    overdue = load is not None and replica.report_age_s > _OVERDUE_S
    return admin_pb2.ReplicaStatus(
        name=replica.name,
        stage=replica.stage,
        endpoint=replica.endpoint,
        state=replica.state.value,
        detail=replica.detail or (f"last load report {replica.report_age_s:.0f} s ago" if overdue else ""),
        planned=replica.running,
        load=load,
    )


def _load(replica: Replica) -> stage_pb2.WatchLoadResponse | None:
    return replica.last_report if replica.state in _REPORTING_LOAD else None


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
