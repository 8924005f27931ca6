"""One request from the door to its end: it waits to be admitted, is planned, and runs."""

import asyncio
import time
from collections.abc import Callable
from copy import copy

from stagemesh.connectors.errors import CancelledRequestError, StagemeshError
from stagemesh.orchestrator.admission import Admission, Claim, TicketState
from stagemesh.orchestrator.planner import Plan
from stagemesh.orchestrator.record import RequestRecord
from stagemesh.orchestrator.request_run import RequestRun
from stagemesh.orchestrator.validation import ValidRequest


class RequestLife:
    """Takes a place when it is made: raises what `Admission.enter` does, and nothing is held then."""

    def __init__(
        self,
        record: RequestRecord,
        *,
        admission: Admission,
        claim: Claim,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._record = record
        self._admission, self._claim, self._clock = admission, claim, clock
        self._admitted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._stopped: CancelledRequestError | None = None
        self._run: RequestRun | None = None
        self._has_begun = False
        self._ticket = admission.enter(claim, self)

    @property
    def has_begun(self) -> bool:
        """Whether the request got as far as to run; one that has not leaves no trace."""
        return self._has_begun

    def stop(self, reason: str) -> None:
        """Has the request end with CancelledRequestError; harmless when it has ended or is about to."""
        if self._run is not None:
            self._run.stop(reason)
            return
        self._stopped = self._stopped or CancelledRequestError(reason)
        if self._admission.withdraw(self._ticket):
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
            error = self._stopped or await self._run_planned(request, plan())
            made = made_bytes(self._record) if error is None else None
        except StagemeshError as exc:
            return copy(exc)
        else:
            return error
        finally:
            self._run = None
            self._admission.release(self._ticket, made_bytes=made)

    async def _run_planned(self, request: ValidRequest, plan: Plan) -> StagemeshError | None:
        try:
            self._record.timeline.note_planned()
            self._record.add_admitted(request_id=request.request_id, seed=request.seed, replicas=plan.replicas)
            timeout_s = self._claim.deadline_s - self._clock()
            self._has_begun = True
            self._run = RequestRun(request, plan, self._record, timeout_s=timeout_s)
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
