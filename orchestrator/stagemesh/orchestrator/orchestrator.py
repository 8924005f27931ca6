"""The orchestrator without gRPC: admits, plans and runs requests over one pipeline's replicas."""

import asyncio
import itertools
import logging
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial

from stagemesh.common.errors import (
    CancelledRequestError,
    InternalError,
    NotFoundError,
    StagemeshError,
    UnavailableError,
)
from stagemesh.orchestrator.admission import Admission
from stagemesh.orchestrator.admission.sizes import made_bytes, to_admission_request
from stagemesh.orchestrator.fleet.fleet import Fleet
from stagemesh.orchestrator.planning.failover import Failover
from stagemesh.orchestrator.planning.planner import Plan, Planner
from stagemesh.orchestrator.planning.replica_choice import Choice
from stagemesh.orchestrator.planning.request_facts import facts_of
from stagemesh.orchestrator.request.callers import Callers
from stagemesh.orchestrator.request.history import History
from stagemesh.orchestrator.request.lifecycle import RequestLife
from stagemesh.orchestrator.request.record import RequestRecord
from stagemesh.orchestrator.request.registry import KnownRequest, RequestTable, fingerprint
from stagemesh.orchestrator.request.timeline import Timeline
from stagemesh.orchestrator.request.totals import Totals
from stagemesh.orchestrator.request.validation import ValidRequest, validate
from stagemesh.orchestrator.spec import Pipeline
from stagemesh.v1 import orchestrator_pb2

_log = logging.getLogger(__name__)

_TICK_S = 0.25
_RETRY_AFTER_S = 1.0


