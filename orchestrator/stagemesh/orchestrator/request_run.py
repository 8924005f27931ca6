"""One request's life: its steps are started, their events merged, and at the first failure all of them stopped."""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress
from copy import copy

from stagemesh.connectors.errors import (
    CancelledRequestError,
    DeadlineError,
    InternalError,
    StagemeshError,
    UnavailableError,
)
from stagemesh.orchestrator.causes import Failure, root_cause
from stagemesh.orchestrator.planner import Plan, PlannedStep
from stagemesh.orchestrator.record import RequestRecord
from stagemesh.orchestrator.timeline import StepNotes
from stagemesh.orchestrator.validation import ValidRequest
from stagemesh.services.serving.logs import bind_log_context
from stagemesh.v1 import request_pb2, stage_pb2

_log = logging.getLogger(__name__)

_ATTEMPT = 1
_ACCEPT_TIMEOUT_S = 10.0
# How long a doubtful cause waits for a surer one: a killed process is noticed in milliseconds.
_SETTLE_S = 1.0
# How long the client's error waits for the stages to let go, and how long they may take.
_CLIENT_WAITS_S = 1.0
_LET_GO_S = 5.0


class RequestRun:
    """Drives one admitted and planned request; what it makes goes into its record."""

    def __init__(self, request: ValidRequest, plan: Plan, record: RequestRecord, *, timeout_s: float) -> None:
        self._request = request
        self._plan = plan
        self._record = record
        self._timeout_s = timeout_s
        self._deadline_s = time.monotonic() + timeout_s
        self._accepted = {step.stage.name: asyncio.Event() for step in plan.steps}
        self._running = {step.stage.name for step in plan.steps}
        self._failures: list[Failure] = []
        self._stopped: StagemeshError | None = None
        self._changed = asyncio.Event()

    def stop(self, reason: str) -> None:
        """Has the request end with CancelledRequestError; harmless when it has ended or is about to."""
        self._stopped = self._stopped or CancelledRequestError(reason)
        self._changed.set()

    async def run(self) -> StagemeshError | None:
        """Runs the request and returns what it failed of. The stages have let go then, as far as they answer."""
        bind_log_context(request_id=self._request.request_id)
        async with asyncio.TaskGroup() as group:
            steps = [group.create_task(self._run_step(step), name=step.stage.name) for step in self._plan.steps]
            error = await self._outcome()
            if error is not None:
                _log.warning("request failed: %s", error.message)
                await self._let_go(error, group)
            for task in steps:
                task.cancel()
        return error

    async def _outcome(self) -> StagemeshError | None:
        """Waits until every step has finished, or for the cause why not."""
        try:
            async with asyncio.timeout(self._timeout_s):
                while self._running and self._stopped is None and not self._failures:
                    await self._next_change()
            if self._failures and self._stopped is None:
                await self._wait_for_surer_cause()
        except TimeoutError:
            stages = ", ".join(sorted(self._running))
            return DeadlineError(f"the request took longer than its {self._timeout_s:.1f} s; still at work: {stages}")
        if self._stopped is not None:
            return self._stopped
        if self._failures:
            cause = root_cause(self._failures)
            return cause.error.located(stage=cause.stage)
        return None

    async def _wait_for_surer_cause(self) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(_SETTLE_S):
                while self._running and self._stopped is None and not root_cause(self._failures).conclusive:
                    await self._next_change()

    async def _next_change(self) -> None:
        self._changed.clear()
        await self._changed.wait()

    async def _run_step(self, step: PlannedStep) -> None:
        bind_log_context(stage=step.stage.name)
        notes = self._record.timeline.begin(step.stage.name, replica=step.replica.name, attempt=_ATTEMPT)
        try:
            await self._follow(step, notes)
        except StagemeshError as exc:
            notes.end(exc)
            # A copy, for the error itself holds on to the frames that it came through: to this run.
            self._failures.append(Failure(step.stage.name, copy(exc)))
        except Exception:  # noqa: BLE001
            _log.exception("following stage %s failed in a way that nobody foresaw", step.stage.name)
            message = f"the orchestrator could not follow stage {step.stage.name!r}; its log has the details"
            self._failures.append(Failure(step.stage.name, InternalError(message)))
        step.release()
        notes.end(None)
        self._running.discard(step.stage.name)
        self._changed.set()

    async def _follow(self, step: PlannedStep, notes: StepNotes) -> None:
        """Starts a step once its consumers can be fed, and takes in its events to the end."""
        for consumer in step.consumers:
            await self._accepted[consumer].wait()
        notes.note_sent()
        left_s = max(0.0, self._deadline_s - time.monotonic())
        events = step.replica.client.execute(self._step_request(step), timeout_s=left_s)
        async with aclosing(events):
            notes.note_accepted(await self._hear_accepted(step, events))
            self._accepted[step.stage.name].set()
            self._record.note_started()
            async for event in events:
                self._take(step, event, notes)
        if not self._record.has_finished(step.stage.name):
            raise InternalError(f"stage {step.stage.name!r} ended its stream before it finished; see its log")

    async def _hear_accepted(
        self, step: PlannedStep, events: AsyncGenerator[stage_pb2.ExecuteStepResponse]
    ) -> stage_pb2.StepAccepted:
        try:
            async with asyncio.timeout(_ACCEPT_TIMEOUT_S):
                first = await anext(events, None)
        except TimeoutError as exc:
            message = (
                f"stage {step.stage.name!r} (replica {step.replica.name} at {step.replica.endpoint}) did not take the "
                f"request within {_ACCEPT_TIMEOUT_S:.0f} s; try again, and see its log"
            )
            raise UnavailableError(message, reason="NOT_ACCEPTED") from exc
        if first is None or first.WhichOneof("event") != "accepted":
            raise InternalError(f"stage {step.stage.name!r} did not say that it accepted the request; see its log")
        return first.accepted

    def _take(self, step: PlannedStep, event: stage_pb2.ExecuteStepResponse, notes: StepNotes) -> None:
        match event.WhichOneof("event"):
            case "progress":
                notes.note_progress(event.progress)
                self._record.add_progress(step.stage.name, event.progress)
            case "output":
                notes.note_output()
                self._record.add_output(step.output_names.get(event.output.name, ""), event.output)
            case "finished":
                notes.note_finished(event.finished)
                self._record.note_finished(step.stage.name, event.finished)
            case "paused":
                raise InternalError(f"stage {step.stage.name!r} paused although nobody asked it to")
            case _:
                # A second acceptance, a checkpoint, or an event of a newer contract: nothing to do.
                pass

    def _step_request(self, step: PlannedStep) -> stage_pb2.ExecuteStepRequest:
        parameters = request_pb2.Parameters()
        parameters.CopyFrom(self._request.parameters)
        # A stage refuses options and adapters that it does not know; the pipeline's were checked as a whole.
        for name in set(parameters.options) - set(step.stage.signature.options):
            del parameters.options[name]
        if not step.stage.signature.adapters:
            parameters.ClearField("adapter")
        return stage_pb2.ExecuteStepRequest(
            request_id=self._request.request_id,
            step_id=f"{self._request.request_id}/{step.stage.name}/{_ATTEMPT}",
            attempt=_ATTEMPT,
            input=self._input(step) if step.takes_input else None,
            parameters=parameters,
            inputs=step.inputs,
            absent=step.absent,
            outputs=step.outputs,
            streamed=list(step.output_names),
            priority=self._request.priority,
        )

    def _input(self, step: PlannedStep) -> request_pb2.Input:
        """A stage is given what it knows of."""
        given = self._request.input
        if step.stage.signature.negative_prompt or not given.negative_prompt:
            return given
        known = request_pb2.Input()
        known.CopyFrom(given)
        known.ClearField("negative_prompt")
        return known

    async def _let_go(self, error: StagemeshError, group: asyncio.TaskGroup) -> None:
        """Stops the steps that run still. The client hears of the error once they have, or soon."""
        steps = [step for step in self._plan.steps if step.stage.name in self._running]
        cancels = [group.create_task(self._cancel_step(step, error)) for step in steps]
        if not cancels:
            return
        _, late = await asyncio.wait(cancels, timeout=_CLIENT_WAITS_S)
        if late:
            self._record.close(error)
            await asyncio.wait(late)

    async def _cancel_step(self, step: PlannedStep, error: StagemeshError) -> None:
        request = stage_pb2.CancelStepRequest(
            request_id=self._request.request_id, attempt=_ATTEMPT, reason=error.message
        )
        try:
            await step.replica.client.cancel(request, timeout_s=_LET_GO_S)
        except StagemeshError as exc:
            _log.warning("stage %s may still hold the request: %s", step.stage.name, exc.message)
