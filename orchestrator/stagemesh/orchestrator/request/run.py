"""One request's life: its steps are started and their events merged; what is lost runs anew, what fails ends it all."""

import asyncio
import logging
from collections.abc import Coroutine, Sequence
from contextlib import suppress
from copy import copy
from functools import partial
from typing import assert_never

from stagemesh.common.backoff import backoff_s
from stagemesh.common.errors import (
    DeadlineError,
    InternalError,
    NotReadyError,
    StagemeshError,
    UnavailableError,
)
from stagemesh.common.logs import bind_log_context
from stagemesh.orchestrator.planning.failover import Failover
from stagemesh.orchestrator.planning.planner import Plan
from stagemesh.orchestrator.request.event_relay import follow_step
from stagemesh.orchestrator.request.losses import Losses, is_death, rejects_checkpoint
from stagemesh.orchestrator.request.record import RequestRecord
from stagemesh.orchestrator.request.recovery import (
    Action,
    Phase,
    Place,
    RebindInputs,
    RebindOutputs,
    Start,
    can_keep,
    next_actions,
    restarts,
)
from stagemesh.orchestrator.request.root_cause import Failure, StageOutcome, root_cause
from stagemesh.orchestrator.request.step_requests import StepRequests
from stagemesh.orchestrator.request.step_state import DeliveredOutputs, StepState, SupersededAttempt, graph_of
from stagemesh.orchestrator.request.validation import ValidRequest
from stagemesh.v1 import stage_pb2

_log = logging.getLogger(__name__)

POISON_REQUEST = "POISON_REQUEST"
NOT_REBOUND = "NOT_REBOUND"
HANDED_ON = "DRAINED"
"""What a replica says that is drained, of the steps that are to go on elsewhere."""

_REBIND_S = 5.0
# How long a doubtful cause waits for a surer one: a killed process is noticed in milliseconds.
_SETTLE_S = 1.0
# How long the client's error waits for the stages to let go, and how long they may take.
_CLIENT_WAITS_S = 1.0
_LET_GO_S = 5.0
# A stage that was lost again and again is given a pause, and in the end up.
_QUICK_RESTARTS, MAX_RESTARTS = 3, 24
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 2.0
# A request is suspected after so many processes of one stage died with it.
_SUSPECT_DEATHS = 2