class Orchestrator:
    """Runs requests, within `async with orchestrator.running():`."""

    def __init__(
        self,
        pipeline: Pipeline,
        fleet: Fleet,
        *,
        max_request_s: float,
        drain_s: float,
        max_kept_state_bytes: int = 256 << 20,
        choice: Choice | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.pipeline = pipeline
        self.fleet = fleet
        self.admission = Admission(pipeline.limits, clock=clock)
        self._clock = clock
        self._planner = Planner(pipeline, fleet.book, choice=choice)
        self._mover = Failover(self._planner, max_kept_state_bytes=max_kept_state_bytes)
        self._requests = RequestTable()
        self.totals = Totals()
        """Of the requests that have ended."""
        self.history = History()
        self._numbers = itertools.count(1)
        self._max_request_s, self._drain_s = max_request_s, drain_s
        self._group: asyncio.TaskGroup | None = None

    @property
    def requests(self) -> RequestTable:
        """Those that run, and those that ended a moment ago."""
        return self._requests

    @asynccontextmanager
    async def running(self) -> AsyncGenerator[None]:
        """Takes requests. At the end those that wait are refused, and those that run have `drain_s` to finish; the rest
        is stopped, and every stage has let go.
        """
        async with AsyncExitStack() as stack:
            stack.callback(self._requests.clear)
            self._group = await stack.enter_async_context(asyncio.TaskGroup())
            stack.callback(self._group.create_task(self._watch_admission(), name="watch admission").cancel)
            stack.push_async_callback(self._drain)
            yield

    async def generate(
        self, request: orchestrator_pb2.GenerateRequest, *, time_left_s: float | None
    ) -> AsyncGenerator[bytes]:
        """A request's events from its start, each a serialized GenerateResponse. One of the same id and content is
        attached to, not run again.

        Iterate at once, within `aclosing`: a request whose last reader leaves is stopped, at once or after `linger_s`.
        """
        valid = validate(request, self.pipeline)
        content = fingerprint(request)
        seed = request.parameters.seed if request.parameters.HasField("seed") else None
        known = self._requests.find_same(valid.request_id, content, seed=seed)
        while known is not None and known.callers.forsaken:
            # It is on its way out, and nobody has been told how it ended.
            await asyncio.wait([known.ended])
            known = self._requests.find_same(valid.request_id, content, seed=seed)
        if known is None:
            known = self._start(valid, content, time_left_s=time_left_s)
        known.callers.expect(linger_s=request.linger_s)
        return known.record.follow(next_seqs=request.next_seqs, next_positions=request.next_positions)

    async def cancel(self, request_id: str, *, when_left: bool = False) -> None:
        """Stops a request and returns once every stage has let go, or has it stop `when_left` by its callers; raises
        NotFoundError (UNKNOWN_REQUEST).
        """
        known = self._requests.find(request_id)
        if known is None:
            raise NotFoundError(
                f"no request {request_id!r} here; it may have ended a while ago",
                reason="UNKNOWN_REQUEST",
                metadata={"request_id": request_id},
            )
        if when_left:
            known.callers.take_leave()
            return
        known.run.stop(CancelledRequestError("the request was cancelled by CancelRequest"))
        await asyncio.wait([known.ended])

    def _start(self, request: ValidRequest, content: bytes, *, time_left_s: float | None) -> KnownRequest:
        """Has a request admitted, now or later, and run; one that is refused at the door is not known afterwards."""
        if self._group is None:
            raise _not_running()
        timeout_s = min(self._max_request_s, time_left_s if time_left_s is not None else self._max_request_s)
        claim = to_admission_request(request, deadline_s=self._clock() + timeout_s)
        timeline = Timeline(
            request.request_id,
            number=next(self._numbers),
            priority=request.priority,
            outputs=request.outputs,
            timeout_s=timeout_s,
        )
        record = RequestRecord(timeline)
        life = RequestLife(record, admission=self.admission, claim=claim, mover=self._mover, clock=self._clock)
        record.limit_unread(self.pipeline.limits.max_unread_bytes, life.stop)
        callers = Callers(record.journal, forsake=lambda: life.stop(CancelledRequestError("the client went away")))
        known = KnownRequest(content, request.seed, life, record, callers, asyncio.get_running_loop().create_future())
        self._requests.add(request.request_id, known)
        self._group.create_task(self._run(request, known, life), name=request.request_id)
        return known

    def _plan(self, request: ValidRequest) -> Plan:
        route = self.pipeline.route(request.outputs, facts_of(request))
        self.fleet.links.check(route.edges)
        return self._planner.plan(route)

    async def _run(self, request: ValidRequest, known: KnownRequest, life: RequestLife) -> None:
        error: StagemeshError | None
        try:
            error = await life.run(request, partial(self._plan, request), partial(made_bytes, pipeline=self.pipeline))
        except Exception:  # noqa: BLE001
            _log.exception("request %s failed in a way that nobody foresaw", request.request_id)
            error = InternalError("the orchestrator failed; its log has the details")
        # Before the client hears of the end: its next request is to find all as if this one had never been.
        known.record.timeline.end(error)
        self.totals.add(known.record.timeline)
        self.history.add(known.record.timeline)
        known.callers.close()
        if life.has_begun and not known.callers.forsaken:
            self._requests.end(request.request_id)
        else:
            self._requests.forget(request.request_id)
        known.ended.set_result(None)
        if error is None:
            known.record.finish()
        else:
            known.record.close(error)

    async def _watch_admission(self) -> None:
        while True:
            await asyncio.sleep(_TICK_S)
            self.admission.tick()

    async def _drain(self) -> None:
        self._group = None
        self.admission.close(_not_running())
        running = [known.ended for known in self._requests.running]
        if not running:
            return
        _log.info("%d requests run still; they have %.0f s", len(running), self._drain_s)
        await asyncio.wait(running, timeout=self._drain_s)
        for known in self._requests.running:
            known.run.stop(_not_running("the orchestrator stopped before the request was done; try again"))
        await asyncio.wait(running)


def _not_running(what: str = "the orchestrator is starting or stopping; try again") -> UnavailableError:
    return UnavailableError(what, reason="NOT_RUNNING", retry_after_s=_RETRY_AFTER_S)
