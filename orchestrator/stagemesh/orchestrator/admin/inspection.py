"""Describes the pipeline and its requests in messages of AdminService, and cancels requests."""

import asyncio
import time
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from heapq import nlargest, nsmallest
from operator import attrgetter

from stagemesh.common.errors import NotReadyError
from stagemesh.common.process.stage_process import ReplicaState
from stagemesh.common.requests.request_checks import choice_id
from stagemesh.common.wire.encoding import to_message
from stagemesh.orchestrator.admin.directory import Directory
from stagemesh.orchestrator.admission.queue import Loads
from stagemesh.orchestrator.descriptions import describe_edge, replica_status
from stagemesh.orchestrator.fleet.replica import reported_load
from stagemesh.orchestrator.metrics.scaling import StageSignals, signals_by_stage
from stagemesh.orchestrator.orchestrator import Orchestrator
from stagemesh.orchestrator.request.lifecycle import unknown_request
from stagemesh.orchestrator.request.timeline import (
    EdgeTotals,
    RequestState,
    StageTotals,
    StepNotes,
    Timeline,
    Totals,
    ask_for_report,
    describe_wait,
)
from stagemesh.pipeline import Edge, Stage
from stagemesh.rpc.error_mapping import error_to_wire
from stagemesh.v1 import admin_pb2, control_pb2, stage_pb2

_REPORT_TIMEOUT_S = 2.0
_UNDER_WAY = frozenset({RequestState.QUEUED, RequestState.RUNNING})
_ENDINGS = {RequestState.FINISHED: "finished", RequestState.FAILED: "failed", RequestState.CANCELLED: "been cancelled"}
_NO_LOAD = stage_pb2.WatchLoadResponse()
# The fields of load reports that are added up over the replicas of a stage.
_SUMMED = ("running", "queued", "arena_used_bytes", "arena_size_bytes", "credit_bytes")
_MAX_CALLERS = 100


