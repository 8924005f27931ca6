"""Runs one request from its arrival to its end: admission, planning and execution."""

import asyncio
import logging
import time
from collections.abc import Callable
from copy import copy
from dataclasses import replace

from stagemesh.common.backoff import Backoff
from stagemesh.common.errors import StagemeshError
from stagemesh.orchestrator.admission import Admission, AdmissionRequest, TicketState
from stagemesh.orchestrator.planning.failover import Failover
from stagemesh.orchestrator.planning.planner import NotReadyYetError, Plan
from stagemesh.orchestrator.request.record import RequestRecord
from stagemesh.orchestrator.request.run import RequestRun
from stagemesh.orchestrator.request.validation import ValidRequest

_log = logging.getLogger(__name__)

STAGE_WAIT_S = 15.0
"""Maximum time in seconds that an admitted request waits for a stage without a ready replica.

Applies only if a replica of the stage may become ready soon. Otherwise the request fails at once.
"""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 0.25

# The reasons for which a stage rejects a step because it knows another or a later attempt of the request.
_OTHER_ATTEMPT_REASONS = ("STEP_EXISTS", "STALE_ATTEMPT")


class RequestLifecycle:
    """Runs one request from admission to its end.

    The constructor passes the request to admission. If `Admission.enter` raises an error, the constructor raises it and
    reserves nothing.
    """

    def __init__(
        self,
        record: RequestRecord,
        *,
        admission: Admission,
        admission_request: AdmissionRequest,
        failover: Failover,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._record = record
        self._admission, self._admission_request = admission, admission_request
        self._failover, self._clock = failover, clock
        self._admitted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._stopped: StagemeshError | None = None
        self._run: RequestRun | None = None
        self._has_run = False
        self._ticket = admission.enter(admission_request, self)

    @property
    def has_run(self) -> bool:
        """Whether the request was planned and its execution began.

        The record of a request is dropped at its end if this is False.
        """
        return self._has_run

    def stop(self, error: StagemeshError) -> None:
        """Stops the request, which then fails with `error`.

        Does nothing if the request has ended or was already stopped.
        """
        self._stopped = self._stopped or error
        if self._run is not None:
            self._run.stop(self._stopped)
        elif self._admission.withdraw(self._ticket):
            self.refused(self._stopped)

    async def run(
        self, request: ValidRequest, plan: Callable[[], Plan], made_bytes: Callable[[RequestRecord], int]
    ) -> StagemeshError | None:
        """Waits for admission and runs the request. Returns the error with which the request failed, or None.

        The admission ticket is released before the return. To free memory, neither this object nor the returned error
        then refers to the request's input or plan.
        """
        made: int | None = None
        try:
            await self._admitted
        except StagemeshError as exc:
            return exc.with_traceback(None)
        except asyncio.CancelledError:
            self._admission.withdraw(self._ticket)
            if self._ticket.state is TicketState.RUNNING:
                self._admission.release(self._ticket)
            raise
        try:
            error = await self._run_or_take_over(request, plan)
            made = made_bytes(self._record) if error is None else None
        except StagemeshError as exc:
            return copy(exc)
        else:
            return error
        finally:
            self._run = None
            self._admission.release(self._ticket, made_bytes=made)

    async def _run_or_take_over(self, request: ValidRequest, plan: Callable[[], Plan]) -> StagemeshError | None:
        """Runs the request.

        If a stage already knows attempts from another orchestrator, runs it again with higher attempts.
        """
        error = await self._run_when_ready(request, plan)
        latest = _attempt_elsewhere(error)
        journal = self._record.journal
        # If no caller follows or outputs exist, the other orchestrator has taken over from this orchestrator.
        if latest is None or self._record.has_outputs or journal.closed or not journal.readers:
            return error
        _log.warning(
            "request %s has attempt %d of another orchestrator; this one takes over", request.request_id, latest
        )
        request = replace(request, first_attempt=latest + 1)
        return await self._run_when_ready(request, plan)

    async def _run_when_ready(self, request: ValidRequest, plan: Callable[[], Plan]) -> StagemeshError | None:
        """Plans the request and runs it. Returns the error with which the request failed, or None.

        Waits at most STAGE_WAIT_S for a stage whose replica may become ready soon. After that, raises the error of
        `plan`.
        """
        ends_s = min(self._admission_request.deadline_s, self._clock() + STAGE_WAIT_S)
        backoff = Backoff(first_s=_FIRST_PAUSE_S, longest_s=_LONGEST_PAUSE_S)
        while self._stopped is None:
            try:
                planned = plan()
            except NotReadyYetError:
                if self._clock() >= ends_s:
                    raise
                await asyncio.sleep(backoff.next_s())
            else:
                return await self._run_planned(request, planned)
        return self._stopped

    async def _run_planned(self, request: ValidRequest, plan: Plan) -> StagemeshError | None:
        try:
            self._record.timeline.note_planned()
            if not self._has_run:
                self._record.add_admitted(request_id=request.request_id, seed=request.seed, replicas=plan.replicas)
            self._has_run = True
            timeout_s = self._admission_request.deadline_s - self._clock()
            self._run = RequestRun(request, plan, self._record, failover=self._failover, timeout_s=timeout_s)
            return await self._run.run()
        finally:
            plan.release()

    # -- called by the admission

    def queued(self, *, position: int, expected_wait_s: float) -> None:
        self._record.add_queued(
            request_id=self._admission_request.request_id, position=position, expected_wait_s=expected_wait_s
        )

    def admitted(self) -> None:
        self._admitted.set_result(None)

    def refused(self, error: StagemeshError) -> None:
        self._admitted.set_exception(error)


def _attempt_elsewhere(error: StagemeshError | None) -> int | None:
    """Returns the attempt number of another orchestrator that made a stage reject a step, or None if there is none."""
    if error is None or error.reason not in _OTHER_ATTEMPT_REASONS:
        return None
    attempt = error.metadata.get("attempt", "")
    return int(attempt) if attempt.isdecimal() else None
