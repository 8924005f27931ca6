"""One request from the door to its end: it waits to be admitted, is planned, and runs."""

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

EXPECT_S = 15.0
"""How long a request waits at its start for a stage whose only replica is just coming back."""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 0.25

# What a stage says that knows another step, or a later one, of a request.
_MADE_ELSEWHERE = ("STEP_EXISTS", "STALE_ATTEMPT")


class RequestLife:
    """Takes a place when it is made: raises what `Admission.enter` does, and nothing is held then."""

    def __init__(
        self,
        record: RequestRecord,
        *,
        admission: Admission,
        claim: AdmissionRequest,
        mover: Failover,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._record = record
        self._admission, self._claim, self._mover, self._clock = admission, claim, mover, clock
        self._admitted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._stopped: StagemeshError | None = None
        self._run: RequestRun | None = None
        self._has_begun = False
        self._ticket = admission.enter(claim, self)

    @property
    def has_begun(self) -> bool:
        """Whether the request got as far as to run; one that has not leaves no trace."""
        return self._has_begun

    def stop(self, error: StagemeshError) -> None:
        """Has the request end with this error; harmless when it has ended or is about to."""
        self._stopped = self._stopped or error
        if self._run is not None:
            self._run.stop(self._stopped)
        elif self._admission.withdraw(self._ticket):
            self.refused(self._stopped)

    async def run(
        self, request: ValidRequest, plan: Callable[[], Plan], made_bytes: Callable[[RequestRecord], int]
    ) -> StagemeshError | None:
        """Waits, runs the request and returns what it failed of; its places are free again then.

        Whoever keeps this or the error afterwards does not keep the request's input or plan by it.
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
            error = await self._run_above_others(request, plan)
            made = made_bytes(self._record) if error is None else None
        except StagemeshError as exc:
            return copy(exc)
        else:
            return error
        finally:
            self._run = None
            self._admission.release(self._ticket, made_bytes=made)

    async def _run_above_others(self, request: ValidRequest, plan: Callable[[], Plan]) -> StagemeshError | None:
        """Runs the request; once more above the attempts of another orchestrator, where stages know those."""
        error = await self._run_when_ready(request, plan)
        latest = _attempt_elsewhere(error)
        journal = self._record.journal
        # Who has no caller, or has begun to answer, is the one from whom another orchestrator has taken over.
        if latest is None or self._record.has_outputs or journal.closed or not journal.readers:
            return error
        _log.warning("attempt %d at request %s was made elsewhere; taking over", latest, request.request_id)
        request = replace(request, first_attempt=latest + 1)
        return await self._run_when_ready(request, plan)

    async def _run_when_ready(self, request: ValidRequest, plan: Callable[[], Plan]) -> StagemeshError | None:
        """Waits for a moment where a stage has no ready replica but expects one; raises what `plan` does after that."""
        ends_s = min(self._claim.deadline_s, self._clock() + EXPECT_S)
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
            if not self.has_begun:
                self._record.add_admitted(request_id=request.request_id, seed=request.seed, replicas=plan.replicas)
            timeout_s = self._claim.deadline_s - self._clock()
            self._has_begun = True
            self._run = RequestRun(
                request,
                plan,
                self._record,
                mover=self._mover,
                timeout_s=timeout_s,
                first_attempt=request.first_attempt,
            )
            return await self._run.run()
        finally:
            plan.release()

    # -- what admission tells

    def queued(self, *, position: int, expected_wait_s: float) -> None:
        """See Listener."""
        self._record.add_queued(request_id=self._claim.request_id, position=position, expected_wait_s=expected_wait_s)

    def admitted(self) -> None:
        """See Listener."""
        self._admitted.set_result(None)

    def refused(self, error: StagemeshError) -> None:
        """See Listener."""
        self._admitted.set_exception(error)


def _attempt_elsewhere(error: StagemeshError | None) -> int | None:
    """The attempt that stood in the way, where a stage refused a step for that."""
    if error is None or error.reason not in _MADE_ELSEWHERE:
        return None
    attempt = error.metadata.get("attempt", "")
    return int(attempt) if attempt.isdecimal() else None