class RequestRun:
    """Drives one admitted and planned request; what it makes goes into its record.

    It is one loop that asks `recovery` what is to be done as the parts stand, and starts a task for each of it; tasks
    change their part and wake the loop.
    """

    def __init__(
        self,
        request: ValidRequest,
        plan: Plan,
        record: RequestRecord,
        *,
        mover: Failover,
        timeout_s: float,
        first_attempt: int = 1,
    ) -> None:
        """`first_attempt` is the number of the stages' first attempts; it is higher where others ran the request."""
        self._request, self._plan, self._record, self._mover = request, plan, record, mover
        self._timeout_s, self._deadline_s = timeout_s, 0.0
        self._graph = graph_of(plan)
        self._parts = {
            step.stage.name: StepState(step=step, attempt=first_attempt, budget=mover.kept_states)
            for step in plan.steps
        }
        self._steps = StepRequests(request, self._graph, self._parts)
        self._delivered = DeliveredOutputs()
        self._losses = Losses()
        self._failures: list[Failure] = []
        self._stopped: StagemeshError | None = None
        self._changed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Ends the loop's wait; an event would take a kilobyte."""
        self._tasks: dict[str, set[asyncio.Task[None]]] = {name: set() for name in self._parts}
        self._busy: dict[str, asyncio.Task[None]] = {}
        """By stage, what finds it a replica or rebinds it; one at a time."""
        self._leaving: set[asyncio.Task[None]] = set()
        """What stops attempts that others have replaced."""
        self._group: asyncio.TaskGroup | None = None

    def stop(self, error: StagemeshError) -> None:
        """Has the request end with this error; harmless when it has ended or is about to."""
        self._stopped = self._stopped or error
        self._wake()

    async def run(self) -> StagemeshError | None:
        """Runs the request and returns what it failed of. The stages have let go then, as far as they answer."""
        bind_log_context(request_id=self._request.request_id)
        self._deadline_s = asyncio.get_running_loop().time() + self._timeout_s
        try:
            async with asyncio.TaskGroup() as group:
                self._group = group
                for part in self._parts.values():
                    self._settle_in(part)
                error = await self._outcome()
                if error is not None:
                    _log.warning("request failed: %s", error.message)
                    await self._let_go(error)
                _cancel(self._leaving)
                for tasks in self._tasks.values():
                    _cancel(tasks)
        finally:
            for part in self._parts.values():
                part.leave_replica()
                part.forget_checkpoint()
        return error

    # -- the loop

    async def _outcome(self) -> StagemeshError | None:
        """Waits until every step has finished, or for the cause why not."""
        try:
            async with asyncio.timeout(self._timeout_s):
                while not self._is_over:
                    self._changed = asyncio.get_running_loop().create_future()
                    self._recover()
                    self._advance()
                    if not self._is_over:
                        await self._changed
                if self._failures and self._stopped is None:
                    await self._wait_for_surer_cause()
        except TimeoutError:
            return self._late()
        if self._stopped is not None:
            return self._stopped
        if self._failures:
            cause = root_cause(self._failures)
            return cause.error.located(stage=cause.stage)
        return None

    @property
    def _is_over(self) -> bool:
        done = all(part.phase is Phase.FINISHED for part in self._parts.values())
        return self._stopped is not None or bool(self._failures) or done

    def _wake(self) -> None:
        if not self._changed.done():
            self._changed.set_result(None)

    def _recover(self) -> None:
        """Has what was lost run anew, as far as it must."""
        self._failures += self._losses.settle(_SETTLE_S, wake=self._wake)
        lost, fresh = self._losses.take()
        if self._failures or not (lost or fresh):
            return
        found = restarts(self._graph, self._parts, lost=lost, fresh=fresh)
        for stage in found.void:
            self._parts[stage].forget_checkpoint()
        for stage in found.over:
            self._finish(self._parts[stage], stage_pb2.StepFinished())
        for stage, restart in found.anew.items():
            part = self._parts[stage]
            cause = lost.get(stage) or fresh.get(stage) or _replaced(stage)
            _log.warning(
                "stage %s runs anew %s: %s", stage, "from a checkpoint" if restart.resumes else "from the start", cause
            )
            if part.restarts >= MAX_RESTARTS:
                self._failures.append(Failure(stage, cause))
            if part.notes is not None:
                part.notes.end(cause)
            _cancel(self._tasks[stage])
            self._busy.pop(stage, None)
            part.begin_anew(restart)

    def _advance(self) -> None:
        """Starts whatever can be done now."""
        if self._is_over:
            return
        for action in next_actions(self._graph, self._parts):
            part = self._parts[action.stage]
            if isinstance(action, Start):
                self._start(part)
            elif action.stage not in self._busy:
                task = self._busy[action.stage] = self._spawn(part, self._do(part, action))
                task.add_done_callback(partial(self._no_longer_busy, action.stage))

    async def _do(self, part: StepState, action: Action) -> None:
        match action:
            case Place():
                await self._place(part)
            case RebindInputs(edges=edges):
                await self._rebind_inputs(part, edges)
            case RebindOutputs(edges=edges):
                await self._rebind_outputs(part, edges)
            case Start():
                pass
            case _:
                assert_never(action)

    # -- placing

    async def _place(self, part: StepState) -> None:
        if part.restarts > _QUICK_RESTARTS:
            failures = part.restarts - _QUICK_RESTARTS
            await asyncio.sleep(backoff_s(failures, first_s=_FIRST_PAUSE_S, longest_s=_LONGEST_PAUSE_S))
        part.alone = len(part.died_with) >= _SUSPECT_DEATHS
        find = self._mover.find_alone if part.alone else self._mover.find
        found = await find(part.name, lambda: self._plan, avoid=part.avoid)
        self._plan = self._plan.moved(part.name, found.replica)
        for step in self._plan.steps:
            self._parts[step.stage.name].step = step
        part.leave = found.leave
        part.phase = Phase.PLACED
        self._settle_in(part)

    def _settle_in(self, part: StepState) -> None:
        """Its replica is chosen: notes are opened, and its end is heard of."""
        replica, attempt, leave = part.replica, part.attempt, part.leave
        part.notes = self._record.timeline.begin(part.name, replica=replica.name, attempt=attempt)
        if part.resumed is not None:
            part.notes.resumed_steps = part.resumed.message.steps
        take_back = replica.on_gone(lambda cause: self._lose(part, attempt, cause))

        def leave_all() -> None:
            take_back()
            leave()

        part.leave = leave_all

    # -- running

    def _start(self, part: StepState) -> None:
        part.told = self._steps.told(part)
        part.phase = Phase.STARTING
        for former in part.former:
            # By now nobody listens to them any more.
            self._spawn_former(former)
        part.former.clear()
        self._spawn(part, self._follow(part, self._steps.execute(part).SerializeToString()))

    async def _follow(self, part: StepState, request: bytes) -> None:
        """Takes in a step's events to the end."""
        bind_log_context(stage=part.name)
        attempt, notes = part.attempt, part.notes
        assert notes is not None, "its replica is chosen"
        notes.note_sent()
        try:
            take = partial(self._take, part, attempt)
            await follow_step(part.replica, request, stage=part.name, deadline_s=self._deadline_s, take=take)
        except StagemeshError as exc:
            notes.end(exc)
            self._lose(part, attempt, exc)
        except Exception:  # noqa: BLE001
            _log.exception("following stage %s failed in a way that nobody foresaw", part.name)
            message = f"the orchestrator could not follow stage {part.name!r}; its log has the details"
            self._fail(part, InternalError(message))
        else:
            if part.phase is not Phase.FINISHED:
                self._fail(part, InternalError(f"stage {part.name!r} ended its stream before it finished; see its log"))

    def _take(self, part: StepState, attempt: int, event: stage_pb2.ExecuteStepResponse) -> None:
        if part.attempt != attempt:
            # Another one has taken its place, and it will hear of that in a moment.
            return
        assert part.notes is not None, "its replica is chosen"
        match event.WhichOneof("event"):
            case "output":
                part.notes.note_output()
                self._pass_on(part, event)
            case "progress":
                part.notes.note_progress(event.progress)
                # Who runs anew comes by where it was before; the client does not.
                if event.progress.steps > part.shown_steps or not part.restarts:
                    part.shown_steps = max(part.shown_steps, event.progress.steps)
                    self._record.add_progress(part.name, event.progress)
            case "accepted" if part.phase is Phase.STARTING:
                part.notes.note_accepted(event.accepted)
                part.phase = Phase.RUNNING
                self._record.note_started()
                self._wake()
            case "checkpoint":
                self._keep(part, event.checkpoint)
            case "finished":
                part.notes.note_finished(event.finished)
                self._finish(part, event.finished)
            case "paused":
                self._keep(part, event.paused.checkpoint)
                raise UnavailableError(
                    f"replica {part.replica.name} of stage {part.name!r} hands on what it runs", reason=HANDED_ON
                )
            case _:
                # A second acceptance, or an event of a newer contract: nothing to do.
                pass

    def _pass_on(self, part: StepState, event: stage_pb2.ExecuteStepResponse) -> None:
        output = event.output
        tensor, seq = output.name, output.seq
        # One that goes on from a checkpoint counts on from there.
        due = part.next_seqs.get(tensor, seq if part.resumed is not None else 0)
        if seq != due or part.phase is Phase.FINISHED:
            when = f"where {due} was due" if seq != due else "after it had finished"
            what = f"stage {part.name!r} sent piece {seq} of output {tensor!r} {when}; see its log"
            self._fail(part, InternalError(what, reason="OUTPUT_OUT_OF_ORDER"))
            return
        part.next_seqs[tensor] = due + 1
        name = part.step.output_names.get(tensor, "")
        rest = self._delivered.rest(name, output, part=part) if name else None
        if rest is not None:
            self._record.add_output(name, rest)

    def _keep(self, part: StepState, checkpoint: stage_pb2.Checkpoint) -> None:
        if self._steps.can_resume_from(checkpoint) and can_keep(self._graph, self._parts, part.name, checkpoint.rows):
            part.keep(checkpoint)

    def _finish(self, part: StepState, finished: stage_pb2.StepFinished) -> None:
        part.phase = Phase.FINISHED
        part.leave_replica()
        if part.notes is not None:
            part.notes.end(None)
        self._record.note_finished(part.name, finished)
        self._wake()

    # -- rebinding

    async def _rebind_inputs(self, part: StepState, edges: Sequence[str]) -> None:
        """A running step whose producers are replaced expects the new ones."""
        attempt, request = part.attempt, self._steps.rebind_inputs(part, edges)
        try:
            await self._rebind(part, request)
        except NotReadyError as exc:
            # It has not taken all rows that a resumed producer would leave out.
            resumed = [flow.producer for flow in self._graph.incoming[part.name] if flow.edge in edges]
            resumed = [name for name in resumed if self._parts[name].resumed is not None]
            for name in resumed:
                self._losses.add_fresh(name, exc)
            if not resumed:
                self._lose(part, attempt, _cut_off(part, exc))
        except StagemeshError as exc:
            self._lose(part, attempt, _cut_off(part, exc))
        else:
            part.told = {**part.told, **{each.binding.edge: each.binding.attempt for each in request.inputs}}
        self._wake()

    async def _rebind_outputs(self, part: StepState, edges: Sequence[str]) -> None:
        """A step whose consumers are replaced feeds the new ones from the first chunk on, or runs anew without it."""
        request = self._steps.rebind_outputs(part, edges)
        try:
            await self._rebind(part, request)
        except StagemeshError as exc:
            self._losses.add_fresh(part.name, _cut_off(part, exc))
        else:
            part.told = {**part.told, **{each.edge: each.attempt for each in request.outputs}}
        self._wake()

    async def _rebind(self, part: StepState, request: stage_pb2.RebindStepRequest) -> None:
        if part.replica.gone is not None:
            raise copy(part.replica.gone)
        await part.replica.client.rebind(request, timeout_s=_REBIND_S)
        assert part.notes is not None, "its replica is chosen"
        edges = [*(each.binding.edge for each in request.inputs), *(each.edge for each in request.outputs)]
        part.notes.note_rebound(edges)
        _log.info("stage %s goes on with other neighbours on %s", part.name, ", ".join(edges))

    # -- losses

    def _lose(self, part: StepState, attempt: int, error: StagemeshError) -> None:
        """An attempt at a part failed: it is lost, or the request has failed with it."""
        if part.attempt != attempt or part.phase is Phase.FINISHED or self._losses.has(part.name):
            return
        # A copy, for the error itself holds on to the frames that it came through: to this run.
        failure = Failure(part.name, copy(error))
        if is_death(error, part.replica) and part.at_work and part.replica not in part.died_with:
            part.died_with |= {part.replica}
            if part.alone:
                failure = Failure(part.name, _poison(part, error))
        if failure.error.reason == POISON_REQUEST:
            self._failures.append(failure)
        elif part.resumed is not None and rejects_checkpoint(error):
            self._losses.add_fresh(part.name, error)
        elif failure.mendable:
            if error.reason != NOT_REBOUND:
                part.avoid |= {part.replica}
            self._losses.add(failure)
        elif failure.standing is StageOutcome.CANCELLED:
            self._losses.add_doubtful(failure)
        else:
            self._failures.append(failure)
        self._wake()

    def _fail(self, part: StepState, error: StagemeshError) -> None:
        self._failures.append(Failure(part.name, error))
        self._wake()

    async def _wait_for_surer_cause(self) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(_SETTLE_S):
                while self._stopped is None and not root_cause(self._failures).conclusive:
                    self._changed = asyncio.get_running_loop().create_future()
                    await self._changed

    def _late(self) -> DeadlineError:
        stages = ", ".join(name for name, part in sorted(self._parts.items()) if part.phase is not Phase.FINISHED)
        waits = [part for part in self._parts.values() if part.phase is Phase.UNPLACED]
        why = "".join(f"; stage {part.name!r} waits for a replica" for part in waits)
        return DeadlineError(f"the request took longer than its {self._timeout_s:.1f} s; still at work: {stages}{why}")

    # -- the end

    async def _let_go(self, error: StagemeshError) -> None:
        """Stops the steps that run still. The client hears of the error once they have, or soon."""
        assert self._group is not None, "only while it runs"
        failed = {failure.stage for failure in self._failures}
        left = [SupersededAttempt(part.replica, part.attempt) for part in self._parts.values() if part.at_work]
        left = [former for former in left if former.replica.stage not in failed]
        left += [former for part in self._parts.values() for former in part.former]
        cancels = [self._group.create_task(self._cancel_step(former, error)) for former in left]
        cancels += self._leaving
        if not cancels:
            return
        _, late = await asyncio.wait(cancels, timeout=_CLIENT_WAITS_S)
        if late:
            self._record.close(error)
            await asyncio.wait(late)

    async def _cancel_step(self, former: SupersededAttempt, error: StagemeshError | None) -> None:
        if former.replica.gone is not None:
            return
        request = stage_pb2.CancelStepRequest(
            request_id=self._request.request_id,
            attempt=former.attempt,
            reason=error.message if error is not None else "another attempt has taken its place",
        )
        try:
            await former.replica.client.cancel(request, timeout_s=_LET_GO_S)
        except StagemeshError as exc:
            _log.warning("replica %s may still hold the request: %s", former.replica.name, exc.message)

    # -- tasks

    def _spawn(self, part: StepState, work: Coroutine[object, object, None]) -> asyncio.Task[None]:
        assert self._group is not None, "only while it runs"
        task = self._group.create_task(work, name=f"{part.name}/{part.attempt}")
        tasks = self._tasks[part.name]
        tasks.add(task)
        task.add_done_callback(tasks.discard)
        return task

    def _spawn_former(self, former: SupersededAttempt) -> None:
        assert self._group is not None, "only while it runs"
        task = self._group.create_task(self._cancel_step(former, None), name="former")
        self._leaving.add(task)
        task.add_done_callback(self._leaving.discard)

    def _no_longer_busy(self, stage: str, task: "asyncio.Task[None]") -> None:
        if self._busy.get(stage) is task:
            del self._busy[stage]
            self._wake()


def _cancel(tasks: "set[asyncio.Task[None]]") -> None:
    for task in list(tasks):
        task.cancel()


def _cut_off(part: StepState, error: StagemeshError) -> UnavailableError:
    return UnavailableError(
        f"stage {part.name!r} cannot go on with other neighbours: {error.message}", reason=NOT_REBOUND
    )


def _replaced(stage: str) -> UnavailableError:
    return UnavailableError(f"what stage {stage!r} made from a checkpoint is needed from the start", reason=NOT_REBOUND)


def _poison(part: StepState, error: StagemeshError) -> UnavailableError:
    return UnavailableError(
        f"{len(part.died_with)} processes of stage {part.name!r} died while they ran the request, the last one with "
        f"nothing else to do ({error.message}); the request seems to be why",
        reason=POISON_REQUEST,
        metadata={"stage": part.name},
    )
