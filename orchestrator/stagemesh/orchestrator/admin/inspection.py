"""Looks into requests: which there are, and how far one of them is."""

import asyncio
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from stagemesh.common.errors import NotFoundError, NotReadyError, StagemeshError
from stagemesh.orchestrator.admin.directory import Directory
from stagemesh.orchestrator.admin.wait_reasons import describe_wait
from stagemesh.orchestrator.orchestrator import Orchestrator
from stagemesh.orchestrator.request.timeline import RequestState, StepNotes, Timeline
from stagemesh.v1 import control_pb2

_ASK_S = 2.0
_UNDER_WAY = frozenset({RequestState.QUEUED, RequestState.RUNNING})


@dataclass(frozen=True)
class InspectedStep:
    """An attempt at a stage's share: what was noted of it, what its replica says, and what it waits for."""

    notes: StepNotes
    report: control_pb2.StepReport | None
    waits_for: str


@dataclass(frozen=True)
class InspectedFlow:
    """A flow of a request, seen from both ends."""

    edge: str
    producer: str
    consumer: str
    sent: control_pb2.FlowReport | None
    received: control_pb2.FlowReport | None


@dataclass(frozen=True)
class InspectedRequest:
    """A request in full."""

    timeline: Timeline
    steps: Sequence[InspectedStep]
    flows: Sequence[InspectedFlow]


class Inspector:
    """Looks; changes nothing, but by `cancel`."""

    def __init__(self, orchestrator: Orchestrator, directory: Directory) -> None:
        self._orchestrator = orchestrator
        self._directory = directory

    def requests(self, *, states: Collection[RequestState] = (), target: str = "") -> Iterator[tuple[int, Timeline]]:
        """Requests with their numbers, the oldest first: those in one of `states` (none: that wait or run), of which
        the target has or had a share. Raises NotFoundError (UNKNOWN_TARGET).
        """
        names = {replica.name for replica in self._directory.target(target)} if target else None
        wanted = states or _UNDER_WAY
        known = sorted((*self._orchestrator.history, *self._running()), key=lambda timeline: timeline.number)
        return (
            (timeline.number, timeline)
            for timeline in known
            if timeline.state in wanted and (names is None or _has_share(timeline, names))
        )

    def slowest(self, count: int) -> list[Timeline]:
        """Those that wait or run and were received first."""
        return sorted(self._running(), key=lambda timeline: timeline.number)[:count]

    def kept_bytes(self, request_id: str) -> int:
        """What the orchestrator keeps of a request's outputs."""
        known = self._orchestrator.requests.find(request_id)
        return known.record.size_bytes if known is not None else 0

    async def inspect(self, request_id: str) -> InspectedRequest:
        """One request; takes two seconds at most. Raises NotFoundError (UNKNOWN_REQUEST)."""
        timeline = self._find(request_id)
        # More may begin while the replicas are asked.
        noted = tuple(timeline.steps)
        reports = await asyncio.gather(*(self._ask(request_id, notes) for notes in noted))
        steps = [
            InspectedStep(notes, report, describe_wait(notes, report, unready=self._unready(timeline, notes)))
            for notes, report in zip(noted, reports, strict=True)
        ]
        return InspectedRequest(timeline, steps, _flows(steps))

    async def cancel(self, request_id: str) -> None:
        """Stops a request; raises NotFoundError (UNKNOWN_REQUEST) and NotReadyError (REQUEST_ENDED)."""
        timeline = self._find(request_id)
        if timeline.state.is_over:
            raise NotReadyError(
                f"request {request_id!r} has {_ENDINGS[timeline.state]} already, after {timeline.age_s:.1f} s; "
                "there is nothing to cancel",
                reason="REQUEST_ENDED",
                metadata={"request_id": request_id, "state": timeline.state.value},
            )
        await self._orchestrator.cancel(request_id)

    def _running(self) -> list[Timeline]:
        return [known.record.timeline for known in self._orchestrator.requests.running]

    def _find(self, request_id: str) -> Timeline:
        known = self._orchestrator.requests.find(request_id)
        timeline = known.record.timeline if known is not None else self._orchestrator.history.find(request_id)
        if timeline is None:
            raise NotFoundError(
                f"no request {request_id!r} here: it never was, it ended a while ago, or another orchestrator has it",
                reason="UNKNOWN_REQUEST",
                metadata={"request_id": request_id},
            )
        return timeline

    async def _ask(self, request_id: str, notes: StepNotes) -> control_pb2.StepReport | None:
        replica = self._directory.find(notes.replica)
        if replica is None or notes.accepted_s is None or notes.ended_s is not None:
            return None
        request = control_pb2.ListStepsRequest(request_id=request_id).SerializeToString()
        try:
            answer = await replica.client.control("ListSteps", request, timeout_s=_ASK_S)
        except StagemeshError:
            return None
        steps = control_pb2.ListStepsResponse.FromString(answer).steps
        return next((step for step in steps if step.attempt == notes.attempt), None)

    def _unready(self, timeline: Timeline, notes: StepNotes) -> list[str]:
        """The stages that it feeds and that have not accepted the request."""
        consumers = [edge.consumer for edge in self._directory.pipeline.outgoing(notes.stage)]
        latest = {step.stage: step for step in timeline.steps}
        return [name for name in dict.fromkeys(consumers) if name in latest and latest[name].accepted_s is None]


_ENDINGS = {
    RequestState.FINISHED: "finished",
    RequestState.FAILED: "failed",
    RequestState.CANCELLED: "been cancelled",
}


def _has_share(timeline: Timeline, names: Collection[str]) -> bool:
    over = timeline.state.is_over
    return any(step.replica in names and (over or step.ended_s is None) for step in timeline.steps)


def _flows(steps: Sequence[InspectedStep]) -> list[InspectedFlow]:
    reported = [(step.notes.replica, step.report) for step in steps if step.report is not None]
    sent = {(flow.edge, name, flow.peer): flow for name, report in reported for flow in report.outlets}
    received = {(flow.edge, flow.peer, name): flow for name, report in reported for flow in report.inlets}
    return [InspectedFlow(*key, sent.get(key), received.get(key)) for key in dict.fromkeys((*sent, *received))]
