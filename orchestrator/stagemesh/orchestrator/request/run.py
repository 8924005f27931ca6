"""Runs one choice of a planned request: starts its steps, restarts lost steps, and stops all steps if it fails."""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import partial

from stagemesh.common.backoff import Backoff
from stagemesh.common.errors import DeadlineError, InternalError, NotReadyError, StagemeshError, UnavailableError
from stagemesh.common.notification import Notifier
from stagemesh.common.process.logs import bind_log_context
from stagemesh.common.tasks import end_tasks, kept_in
from stagemesh.common.wire.telemetry import StepTrace
from stagemesh.connectors.packets import EdgeKey
from stagemesh.orchestrator.planning.planner import Plan
from stagemesh.orchestrator.planning.replacement_replicas import ReplacementReplicas
from stagemesh.orchestrator.request.deadlocks import DeadlockWatch
from stagemesh.orchestrator.request.failures import NOT_REBOUND, SETTLE_S, Failures, root_cause
from stagemesh.orchestrator.request.output_record import NOT_RUNNING, RequestRecord, is_taken_over
from stagemesh.orchestrator.request.recovery import (
    Action,
    ActionKind,
    Phase,
    StepState,
    SupersededAttempt,
    find_superfluous,
    is_open,
    next_actions,
    plan_restarts,
)
from stagemesh.orchestrator.request.step_calls import StepCalls, follow_step, may_continue
from stagemesh.orchestrator.request.streamed_input import InputPlanes
from stagemesh.orchestrator.request.timeline import ask_for_report, describe_wait
from stagemesh.orchestrator.request.validation import ValidRequest
from stagemesh.pipeline import Edge

_log = logging.getLogger(__name__)

# The time in seconds for which the client's error is delayed until the stages have released the request.
_RELEASE_WAIT_S = 1.0
# Steps may run this number of seconds longer than their request, so that late steps can report what they wait for.
_STEP_MARGIN_S = 0.5
_REPORT_TIMEOUT_S = 0.2
# After _QUICK_RESTARTS, further restarts of a stage are delayed. After MAX_RESTARTS, the request fails.
_QUICK_RESTARTS, MAX_RESTARTS = 3, 24
_RESTART_PAUSES = Backoff(first_s=0.1, longest_s=2.0)
# After this number of restarts because all of its stages wait for each other, the request fails.
_MOST_DEADLOCKS = 2
# After this number of processes of a stage have died while running a request, the request runs alone on its replica.
_SUSPECT_DEATHS = 2


