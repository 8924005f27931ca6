"""Detects that all running steps of a choice wait for each other."""

import asyncio
import math
from collections.abc import Callable, Collection, Sequence

from stagemesh.orchestrator.request.recovery import Phase, StepState
from stagemesh.orchestrator.request.timeline import ask_for_report
from stagemesh.v1 import control_pb2

_REPORT_TIMEOUT_S = 2.0


class DeadlockWatch:
    """Watches the steps of one choice. A net below the recovery, after which no steps should wait for each other.

    Asks the replicas of the running steps for reports if no event has arrived for the longest `stall_s` of the stages,
    within which each engine must make progress. Watches nothing if a stage has no limit. The steps are in a
    deadlock if all of them wait for input or for a consumer in two reports in a row, and no chunk has moved between the
    reports. A replica that sends no reports, such as an external stage, may compute, and so prevents the detection.
    """

    def __init__(
        self, states: Collection[StepState], request_id: str, *, on_deadlock: Callable[[Sequence[StepState]], None]
    ) -> None:
        """`request_id` is the id of the choice. `on_deadlock` is called with the states of the running steps."""
        self._states, self._request_id, self._on_deadlock = states, request_id, on_deadlock
        self._events: Sequence[object] = ()
        self._chunks: Sequence[tuple[str, int]] | None = None
        """The chunks of all flows when all steps waited. None if they did not."""
        self._asking: asyncio.Task[None] | None = None
        limits_s = [state.step.stage.stall_s for state in states]
        self._stall_s = max(limits_s, default=math.inf) if all(limits_s) else math.inf
        self._timer = self._start_timer()

    def close(self) -> None:
        """Ends the watch. Idempotent."""
        if self._timer is not None:
            self._timer.cancel()
        if self._asking is not None:
            self._asking.cancel()

    def _start_timer(self) -> asyncio.TimerHandle | None:
        loop = asyncio.get_running_loop()
        return loop.call_later(self._stall_s, self._check) if self._stall_s < math.inf else None

    def _check(self) -> None:
        events = [(state.attempt, state.notes and state.notes.last_event_s) for state in self._states]
        if events == self._events:
            self._asking = asyncio.create_task(self._ask(), name=f"reports of {self._request_id}")
        else:
            self._events, self._chunks = events, None
        self._timer = self._start_timer()

    async def _ask(self) -> None:
        running = [state for state in self._states if state.phase is not Phase.FINISHED]
        former, self._chunks = self._chunks, None
        if any(state.phase is not Phase.RUNNING for state in running):
            return
        asked = [
            ask_for_report(state.replica, self._request_id, attempt=state.attempt, timeout_s=_REPORT_TIMEOUT_S)
            for state in running
        ]
        reports = await asyncio.gather(*asked)
        if not all(report is not None and _waits_for_peer(report) for report in reports):
            return
        flows = [flow for report in reports if report for flow in (*report.inlets, *report.outlets)]
        self._chunks = [(flow.edge, flow.chunks) for flow in flows]
        if self._chunks == former:
            self._on_deadlock(running)


def _waits_for_peer(report: control_pb2.StepReport) -> bool:
    """Returns whether a step waits for input, for a consumer's credit, or for the delivery of its last chunks."""
    return report.waits_for_input or any(
        flow.wanted_bytes or (flow.ended and flow.waiting_chunks) for flow in report.outlets
    )