class Inspector:
    """Reports the status of the pipeline and its requests in messages of AdminService, and cancels requests."""

    def __init__(self, orchestrator: Orchestrator, directory: Directory) -> None:
        self._orchestrator = orchestrator
        self._directory = directory
        self._began_s = time.monotonic()

    def totals(self) -> Totals:
        """Returns the totals over all requests, by state, stage and edge. Includes requests that are still running."""
        return self._orchestrator.totals.together_with(self._running())

    def pipeline(self, totals: Totals) -> admin_pb2.PipelineStatus:
        """Returns the status of the pipeline as a whole, including its admission queue.

        The status also contains the load of at most 100 callers: the callers with the most requests.
        """
        pipeline, admission = self._directory.pipeline, self._orchestrator.admission
        busiest = nlargest(
            _MAX_CALLERS, admission.callers, key=lambda caller: caller.running.requests + caller.waiting.requests
        )
        return to_message(
            admin_pb2.PipelineStatus,
            admission,
            name=pipeline.name,
            generation=pipeline.generation,
            ready=self._orchestrator.fleet.ready,
            uptime_s=time.monotonic() - self._began_s,
            **_loads(admission.loads),
            max_in_flight=pipeline.limits.max_in_flight,
            sessions=len(self._orchestrator.sessions),
            max_sessions=pipeline.limits.max_sessions,
            finished=totals.requests[RequestState.FINISHED],
            failed=totals.requests[RequestState.FAILED],
            cancelled=totals.requests[RequestState.CANCELLED],
            callers=[admin_pb2.CallerStatus(caller=caller.name, **_loads(caller)) for caller in busiest],
        )

    def stages(self, totals: Totals) -> list[admin_pb2.StageStatus]:
        """Returns the status of each stage. Producers precede consumers."""
        signals = signals_by_stage(self._orchestrator)
        return [self._stage(stage, totals, signals[stage.name]) for stage in self._directory.pipeline.stages.values()]

    def edges(self, totals: Totals) -> list[admin_pb2.EdgeStatus]:
        pipeline = self._directory.pipeline
        return [self._edge(edge, totals) for edge in (*pipeline.edges, *pipeline.input_edges)]

    def snapshot(self, *, slowest: int) -> admin_pb2.WatchPipelineResponse:
        """Returns the status of the pipeline, its stages, its replicas, its edges and its slowest requests.

        The slowest requests are the oldest requests that have not ended. `slowest` is the maximum number of these
        requests.
        """
        totals = self.totals()
        return admin_pb2.WatchPipelineResponse(
            clock_s=time.monotonic(),
            pipeline=self.pipeline(totals),
            stages=self.stages(totals),
            replicas=map(replica_status, self._directory.replicas),
            edges=self.edges(totals),
            slowest=map(self._summary, nsmallest(slowest, self._running(), key=attrgetter("number"))),
        )

    def requests(
        self, *, states: Collection[RequestState] = (), target: str = ""
    ) -> Iterator[tuple[int, admin_pb2.RequestStatus]]:
        """Returns pairs of a request's position in the list and its summary: the oldest request first, or the newest if
        all states are those of ended requests.

        - `states` selects requests in one of these states. If it is empty, waiting and running requests are selected.
        - `target` is the name of a replica or stage. Requests with a step on this replica or stage are selected. If it
          is empty, all requests are selected.

        Raises NotFoundError (UNKNOWN_TARGET) if the target does not exist.
        """
        names = {replica.name for replica in self._directory.target(target)} if target else None
        wanted = frozenset(states or _UNDER_WAY)
        sign = 1 if wanted & _UNDER_WAY else -1
        known = sorted((*self._orchestrator.history, *self._running()), key=lambda timeline: sign * timeline.number)
        return (
            (sign * timeline.number, self._summary(timeline))
            for timeline in known
            if timeline.state in wanted and (names is None or _has_step_on(timeline, names))
        )

    async def inspect(self, request_id: str) -> admin_pb2.GetRequestResponse:
        """Returns the summary of one request with the status of its steps and flows.

        Waits at most 2 seconds for the reports of the replicas that run the steps. Omits reports that do not arrive in
        time.

        Raises NotFoundError (UNKNOWN_REQUEST) if the request is unknown.
        """
        timeline = self._find(request_id)
        # Further steps may start while replicas are asked.
        noted = tuple(timeline.steps)
        ids = [choice_id(request_id, notes.index, caller=timeline.caller) for notes in noted]
        reports = await asyncio.gather(*map(self._report, ids, noted))
        pairs = list(zip(noted, reports, strict=True))
        steps = [
            _step_status(notes, report, describe_wait(notes, report, unready=self._unready(timeline, notes)))
            for notes, report in pairs
        ]
        return admin_pb2.GetRequestResponse(
            request=self._summary(timeline), planned_s=timeline.planned_s, steps=steps, flows=_flow_statuses(pairs)
        )

    async def cancel(self, request_id: str) -> None:
        """Cancels a request, and waits until every stage has released the request.

        Raises NotFoundError (UNKNOWN_REQUEST) if the request is unknown, and NotReadyError (REQUEST_ENDED) if the
        request has already ended.
        """
        timeline = self._find(request_id)
        if timeline.state.is_over:
            raise NotReadyError(
                f"request {request_id!r} has already {_ENDINGS[timeline.state]} after {timeline.age_s:.1f} s and can "
                "no longer be cancelled",
                reason="REQUEST_ENDED",
                metadata={"request_id": request_id, "state": timeline.state.value},
            )
        await self._orchestrator.cancel(request_id)

    def _stage(self, stage: Stage, totals: Totals, signals: StageSignals) -> admin_pb2.StageStatus:
        replicas = self._directory.replicas_of(stage.name)
        loads = [reported_load(replica) or _NO_LOAD for replica in replicas]
        return to_message(
            admin_pb2.StageStatus,
            totals.stages.get(stage.name, StageTotals()),
            name=stage.name,
            engine=stage.engine,
            model=stage.model_name,
            replicas=len(replicas),
            ready=sum(replica.state is ReplicaState.READY for replica in replicas),
            work_s=max((load.work_s for load in loads), default=0.0),
            queued_s=signals.queued_s,
            playout_at_risk=signals.playout_at_risk,
            generations=Counter(each.generation for each in replicas if each.state is ReplicaState.READY),
            **{name: sum(getattr(load, name) for load in loads) for name in _SUMMED},
        )

    def _edge(self, edge: Edge, totals: Totals) -> admin_pb2.EdgeStatus:
        links = () if edge.is_input else self._orchestrator.fleet.edge_connectors.links_of(edge)
        return to_message(
            admin_pb2.EdgeStatus,
            totals.edges.get(edge.name, EdgeTotals()),
            edge=describe_edge(edge, links),
            sent=self._sent(edge),
        )

    def _sent(self, edge: Edge) -> stage_pb2.SentChunks | None:
        """Returns the chunks that the present replicas, or this orchestrator, have sent on an edge.

        Returns None if none of them counts its chunks, or has sent one.
        """
        if edge.is_input:
            meters = [meter for name, _, meter in self._orchestrator.input_planes.meters if name == edge.name]
            counts = [(meter.transfer_s.count, meter.size_bytes) for meter in meters]
        else:
            loads = [reported_load(replica) or _NO_LOAD for replica in self._directory.replicas_of(edge.producer)]
            counts = [(sent.chunks, sent.size_bytes) for load in loads for sent in load.sent if sent.edge == edge.name]
        if not counts:
            return None
        chunks, sizes = zip(*counts, strict=True)
        return stage_pb2.SentChunks(edge=edge.name, chunks=sum(chunks), size_bytes=sum(sizes))

    def _running(self) -> list[Timeline]:
        return [known.record.timeline for known in self._orchestrator.requests.running]

    def _summary(self, timeline: Timeline) -> admin_pb2.RequestStatus:
        """Returns the status of a request as a whole. Omits the status of the request's steps and flows."""
        known = self._orchestrator.requests.find(timeline.request_id)
        return _summary(timeline, size_bytes=known.record.size_bytes if known is not None else 0)

    def _find(self, request_id: str) -> Timeline:
        known = self._orchestrator.requests.find(request_id)
        timeline = known.record.timeline if known is not None else self._orchestrator.history.find(request_id)
        if timeline is None:
            raise unknown_request(request_id)
        return timeline

    async def _report(self, request_id: str, notes: StepNotes) -> control_pb2.StepReport | None:
        replica = self._directory.find(notes.replica)
        if replica is None or notes.accepted_s is None or notes.ended_s is not None:
            return None
        return await ask_for_report(replica, request_id, attempt=notes.attempt, timeout_s=_REPORT_TIMEOUT_S)

    def _unready(self, timeline: Timeline, notes: StepNotes) -> list[str]:
        """Returns the names of the stages that consume a step's output but have not accepted the request yet.

        `notes` is the step's timeline entry. Omits stages for which the request has no step.
        """
        consumers = [edge.consumer for edge in self._directory.pipeline.outgoing(notes.stage)]
        latest = {step.stage: step for step in timeline.steps if step.index == notes.index}
        return [name for name in dict.fromkeys(consumers) if name in latest and latest[name].accepted_s is None]


