"""Runs each request from its arrival to its end, and finds requests by id.

`RequestLifecycle` represents one request: its admission, planning and execution. `RequestRegistry` contains the running
requests, and the recently ended requests to which a caller can still attach.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import replace
from typing import NamedTuple, TypeAlias

from stagemesh.common.backoff import Backoff
from stagemesh.common.errors import DeadlineError, ExistsError, NotFoundError, StagemeshError
from stagemesh.common.requests.request_checks import ATTEMPTS_A_CALL
from stagemesh.common.wire.encoding import digest_of, without_fields
from stagemesh.orchestrator.admission.admission import Admission
from stagemesh.orchestrator.admission.queue import AdmissionRequest, EntryState
from stagemesh.orchestrator.planning.planner import NotReadyYetError, Plan
from stagemesh.orchestrator.planning.replacement_replicas import ReplacementReplicas
from stagemesh.orchestrator.request.output_record import MAX_ATTEMPT, TAKEN_OVER_REASONS, RequestRecord
from stagemesh.orchestrator.request.run import RequestRun
from stagemesh.orchestrator.request.streamed_input import InputPlanes
from stagemesh.orchestrator.request.validation import ValidRequest
from stagemesh.pipeline.conditions import Facts
from stagemesh.v1 import orchestrator_pb2

_log = logging.getLogger(__name__)

STAGE_WAIT_S = 15.0
"""Maximum time that an admitted request waits for a stage without a ready replica, in seconds.

