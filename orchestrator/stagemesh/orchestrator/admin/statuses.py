"""Builds the messages of AdminService that describe the pipeline, its stages, replicas and edges."""

import time
from heapq import nlargest

from stagemesh.orchestrator.admin.directory import Directory
from stagemesh.orchestrator.admin.inspection import Inspector
from stagemesh.orchestrator.admission.queue import Caller
from stagemesh.orchestrator.describe import describe_edge, to_message
from stagemesh.orchestrator.fleet.replica import Replica, ReplicaState
from stagemesh.orchestrator.orchestrator import Orchestrator
from stagemesh.orchestrator.request.history import EdgeTotals, StageTotals, Totals
from stagemesh.orchestrator.request.timeline import RequestState
from stagemesh.orchestrator.spec import Edge, Stage
from stagemesh.v1 import admin_pb2, stage_pb2

_NO_LOAD = stage_pb2.WatchLoadResponse()
# The fields of load reports that are added up over the replicas of a stage.
_SUMMED = ("running", "queued", "arena_used_bytes", "arena_size_bytes", "credit_bytes")
_REPORTING_LOAD = frozenset({ReplicaState.READY, ReplicaState.DRAINING, ReplicaState.ASLEEP, ReplicaState.LOADING})
# An idle replica reports its load every 30 seconds.
_OVERDUE_S = 60.0
_MAX_CALLERS = 100


class Statuses:
    """Builds status messages of AdminService from the current state of the orchestrator."""

    def __init__(self, orchestrator: Orchestrator, directory: Directory, inspector: Inspector) -> None:
        self._orchestrator = orchestrator
        self._directory = directory
        self._inspector = inspector
        self._began_s = time.monotonic()

    def totals(self) -> Totals:
        """Returns totals over all requests, including the work of running requests so far."""
        running = self._orchestrator.requests.running
        return self._orchestrator.totals.together_with(known.record.timeline for known in running)

    def pipeline(self, totals: Totals) -> admin_pb2.PipelineStatus:
        """Returns the status of the pipeline as a whole, with its admission queue and the load of each caller."""
        pipeline, admission = self._directory.pipeline, self._orchestrator.admission
        return admin_pb2.PipelineStatus(
            name=pipeline.name,
            generation=pipeline.generation,
            ready=self._directory.ready,
            uptime_s=time.monotonic() - self._began_s,
            queued=admission.usage.waiting.requests,
            in_flight=admission.usage.running.requests,
            max_in_flight=pipeline.limits.max_in_flight,
            finished=totals.requests[RequestState.FINISHED],
            failed=totals.requests[RequestState.FAILED],
            cancelled=totals.requests[RequestState.CANCELLED],
            in_flight_bytes=admission.usage.running.size_bytes,
            queued_bytes=admission.usage.waiting.size_bytes,
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
            clock_s=time.monotonic(),
            pipeline=self.pipeline(totals),
            stages=self.stages(totals),
            replicas=map(replica_status, self._directory.replicas),
            edges=self.edges(totals),
            slowest=self._inspector.slowest(slowest),
        )

    def _stage(self, stage: Stage, totals: Totals) -> admin_pb2.StageStatus:
        replicas = self._directory.replicas_of(stage.name)
        loads = [_load(replica) or _NO_LOAD for replica in replicas]
        return to_message(
            admin_pb2.StageStatus,
            totals.stages.get(stage.name, StageTotals()),
            name=stage.name,
            engine=stage.engine,
            model=stage.model_name,
            replicas=len(replicas),
            ready=sum(replica.state is ReplicaState.READY for replica in replicas),
            work_s=max((load.work_s for load in loads), default=0.0),
            **{name: sum(getattr(load, name) for load in loads) for name in _SUMMED},
        )

    def _edge(self, edge: Edge, totals: Totals) -> admin_pb2.EdgeStatus:
        described = describe_edge(edge, self._directory.links_of(edge))
        return to_message(admin_pb2.EdgeStatus, totals.edges.get(edge.name, EdgeTotals()), edge=described)


def replica_status(replica: Replica) -> admin_pb2.ReplicaStatus:
    """Returns the status of a replica.

    Includes the newest load report if the replica is loading, ready, draining or asleep.
    """
    load = _load(replica)
    overdue = load is not None and replica.report_age_s > _OVERDUE_S
    return to_message(
        admin_pb2.ReplicaStatus,
        replica,
        state=replica.state.wire,
        detail=replica.detail or (f"last load report {replica.report_age_s:.0f} s ago" if overdue else ""),
        planned=replica.running,
        load=load,
    )


def _load(replica: Replica) -> stage_pb2.WatchLoadResponse | None:
    return replica.last_report if replica.state in _REPORTING_LOAD else None


def _requests_of(caller: Caller) -> int:
    return caller.running.requests + caller.waiting.requests


def _caller(caller: Caller) -> admin_pb2.CallerStatus:
    return admin_pb2.CallerStatus(
        caller=caller.name,
        in_flight=caller.running.requests,
        in_flight_bytes=caller.running.size_bytes,
        queued=caller.waiting.requests,
        queued_bytes=caller.waiting.size_bytes,
    )