class RequestRun:
    """Runs one choice of a planned request. Adds the events of its steps to the request's record.

    `request.index` is the index of the choice.

    A loop asks the module `recovery` which actions are possible in the current state of the stages, and starts a task
    for each action. Each task wakes the loop after it has changed the state of its stage.
    """

    def __init__(
        self,
        request: ValidRequest,
        plan: Plan,
        record: RequestRecord,
        *,
        replacements: ReplacementReplicas,
        timeout_s: float,
        failed: Callable[[StagemeshError], None],
        input_planes: InputPlanes,
    ) -> None:
        """`failed` is called with the error if the choice fails, before its steps are cancelled.

        `input_planes` sends the input of a request that streams it.
        """
        self._input_planes = input_planes
        self._failed = failed
        self._request, self._plan, self._record, self._replacements = request, plan, record, replacements
        self._timeout_s, self._deadline_s = timeout_s, 0.0
        self._route = plan.route
        self._states = {
            name: StepState(
                step=step, attempt=request.running_attempt or request.first_attempt, budget=replacements.checkpoints
            )
            for name, step in plan.steps.items()
        }
        self._changed = Notifier()
        """The notifier that wakes the loop. An `asyncio.Event` would need a kilobyte of memory."""
        self._failures = Failures(self._changed)
        self._calls = StepCalls(
            request,
            plan.route,
            self._states,
            record=record,
            failures=self._failures,
            changed=self._changed,
            input_producer=input_planes.producer,
        )
        if request.stream is not None:
            request.stream.begin(plan.route.input_edges)
        self._stopped: StagemeshError | None = None
        self._cancelling: set[asyncio.Task[None]] = set()
        """The running tasks that cancel superseded attempts on their replicas."""
        self._group: asyncio.TaskGroup | None = None
        self._deadlocks = 0
        self._rebound = ExitStack()
        """Callbacks that remove `_lose_finished` from the replicas."""

    def stop(self, error: StagemeshError) -> None:
        """Stops the request. The request then fails with `error`. Does nothing if the request was already stopped."""
        self._stopped = self._stopped or error
        self._changed.fire()

    async def run(self) -> StagemeshError | None:
        """Runs the request. Returns the error of a failed request, or None if it succeeded.

        Before returning, waits until every reachable stage has released the request.
        """
        bind_log_context(request_id=self._request.choice_id)
        self._deadline_s = asyncio.get_running_loop().time() + self._timeout_s
        try:
            async with asyncio.TaskGroup() as group:
                self._group = group
                for state in self._states.values():
                    self._note_placed(state)
                if self._request.continues:
                    # The steps are known to each other already, and all calls must repeat the original bindings.
                    for state in self._states.values():
                        self._start(state)
                watch = DeadlockWatch(self._states.values(), self._request.choice_id, on_deadlock=self._restart_stalled)
                try:
                    error = await self._outcome()
                finally:
                    watch.close()
                if error is not None:
                    _log.warning("request failed: %s", error.message)
                    self._failed(error)
                    await self._cancel_steps(error)
                for tasks in (self._cancelling, *(state.tasks for state in self._states.values())):
                    for task in list(tasks):
                        task.cancel()
        finally:
            self._rebound.close()
            for state in self._states.values():
                state.release_replica()
                state.discard_checkpoint()
        return error

    # -- the loop

    async def _outcome(self) -> StagemeshError | None:
        """Waits until all steps have finished or the request fails. Returns the error of a failed request, or None."""
        try:
            async with asyncio.timeout(self._timeout_s):
                while not self._is_over:
                    self._recover()
                    self._advance()
                    if not self._is_over:
                        await self._changed.wait()
                if self._failures.final and self._stopped is None:
                    await self._wait_for_conclusive_cause()
        except TimeoutError:
            return await self._deadline_error()
        if self._stopped is not None:
            return self._stopped
        if self._failures.final:
            cause = root_cause(self._failures.final)
            error = cause.error.located(stage=cause.stage)
            # Stages know the choice as a request with an id of its own, which the client does not know.
            error.metadata["request_id"] = self._request.request_id
            return error
        return None

    @property
    def _is_over(self) -> bool:
        finished = all(state.phase is Phase.FINISHED for state in self._states.values())
        return self._stopped is not None or bool(self._failures.final) or finished

    def _recover(self) -> None:
        """Restarts the stages whose steps were lost, and the stages that must restart with them.

        Ends the stages that wait for a replica without need.
        """
        for stage in find_superfluous(self._route, self._states):
            for task in list(self._states[stage].tasks):
                task.cancel()
            self._calls.finish(self._states[stage])
        losses = self._failures.take_losses()
        if self._failures.final or not (losses.lost or losses.fresh):
            return
        self._restart(*losses)

    def _restart(self, lost: Mapping[str, StagemeshError], fresh: Mapping[str, StagemeshError]) -> None:
        """Restarts stages. The arguments are the fields of `Losses`."""
        restarts = plan_restarts(
            self._route, self._states, lost=lost, fresh=fresh, first_attempt=self._request.first_attempt
        )
        for stage in restarts.void:
            self._states[stage].discard_checkpoint()
        for stage in restarts.unneeded:
            self._calls.finish(self._states[stage])
        for stage, restart in restarts.restarted.items():
            state = self._states[stage]
            cause = lost.get(stage) or fresh.get(stage) or _needed_again(stage)
            source = "a checkpoint" if restart.resumes else "the start"
            _log.warning("stage %s restarts from %s: %s", stage, source, cause)
            if state.restarts >= MAX_RESTARTS:
                self._failures.add_final(stage, cause)
            if state.notes is not None:
                state.notes.end(cause)
            state.restart(restart)

    def _restart_stalled(self, stalled: Sequence[StepState]) -> None:
        """Restarts the running stages of the request, which wait for each other. Fails the request after some times."""
        if self._request.stream is not None:
            # The client may pause its input for any time.
            return
        self._deadlocks += 1
        stages = ", ".join(state.name for state in stalled)
        error = UnavailableError(
            f"stages {stages} wait for each other, although each of them can be reached; report this as a defect",
            reason="REQUEST_STALLED",
        )
        for state in stalled:
            if self._deadlocks > _MOST_DEADLOCKS:
                self._failures.add_final(state.name, error)
            else:
                self._failures.add(state, state.attempt, error)

    def _advance(self) -> None:
        """Starts a task for every action that is possible now."""
        if self._is_over:
            return
        for action in next_actions(self._route, self._states):
            state = self._states[action.stage]
            if action.kind is ActionKind.START:
                self._start(state)
            elif action.kind is ActionKind.SEND_INPUT:
                self._send_inputs(state, action)
            elif state.busy is None:
                work = self._place(state) if action.kind is ActionKind.PLACE else self._rebind(state, action)
                state.busy = self._spawn(work, state.tasks, name=f"{state.name}/{action.kind.name}")
                state.busy.add_done_callback(partial(self._end_busy, state))

    async def _wait_for_conclusive_cause(self) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(SETTLE_S):
                while self._stopped is None and not root_cause(self._failures.final).is_conclusive:
                    await self._changed.wait()

    async def _deadline_error(self) -> DeadlineError:
        """Returns an error that names the unfinished stages and what each of them waits for."""
        unfinished = [state for _, state in sorted(self._states.items()) if state.phase is not Phase.FINISHED]
        waits = await asyncio.gather(*map(self._find_wait, unfinished))
        waiting = [
            f"; stage {state.name!r} waits for {wait}" for state, wait in zip(unfinished, waits, strict=True) if wait
        ]
        stages = ", ".join(state.name for state in unfinished)
        return DeadlineError(
            f"the request took longer than its {self._record.timeline.timeout_s:.1f} s; still running: "
            f"{stages}{''.join(waiting)}"
        )

    async def _find_wait(self, state: StepState) -> str:
        """Returns what an unfinished stage waits for, or an empty string if that is not known."""
        if state.phase is Phase.UNPLACED:
            return "a replica"
        assert state.notes is not None, "its replica is chosen"
        report, request_id = None, self._request.choice_id
        if state.phase is Phase.RUNNING:
            report = await ask_for_report(state.replica, request_id, attempt=state.attempt, timeout_s=_REPORT_TIMEOUT_S)
        return describe_wait(state.notes, report, unready=())

    # -- placing and starting

    async def _place(self, state: StepState) -> None:
        if state.restarts > _QUICK_RESTARTS:
            await asyncio.sleep(_RESTART_PAUSES.pause_s(state.restarts - _QUICK_RESTARTS))
        state.alone = len(state.dead_replicas) >= _SUSPECT_DEATHS
        if state.alone:
            replica = await self._replacements.find_alone(
                state.name, self._plan, avoid=state.avoid, reservation=state.arrangements
            )
        else:
            replica = await self._replacements.find(state.name, self._plan, avoid=state.avoid)
        if replica is None:
            self._failures.add_final(state.name, self._generation_ended(state))
            return
        state.step = self._plan.move(state.name, replica)
        state.phase = Phase.PLACED
        self._note_placed(state)

    def _generation_ended(self, state: StepState) -> NotReadyError:
        return NotReadyError(
            f"the request began in generation {self._plan.generation}, of which stage {state.name!r} has no replica "
            "left, because an upgrade has replaced it; send the request again with another request_id",
            reason="GENERATION_ENDED",
            metadata={"stage": state.name},
            facts={"attempt": max(each.attempt for each in self._states.values())},
        )

    def _note_placed(self, state: StepState) -> None:
        """Adds the timeline entry of an attempt whose replica was chosen.

        If the replica ends, adds a failure of the attempt. `state` is the state of the stage to which the attempt
        belongs.
        """
        replica, attempt = state.replica, state.attempt
        _log.debug("attempt %d of stage %s is placed on %s", attempt, state.name, replica.name)
        state.notes = self._record.timeline.begin(
            state.name, replica=replica.name, attempt=attempt, index=self._request.index
        )
        if state.resumed is not None:
            state.notes.resumed_engine_steps = state.resumed.engine_steps
        state.arrangements.callback(replica.on_end(lambda cause: self._failures.add(state, attempt, cause)))

    def _start(self, state: StepState) -> None:
        state.bound = self._calls.flow_attempts(state)
        state.phase = Phase.STARTING
        # The tasks that followed these attempts have ended by now.
        for attempt in state.superseded:
            self._spawn(self._calls.cancel(attempt), self._cancelling, name="cancel superseded")
        state.superseded.clear()
        request = self._calls.execute(state).SerializeToString()
        self._spawn(self._follow(state, request), state.tasks, name=f"{state.name}/{state.attempt}")

    async def _follow(self, state: StepState, request: bytes) -> None:
        """Executes the newest attempt of a stage until it ends. If the attempt fails, adds the failure to `_failures`.

        `request` is a serialized ExecuteStepRequest.
        """
        attempt, notes = state.attempt, state.notes
        bind_log_context(stage=state.name, replica=state.replica.name, attempt=str(attempt))
        assert notes is not None, "its replica is chosen"
        notes.note_sent()
        try:
            take = partial(self._calls.take, state, attempt)
            await follow_step(state.replica, request, deadline_s=self._deadline_s + _STEP_MARGIN_S, take=take)
        except StagemeshError as exc:
            notes.end(exc)
            self._failures.add(state, attempt, exc)
        except Exception:  # noqa: BLE001
            _log.exception("following stage %s failed unexpectedly", state.name)
            message = f"the orchestrator could not follow stage {state.name!r}; its log has the details"
            self._failures.add_final(state.name, InternalError(message))
        else:
            if state.phase is not Phase.FINISHED:
                message = f"stage {state.name!r} ended its stream before it finished; see its log"
                self._failures.add_final(state.name, InternalError(message))

    # -- streamed input

    def _send_inputs(self, state: StepState, action: Action) -> None:
        for edge in self._route.inputs[state.name]:
            if edge.name in action.edges:
                state.bound = {**state.bound, edge.name: state.attempt}
                self._spawn(self._send_input(state, edge), state.tasks, name=f"{state.name}/{edge.name}")

    async def _send_input(self, state: StepState, edge: Edge) -> None:
        """Sends the client's input over an edge to the newest attempt of a stage, until the end of the input.

        If this fails although the attempt does not fail, adds a failure of the attempt.
        """
        bind_log_context(stage=state.name, replica=state.replica.name, attempt=str(state.attempt))
        attempt, stream = state.attempt, self._request.stream
        assert stream is not None, "only such a request has edges from @input"
        try:
            key = EdgeKey(self._request.choice_id, edge.name, attempt)
            async with self._input_planes.open_outlet(key, state.replica) as outlet:
                notes = state.notes
                if self._record.timeline.trace is not None and notes is not None:
                    outlet.chunks.trace = StepTrace("", began_s=notes.began_s)
                try:
                    await stream.send(outlet, edge)
                finally:
                    self._record.timeline.inputs.append(outlet.usage)
                    if outlet.chunks.trace is not None and notes is not None:
                        notes.note_input(outlet.chunks.trace)
        except StagemeshError as exc:
            # A step that ends with an error rejects its input. The error that the step reports is more precise.
            await asyncio.sleep(SETTLE_S)
            self._failures.add(state, attempt, exc)
        except Exception:  # noqa: BLE001
            _log.exception("sending the input of stage %s failed unexpectedly", state.name)
            message = f"the orchestrator could not send its input to stage {state.name!r}; its log has the details"
            self._failures.add_final(state.name, InternalError(message))

    # -- rebinding

    async def _rebind(self, state: StepState, action: Action) -> None:
        """Notifies a stage's replica of the new producers or the new consumers on the edges of `action`.

        If the replica rejects the new producers or consumers, marks the stages that must restart.
        """
        attempt = state.attempt
        try:
            await self._calls.rebind(state, action.edges)
        except StagemeshError as exc:
            producers = [edge.producer for edge in self._route.incoming[state.name] if edge.name in action.edges]
            resumed = [name for name in producers if self._states[name].resumed is not None]
            if is_taken_over(exc):
                self._failures.add_final(state.name, exc)
            elif action.kind is ActionKind.REBIND_OUTPUTS:
                # The step's replica no longer retains the first chunks, which the new consumers need.
                self._failures.require_fresh(state.name, _not_rebound(state, exc))
            elif isinstance(exc, NotReadyError) and resumed:
                # The step has not received all rows that a resumed producer would omit.
                for name in resumed:
                    self._failures.require_fresh(name, exc)
            else:
                self._failures.add(state, attempt, _not_rebound(state, exc))
        else:
            if action.kind is ActionKind.REBIND_OUTPUTS:
                lose = partial(self._lose_finished, state, attempt)
                self._rebound.callback(state.replica.on_end(lose))

    def _lose_finished(self, state: StepState, attempt: int, cause: StagemeshError) -> None:
        """Restarts a stage whose replica ends after its step has finished and was bound to a new consumer.

        The replica may not have sent the data again, for which the consumer would wait for ever.
        """
        is_needed = any(is_open(edge, self._states) for edge in self._route.outgoing[state.name])
        if is_needed and state.attempt == attempt and state.phase is Phase.FINISHED:
            self._failures.require_fresh(state.name, cause)

    # -- the end

    async def _cancel_steps(self, error: StagemeshError) -> None:
        """Cancels the steps that are still running, and waits until their replicas have released them.

        The client receives `error` when this wait ends or has lasted one second, unless the choice may run again. If
        this orchestrator stops, leaves the steps running if possible: the client continues with them elsewhere, or the
        replicas stop them within seconds.
        """
        if error.reason == NOT_RUNNING and self._request.can_continue:
            return
        failed = {failure.stage for failure in self._failures.final}
        running = [state for state in self._states.values() if state.at_work and state.replica.stage not in failed]
        attempts = [SupersededAttempt(state.replica, state.attempt) for state in running]
        attempts += [attempt for state in self._states.values() for attempt in state.superseded]
        if may_continue(error):
            # Replicas spare the steps that another orchestrator follows.
            await end_tasks(task for state in self._states.values() for task in state.tasks)
        for attempt in attempts:
            self._spawn(self._calls.cancel(attempt, error), self._cancelling, name="cancel")
        if not self._cancelling:
            return
        _, pending = await asyncio.wait(self._cancelling, timeout=_RELEASE_WAIT_S)
        if pending:
            if self._stopped is not None:
                self._record.close(error)
            await asyncio.wait(pending)

    # -- tasks

    def _spawn(
        self, work: Coroutine[object, object, None], tasks: "set[asyncio.Task[None]]", *, name: str
    ) -> asyncio.Task[None]:
        """Starts a task that runs `work`. The task is in `tasks` until it ends."""
        assert self._group is not None, "only while it runs"
        return kept_in(tasks, self._group.create_task(work, name=name))

    def _end_busy(self, state: StepState, task: "asyncio.Task[None]") -> None:
        if state.busy is task:
            state.busy = None
            self._changed.fire()


def _not_rebound(state: StepState, error: StagemeshError) -> UnavailableError:
    return UnavailableError(
        f"stage {state.name!r} cannot continue with other upstream or downstream replicas: {error.message}",
        reason=NOT_REBOUND,
    )


def _needed_again(stage: str) -> UnavailableError:
    return UnavailableError(
        f"the rows that stage {stage!r} omitted when it resumed from its checkpoint are needed now", reason=NOT_REBOUND
    )