def _summary(timeline: Timeline, *, size_bytes: int) -> admin_pb2.RequestStatus:
    return to_message(
        admin_pb2.RequestStatus,
        timeline,
        state=f"REQUEST_STATE_{timeline.state.value}",
        remaining_s=0.0 if timeline.state.is_over else max(0.0, timeline.timeout_s - timeline.age_s),
        output_parts=sum(step.outputs for step in timeline.steps),
        size_bytes=size_bytes,
        running_stages=dict.fromkeys(step.stage for step in timeline.at_work),
        error=error_to_wire(timeline.error) if timeline.error is not None else None,
    )


def describe_ended(timeline: Timeline) -> admin_pb2.GetRequestResponse:
    """Returns the summary of a request with the status of its steps, without asking any replica."""
    return admin_pb2.GetRequestResponse(
        request=_summary(timeline, size_bytes=0),
        planned_s=timeline.planned_s,
        steps=[_step_status(notes, None, "") for notes in timeline.steps],
    )


def _has_step_on(timeline: Timeline, names: Collection[str]) -> bool:
    over = timeline.state.is_over
    return any(step.replica in names and (over or step.ended_s is None) for step in timeline.steps)


def _step_status(notes: StepNotes, report: control_pb2.StepReport | None, waits_for: str) -> admin_pb2.StepStatus:
    return to_message(
        admin_pb2.StepStatus,
        notes,
        waits_for=waits_for,
        report=report,
        error=error_to_wire(notes.error) if notes.error is not None else None,
        rebindings=[to_message(admin_pb2.StepRebinding, each) for each in notes.rebindings],
    )


def _flow_statuses(steps: Sequence[tuple[StepNotes, control_pb2.StepReport | None]]) -> list[admin_pb2.FlowStatus]:
    reported = [(notes.index, notes.replica, report) for notes, report in steps if report is not None]
    sent = {(index, flow.edge, name, flow.peer): flow for index, name, report in reported for flow in report.outlets}
    received = {(index, flow.edge, flow.peer, name): flow for index, name, report in reported for flow in report.inlets}
    keys = dict.fromkeys((*sent, *received))
    return [
        admin_pb2.FlowStatus(
            index=key[0], edge=key[1], producer=key[2], consumer=key[3], sent=sent.get(key), received=received.get(key)
        )
        for key in keys
    ]


def _loads(loads: Loads) -> dict[str, int]:
    """Returns the fields of a status message for the number and the bytes of running and of waiting requests."""
    return {
        "in_flight": loads.running.choices,
        "in_flight_bytes": loads.running.size_bytes,
        "queued": loads.waiting.requests,
        "queued_bytes": loads.waiting.size_bytes,
    }