This applies only if a replica of the stage may become ready soon. Otherwise the request fails immediately.
"""
_PAUSES = Backoff(first_s=0.05, longest_s=0.25)
KEEP_S = 30.0
KEEP_BYTES = 64 << 20

PlanRuns: TypeAlias = Callable[[int], Sequence[Plan]]
"""A function that plans this number of runs of a request. Raises an error if it cannot plan one of them."""

_CHANGING_FIELDS = (
    "next_positions",
    "linger_s",
    "earlier_calls",
    "generation",
    "preferred_replicas",
    "admitted_call",
    "parameters.seed",
)
"""The fields of a request that may differ between its calls."""

MOST_RESTARTS = ATTEMPTS_A_CALL // 2
"""More than the number of attempts of a stage in one run."""
# The reasons for which a choice may run a second time. An upgrade may have replaced the generation in which it began.
_RUN_AGAIN_REASONS = (*TAKEN_OVER_REASONS, "GENERATION_ENDED")


class RequestLifecycle:
    """Runs one request with all of its choices from admission to its end.

    The constructor passes the request to admission. If admission rejects the request, the constructor raises the error
    of `Admission.enter` and reserves nothing.
    """

    def __init__(
        self,
        record: RequestRecord,
        *,
        fingerprint: bytes,
        seed: int,
        admission: Admission,
        admission_request: AdmissionRequest,
        replacements: ReplacementReplicas,
        facts: Facts,
        input_planes: InputPlanes,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.record = record
        self.facts = facts
        """The properties of the request on which its route depends."""
        self.fingerprint, self.seed = fingerprint, seed
        """The digest of the request's content (see the function `fingerprint`), and the request's random seed."""
        self.has_run = False
        """Whether the request was planned and has started to run.

        If this is False when the request ends, the record of the request is dropped.
        """
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """A future that is done when every stage has released the request.

        Several tasks wait for this future. They must use `asyncio.wait`, because it does not cancel the future if the
        waiting task is cancelled.
        """
        self._admission, self._admission_request = admission, admission_request
        self._replacements, self._input_planes, self._clock = replacements, input_planes, clock
        self._admitted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._stopped: StagemeshError | None = None
        self._runs: tuple[RequestRun, ...] = ()
        self._entry = admission.enter(admission_request, self)

    def stop(self, error: StagemeshError) -> None:
        """Stops the request. The request then fails with `error`.

        Does nothing if the request has ended or was already stopped.
        """
        self._stopped = self._stopped or error
        for run in self._runs:
            run.stop(self._stopped)
        if not self._runs and self._admission.withdraw(self._entry):
            self.refused(self._stopped)

    @property
    def caller(self) -> str:
        """The name of the caller who started the request, or empty if it has no name."""
        return self._admission_request.caller

    async def run(
        self, request: ValidRequest, plan: PlanRuns, made_bytes: Callable[[RequestRecord], int]
    ) -> StagemeshError | None:
        """Waits for admission and runs the request. Returns the error of a failed request, or None if it succeeded.

        `made_bytes` returns the number of bytes that the outputs and chunks of the request occupied.

        Releases the admission entry before returning. Afterwards, neither this object nor the returned error refers to
        the request's input or plan, so that their memory is freed.
        """
        made: int | None = None
        try:
            await self._admitted
            error = await self._run_choices(request, plan)
            made = made_bytes(self.record) if error is None else None
        except StagemeshError as exc:
            # A traceback refers to the frames that the error passed, and these frames refer to the request.
            return copy(exc.with_traceback(None))
        else:
            return error
        finally:
            self._runs = ()
            if request.stream is not None:
                request.stream.close()
            self._admission.withdraw(self._entry)
            if self._entry.state is EntryState.RUNNING:
                self._admission.release(self._entry, made_bytes=made)

    async def _run_choices(self, request: ValidRequest, plan: PlanRuns) -> StagemeshError | None:
        """Plans all choices of the request and runs them at the same time.

        The first error of a choice stops the other choices. Returns this error, or None if all choices succeeded.
        """
        plans = await self._plan_when_ready(plan, request.choices)
        if not plans:
            return self._stopped
        self._note_admitted(request, plans)
        if len(plans) == 1:
            if request.continues and dict(plans[0].replicas) == dict(request.preferred):
                return await self._continue_or_run(request, plans[0], plan)
            return await self._run_or_take_over(replace(request, running_attempt=None), plans[0], plan)
        async with asyncio.TaskGroup() as group:
            runs = [
                group.create_task(self._run_choice(replace(request, index=index), planned, plan))
                for index, planned in enumerate(plans)
            ]
        return self._stopped if any(run.result() for run in runs) else None

    async def _continue_or_run(self, request: ValidRequest, planned: Plan, plan: PlanRuns) -> StagemeshError | None:
        """Continues the only choice of a request with steps that another orchestrator has started.

        The replicas of `planned` replay the events of these steps, and lost steps restart. If this fails, runs the
        choice again: the other orchestrator has cancelled or restarted a step. Returns the error of a failed choice, or
        None if it succeeded.
        """
        # A failed choice runs again, so that nothing has failed yet.
        error = await self._run_planned(request, planned, failed=lambda _: None)
        if error is None or isinstance(error, DeadlineError) or self._stopped is not None or self.record.journal.closed:
            return error
        _log.warning("request %s cannot continue with its running steps: %s", request.choice_id, error)
        plans = await self._plan_when_ready(plan, 1)
        if not plans:
            return self._stopped
        again = replace(request, running_attempt=None, first_attempt=request.first_attempt + MOST_RESTARTS)
        return await self._run_or_take_over(again, plans[0], plan)

    async def _run_choice(self, request: ValidRequest, planned: Plan, plan: PlanRuns) -> StagemeshError | None:
        """Runs one of several choices. Stops the request if the choice fails. Returns the error, or None."""
        try:
            error = await self._run_or_take_over(request, planned, plan)
        except StagemeshError as exc:
            error = copy(exc)
        if error is not None:
            self.stop(error)
        return error

    async def _run_or_take_over(self, request: ValidRequest, planned: Plan, plan: PlanRuns) -> StagemeshError | None:
        """Runs one choice of the request. Returns the error of a failed choice, or None if it succeeded.

        If a stage rejects the choice because of an attempt of another orchestrator, or if the choice's generation ends,
        plans and runs it a second time with higher attempt numbers. Does not do so if the choice has outputs already or
        the request has no caller.
        """
        error = await self._run_planned(request, planned)
        latest = latest_attempt(error)
        journal = self.record.journal
        # If no caller follows or outputs exist, another orchestrator has taken over from this orchestrator. Outputs of
        # two generations do not fit together.
        if latest is None or self.record.has_outputs(request.index) or journal.closed or not journal.readers:
            return error
        _log.warning("request %s runs again with attempts above %d: %s", request.choice_id, latest, error)
        plans = await self._plan_when_ready(plan, 1)
        if not plans:
            return self._stopped
        # The caller knows the generation of its choices from the first plan.
        if request.choices == 1 and plans[0].generation != planned.generation:
            self._note_admitted(request, plans)
        # The other orchestrator may have restarted further stages, which have later attempts than this one.
        return await self._run_planned(replace(request, first_attempt=latest + MOST_RESTARTS), plans[0])

    async def _plan_when_ready(self, plan: PlanRuns, runs: int) -> Sequence[Plan]:
        """Plans this number of runs of the request. Returns no plans if the request was stopped.

        If a stage has no ready replica but may have one soon, waits at most STAGE_WAIT_S seconds for the replica. After
        that, raises the error of `plan`.
        """
        ends_s = min(self._admission_request.deadline_s, self._clock() + STAGE_WAIT_S)
        retries = _PAUSES.retries()
        while self._stopped is None:
            try:
                return plan(runs)
            except NotReadyYetError:
                if self._clock() >= ends_s:
                    raise
                await retries.sleep()
        return ()

    def _note_admitted(self, request: ValidRequest, plans: Sequence[Plan]) -> None:
        self.has_run = True
        self.record.timeline.note_planned()
        choices = [orchestrator_pb2.AdmittedChoice(replicas=plan.replicas) for plan in plans]
        admitted = orchestrator_pb2.RequestAdmitted(
            request_id=request.request_id, seed=request.seed, choices=choices, generation=plans[0].generation
        )
        self.record.add(orchestrator_pb2.GenerateResponse(admitted=admitted))

    def _note_failed(self, error: StagemeshError) -> None:
        """Stops the other choices at once, unless the choice that failed may run a second time."""
        if latest_attempt(error) is None:
            self.stop(error)

    async def _run_planned(
        self, request: ValidRequest, plan: Plan, *, failed: Callable[[StagemeshError], None] | None = None
    ) -> StagemeshError | None:
        try:
            timeout_s = self._admission_request.deadline_s - self._clock()
            run = RequestRun(
                request,
                plan,
                self.record,
                replacements=self._replacements,
                timeout_s=timeout_s,
                failed=failed or self._note_failed,
                input_planes=self._input_planes,
            )
            self._runs += (run,)
            if self._stopped is not None:
                run.stop(self._stopped)
            return await run.run()
        finally:
            plan.release()

    # -- called by the admission

    def queued(self, *, position: int, expected_wait_s: float) -> None:
        queued = orchestrator_pb2.RequestQueued(
            request_id=self._admission_request.request_id, position=position, expected_wait_s=expected_wait_s
        )
        self.record.add(orchestrator_pb2.GenerateResponse(queued=queued))

    def admitted(self) -> None:
        self._admitted.set_result(None)

    def refused(self, error: StagemeshError) -> None:
        self._admitted.set_exception(error)


class _Retention(NamedTuple):
    size_bytes: int
    timer: asyncio.TimerHandle


class RequestRegistry:
    """An index of requests by id. Contains the running requests, and recently ended requests.

    An ended request is dropped after `keep_s` seconds. The oldest ended requests are dropped earlier if the records of
    all ended requests together exceed `keep_bytes` bytes.
    """

    def __init__(self, *, keep_s: float = KEEP_S, keep_bytes: int = KEEP_BYTES) -> None:
        self._keep_s = keep_s
        self._keep_bytes = keep_bytes
        self._known: dict[str, RequestLifecycle] = {}
        self._ended: dict[str, _Retention] = {}
        """The record size and expiry timer of each ended request, by request id. The request that ended first is first.
        """
        self._kept_bytes = 0

    @property
    def running(self) -> tuple[RequestLifecycle, ...]:
        """The requests that have not ended, including queued requests."""
        return tuple(known for request_id, known in self._known.items() if request_id not in self._ended)

    def find(self, request_id: str) -> RequestLifecycle | None:
        """Returns the request with this id, or None if the id is unknown or its request was dropped."""
        return self._known.get(request_id)

    def find_same(self, request_id: str, fingerprint: bytes, *, seed: int | None = None) -> RequestLifecycle | None:
        """Returns the request with this id, or None if the id is unknown or its request was dropped.

        Raises ExistsError (REQUEST_EXISTS) if the request with this id has another fingerprint or another seed. If
        `seed` is None, the seeds are not compared.
        """
        known = self.find(request_id)
        if known is not None and (known.fingerprint != fingerprint or seed not in (None, known.seed)):
            raise _exists(request_id)
        return known

    def add(self, request_id: str, known: RequestLifecycle) -> None:
        """Adds a queued or running request. The registry must not contain a request with the same id."""
        assert self.find(request_id) is None, "request ids are unique"
        self._known[request_id] = known

    def forget(self, request_id: str) -> None:
        """Drops a request immediately when it ends, so that a repeated call starts the request again."""
        del self._known[request_id]

    def end(self, request_id: str) -> None:
        """Moves a running request to the ended requests, which are retained for a limited time."""
        size_bytes = self._known[request_id].record.size_bytes
        timer = asyncio.get_running_loop().call_later(self._keep_s, self._drop, request_id)
        self._ended[request_id] = _Retention(size_bytes, timer)
        self._kept_bytes += size_bytes
        while self._kept_bytes > self._keep_bytes:
            self._drop(next(iter(self._ended)))

    def discard_ended(self, request_id: str, *, caller: str) -> None:
        """Drops a caller's request if it has ended. Does nothing if the id is unknown.

        Raises ExistsError (REQUEST_EXISTS) if the request belongs to another caller.
        """
        known = self.find(request_id)
        if known is not None and known.caller != caller:
            raise _exists(request_id)
        if request_id in self._ended:
            self._drop(request_id)

    def clear(self) -> None:
        """Drops all ended requests."""
        for request_id in list(self._ended):
            self._drop(request_id)

    def _drop(self, request_id: str) -> None:
        del self._known[request_id]
        ended = self._ended.pop(request_id)
        self._kept_bytes -= ended.size_bytes
        ended.timer.cancel()


def _exists(request_id: str) -> ExistsError:
    return ExistsError(
        f"request {request_id!r} already exists with different content; use another request_id",
        reason="REQUEST_EXISTS",
        metadata={"request_id": request_id},
    )


def unknown_request(request_id: str) -> NotFoundError:
    """Returns the error of a call that names a request which this orchestrator does not know."""
    return NotFoundError(
        f"unknown request {request_id!r}: it never existed, it ended too long ago, or another orchestrator runs it; "
        "call every orchestrator of the pipeline",
        reason="UNKNOWN_REQUEST",
        metadata={"request_id": request_id},
    )


def fingerprint(request: orchestrator_pb2.GenerateRequest) -> bytes:
    """Returns a digest of the request's content. All calls with the same request_id must have the same digest.

    The digest excludes fields that may differ between calls of the same request, such as `next_positions`, and fields
    that this process does not know, which may do so, too. It also excludes the seed, because a caller that attaches
    again may set the seed that was chosen for its first call.
    """
    return digest_of(without_fields(request, *_CHANGING_FIELDS))


def latest_attempt(error: StagemeshError | None) -> int | None:
    """Returns the number of the latest attempt of a choice that may run again after `error`.

    Returns None if `error` is None, has another reason, or does not contain an attempt that further ones can follow.
    """
    if error is None or error.reason not in _RUN_AGAIN_REASONS:
        return None
    attempt = error.facts.get("attempt", MAX_ATTEMPT)
    return attempt if attempt < MAX_ATTEMPT else None
