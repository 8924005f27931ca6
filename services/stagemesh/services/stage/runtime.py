"""A stage replica, independent of gRPC. Runs steps, applies operator controls, and reports the replica's state and
load.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Callable, Sequence
from itertools import starmap
from typing import TypeVar

from stagemesh.common.errors import (
    ENGINE_DIED,
    CancelledRequestError,
    InvalidRequestError,
    NotReadyError,
    OverloadedError,
    StagemeshError,
    UnavailableError,
    UnsupportedError,
)
from stagemesh.common.media.store import MediaStore
from stagemesh.common.notification import Journal
from stagemesh.common.plugins.connectors import ConnectorName
from stagemesh.common.plugins.descriptors import Signature
from stagemesh.common.process import settings
from stagemesh.common.process.host import RecentMemory
from stagemesh.common.process.stage_process import ReplicaState, StageConfig
from stagemesh.common.requests.request_checks import check_choice_id
from stagemesh.connectors.arena.memory import pin_if_cuda
from stagemesh.connectors.data_plane import DataPlane
from stagemesh.connectors.flow.edge_meters import EdgeMeter
from stagemesh.services.engines.abilities import SleepControl
from stagemesh.services.engines.base import Engine, EngineLoad
from stagemesh.services.stage.health import RolloutRelease, StallWatch
from stagemesh.services.stage.step.checks import check_handover, check_rebinding, check_spec, engine_result_check
from stagemesh.services.stage.step.edges import StepEdges
from stagemesh.services.stage.step.paused_states import PausedStates, drained_error
from stagemesh.services.stage.step.run import StepRun
from stagemesh.services.stage.step.run_index import RunIndex
from stagemesh.services.stage.step.spec import Rebinding, StepSpec
from stagemesh.services.stage.step.timings import FrameIntervals
from stagemesh.v1 import control_pb2, stage_pb2

_log = logging.getLogger(__name__)

AbilityT = TypeVar("AbilityT")

_RELEASE_S = 5.0
"""Time limit for the steps of a failed engine to end, in seconds."""
PLANNED_S = 2.0
"""The time after the beginning of a drain in which orchestrators may still send steps that they planned before, in
seconds. They receive the replica's state within milliseconds."""
_PAUSE_S = 2.0
"""Time limit for running steps to pause before they are stopped, in seconds. Other replicas resume the paused steps."""
LEAVE_S = 0.2
"""The time for which the cancellation of steps without callers waits for the callers to leave, in seconds."""
_MIN_RETRY_S, _MAX_RETRY_S = 0.1, 10.0
_IDLE_LEVEL = 1
"""The level at which an idle replica sleeps: its weights stay in host memory, so that it wakes quickly."""
_STANDING_BY = "standing by"


class StageRuntime:
    """One replica of one stage. Owns the engine and the data plane, and awaits every run that it starts."""

    def __init__(self, engine: Engine, data_plane: DataPlane, config: StageConfig, signature: Signature) -> None:
        self.data_plane, self.config, self.signature = data_plane, config, signature
        self.state = ReplicaState.LOADING
        self.detail = "starting"
        self._stands_by = False
        """Whether the replica sleeps, or is about to, because it was idle."""
        self.closed = asyncio.Event()
        self.on_serving: Callable[[bool], None] = lambda _: None
        """Called with False when the replica stops accepting new steps, and with True when it accepts them again."""
        self.on_shutdown: Callable[[], None] = lambda: None
        """Callback that terminates the process in the same way as the signal SIGTERM."""
        self.engine = engine
        self.where = {"stage": config.stage, "replica": config.replica}
        """The names of the stage and of the replica, for log records and errors."""
        self._runs, self._results = RunIndex(), engine_result_check(config, signature)
        self._frame_intervals, self._memory = FrameIntervals(), RecentMemory()
        self.states = PausedStates()
        """The states from which paused requests can resume."""
        writer = f"{config.pipeline}.{config.replica}"
        self.store = MediaStore(config.media, writer=writer, spool=settings.spool_dir()) if config.media else None
        """The pipeline's store for media, or None if it has none."""
        self.rollout = RolloutRelease()
        """The verdicts of the orchestrators whether a rolling update may count this replica as ready."""
        self._drained_by_operator = False
        """Whether an operator has drained the replica. False if the replica drains because it is shutting down."""
        self._accepts_planned = False
        """Whether the draining replica still accepts steps, which orchestrators may have planned before they received
        its state. False after the drain has begun to hand the running steps over to other replicas."""
        self._drained_at_s = 0.0
        """The time at which the last drain began, on the event loop's clock."""
        self._handing_over: asyncio.Task[None] | None = None
        self._used_at_s = 0.0
        """The time at which a step last began or ended, or at which the replica woke, on the event loop's clock."""
        # A wake call that arrives while the replica is falling asleep waits until the replica is asleep.
        self._falling_asleep = asyncio.Lock()

    # -- lifecycle

    async def start(self) -> None:
        """Loads the engine and sets the replica's state to READY. If the engine fails to load, sets the state to FAILED
        and raises a StagemeshError.
        """
        try:
            if self.store is not None:
                self.store.check_packages()
                self.store.sweep()
            if use_partitions := self.engine.abilities.use_partitions:
                use_partitions(self.data_plane.arena)
            await self.engine.start(self._report)
            check_handover(self.signature, self.engine.abilities, engine=self.config.engine)
            if self.config.sleep_when_idle_s is not None:
                await self._idle_sleep_control().sleep(_IDLE_LEVEL)
        except StagemeshError as exc:
            self._fail(exc.message)
            raise exc.located(**self.where) from exc
        except Exception as exc:
            _log.exception("the engine failed to load with an unexpected exception")
            self._fail(f"{type(exc).__name__}: {exc}")
            message = f"engine {self.config.engine} of stage {self.config.stage} failed to load: {self.detail}"
            raise NotReadyError(message, reason="LOAD_FAILED", metadata=self.where) from exc
        self._pin_arena()
        if self.config.sleep_when_idle_s is not None:
            self._set_state(ReplicaState.ASLEEP, _STANDING_BY, stands_by=True)
        elif self.state is ReplicaState.LOADING:
            self._set_state(ReplicaState.READY)

    @property
    def is_available(self) -> bool:
        """Whether the replica accepts steps, or does so as soon as an orchestrator needs it."""
        return self.state is ReplicaState.READY or self._stands_by

    async def watch_engine(self) -> None:
        """Waits until the engine fails or hangs, then ends all runs with an error.

        Always raises UnavailableError (ENGINE_DIED), which contains the cause.
        """
        cause = await self._wait_engine_failed()
        self._fail(cause)
        self.on_serving(False)
        error = UnavailableError(f"stage {self.config.stage}: {cause}", reason=ENGINE_DIED, metadata=self.where)
        with contextlib.suppress(TimeoutError):
            # An engine that hangs may not release its steps. These steps end with the process.
            async with asyncio.timeout(_RELEASE_S):
                await self._stop(self._runs.running(), error)
        raise error

    def begin_shutdown(self) -> None:
        """Sets the state to DRAINING for good, so that orchestrators plan no new steps on this replica. Idempotent.

        The replica still accepts steps that are already planned, until `finish_steps` ends them.
        """
        if self.state is ReplicaState.READY:
            self._begin_drain()
        self._drained_by_operator = False
        if self.state is not ReplicaState.FAILED:
            self._set_state(ReplicaState.DRAINING, "finishing its steps")
        self.on_serving(False)

    async def finish_steps(self, *, grace_s: float) -> None:
        """Begins the shutdown, and waits at most `grace_s` seconds for the running steps to end. Then rejects new
        steps.

        Planned steps are accepted for PLANNED_S seconds after the drain began, and while other steps run. If no
        orchestrator watches the replica, no step is planned.

        If the engine supports pausing, the last part of this time is used to pause the remaining steps. Steps that have
        neither ended nor paused are stopped.
        """
        self.begin_shutdown()
        running = self._runs.running()
        if running:
            _log.info("%d steps are still running; they have %.0f s to end", len(running), grace_s)
        pause_s = min(_PAUSE_S, grace_s / 5) if self._can_pause else 0.0
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(grace_s - pause_s):
                await self._wait_finished()
        self._accepts_planned = False
        if pause_s and self._runs.running():
            await self._pause_runs(pause_s)
        left = self._runs.running()
        await self._stop(
            left, UnavailableError(f"replica {self.config.replica} is shutting down", reason="SHUTTING_DOWN")
        )

    def start_drain(self, *, move_after_s: float | None = None) -> int:
        """Drains the replica for an operator until `end_drain` is called. Returns the number of running steps.

        Sets the state to DRAINING, so that orchestrators plan no new steps on this replica. The replica still accepts
        steps that are already planned. After `move_after_s` seconds, the running steps are handed over to other
        replicas and new steps are rejected. If `move_after_s` is None, no steps are handed over. If the replica is
        already being drained, only replaces `move_after_s`.

        Raises InvalidRequestError if `move_after_s` is negative, and NotReadyError if the replica does not accept
        steps.
        """
        if move_after_s is not None and not move_after_s >= 0:
            raise InvalidRequestError(f"move_after_s is {move_after_s:g}; it must be 0 (at once) or more")
        if not self._drained_by_operator:
            self._check_ready()
            self._begin_drain()
            self._set_state(ReplicaState.DRAINING, "drained by an operator")
            self._drained_by_operator = True
            self.on_serving(False)
        self._hand_over_later(move_after_s)
        return len(self._runs.running())

    def end_drain(self) -> None:
        """Lets the replica accept steps again after `start_drain`. Does nothing if the replica is not drained.

        Raises NotReadyError if the replica is shutting down.
        """
        if self._drained_by_operator:
            self._drained_by_operator = self._accepts_planned = False
            self._hand_over_later(None)
            self._set_state(ReplicaState.READY)
            self.on_serving(True)
        elif self.state is ReplicaState.DRAINING:
            self._check_ready()

    async def sleep(self, level: int, *, drain: bool) -> Sequence[str]:
        """Rejects new steps, waits until no step is running, and puts the engine to sleep at this level.

        Returns the tags of the engine's parts that are asleep. If the call is cancelled while it waits, the replica
        accepts steps again. Raises NotReadyError (STEPS_RUNNING) if steps are running and `drain` is False. Raises the
        errors of `require` if the replica is not ready or the engine cannot sleep.
        """
        engine = self.require(self.engine.abilities.sleep, "sleep")
        engine.check_sleep(level)
        async with self._falling_asleep:
            try:
                await self._pause(f"at level {level}", drain=drain)
                await engine.sleep(level)
            finally:
                self._resume_if_awake(engine)
            return engine.asleep()

    async def wake(self, tags: Sequence[str]) -> Sequence[str]:
        """Wakes the engine's parts with these tags, or all parts if `tags` is empty.

        Returns the tags of the parts that are still asleep. The replica accepts steps again when no part is asleep.
        Raises the errors of `require` if the engine is not loaded or cannot sleep.
        """
        engine = self.require(self.engine.abilities.sleep, "sleep", ready=False)
        async with self._falling_asleep:
            try:
                await engine.wake(tags)
            finally:
                self._resume_if_awake(engine)
            return engine.asleep()

    async def close(self) -> None:
        """Stops all steps, then closes the engine and the data plane. May be called more than once."""
        if self.closed.is_set():
            return
        self.closed.set()
        self.rollout.close()
        self._hand_over_later(None)
        await self.finish_steps(grace_s=0)
        self._runs.close()
        await self.engine.close()
        await self.data_plane.close()

    # -- steps

    def attach(self, spec: StepSpec, *, time_left_s: float | None) -> Journal[bytes]:
        """Starts a step. If a step with the same id and content is running or stored, attaches to that step instead.

        Returns the step's events as serialized ExecuteStepResponses. The caller must begin to read them at once: the
        step is cancelled ABANDON_S seconds after its last reader has stopped. `time_left_s` is the time until the
        deadline in seconds, or None without a deadline.
        """
        deadline_s = None if time_left_s is None else asyncio.get_running_loop().time() + time_left_s
        return self._admit(spec, deadline_s=deadline_s).journal

    async def execute(
        self, spec: StepSpec, *, time_left_s: float | None
    ) -> AsyncGenerator[stage_pb2.ExecuteStepResponse]:
        """Attaches to a step like `attach`. Yields all events of the step, beginning with its first event, and raises
        the step's error. Iterate within `contextlib.aclosing`.
        """
        async with contextlib.aclosing(self.attach(spec, time_left_s=time_left_s).follow()) as events:
            async for event in events:
                yield stage_pb2.ExecuteStepResponse.FromString(event)

    async def cancel(
        self, request_id: str, *, attempt: int, reason: str, when_left: bool = False
    ) -> stage_pb2.CancelStepResponse:
        """Stops the running steps of a request and waits until they have ended. Returns their number and their work.

        Stops only steps of `attempt` and of earlier attempts. An attempt of 0 means all attempts. `reason` is the
        message of the steps' error, or empty for a default message. If `when_left` is True, does nothing if one of
        these steps still has a caller after LEAVE_S seconds.
        """
        check_choice_id(request_id)
        runs = self._runs.running(request_id, up_to_attempt=attempt)
        if when_left and not await _all_left(runs):
            return stage_pb2.CancelStepResponse()
        self.states.forget(request_id)
        self._runs.release_edges(request_id, up_to_attempt=attempt)
        await self._stop(runs, CancelledRequestError(reason or "the step was cancelled", metadata=self.where))
        response = stage_pb2.CancelStepResponse(stopped=len(runs))
        for run in runs:
            for field, value in run.usage().ListFields():
                setattr(response.usage, field.name, getattr(response.usage, field.name) + value)
        return response

    def rebind(self, rebinding: Rebinding) -> None:
        """Binds edges of a step to other peer replicas. Raises InvalidRequestError if the rebinding is invalid, and the
        errors of `RunRegistry.rebind`.
        """
        check_rebinding(rebinding)
        self._runs.rebind(rebinding)

    # -- load and reports

    def load(self) -> stage_pb2.WatchLoadResponse:
        """Returns the current load of the engine and of the data plane."""
        is_loaded = self.state is not ReplicaState.LOADING
        engine = self.engine.load() if is_loaded else EngineLoad(0, 0)
        adapters = self.engine.abilities.adapters if is_loaded else None
        plane = self.data_plane
        arena, landing = plane.arena, plane.landing.present
        return stage_pb2.WatchLoadResponse(
            running=engine.running,
            queued=engine.queued,
            work_s=engine.work_s,
            arena_used_bytes=arena.used_bytes,
            arena_size_bytes=arena.size_bytes,
            credit_bytes=plane.consumer.credit_bytes,
            free_memory_bytes=self._memory.available_bytes,
            arena_largest_free_bytes=arena.largest_free_bytes,
            arena_waiting=arena.waiting,
            landing_used_bytes=landing.used_bytes if landing else 0,
            landing_size_bytes=landing.size_bytes if landing else 0,
            adapters=[adapter.name for adapter in adapters.list_adapters()] if adapters is not None else (),
            call_costs=starmap(_call_cost, sorted(engine.call_costs_s.items())),
            frame_audio_s=engine.frame_audio_s,
            audio_delay_s=engine.audio_delay_s,
            frame_intervals_s=self._frame_intervals.seconds,
            sent=starmap(_sent_chunks, plane.meters),
        )

    def reports(self, request_id: str = "") -> list[control_pb2.StepReport]:
        """Returns the status of the running steps of one request, or of all requests if `request_id` is empty."""
        return [run.report for run in self._runs.running(request_id)]

    def require(self, ability: AbilityT | None, name: str, *, ready: bool = True) -> AbilityT:
        """Returns `ability`, an optional interface of the engine, if it can be used now.

        Raises UnsupportedError if `ability` is None, because then the engine does not have this interface. `name` is
        the interface's name in the error. Raises NotReadyError if the engine is not loaded, or if `ready` is True and
        the replica does not accept steps.
        """
        if self.closed.is_set() or self.state in {ReplicaState.LOADING, ReplicaState.FAILED}:
            self._check_ready()
        if ability is None:
            raise UnsupportedError(
                f"engine {self.config.engine} of stage {self.config.stage} does not have the ability {name}",
                metadata={"engine": self.config.engine, "ability": name},
            )
        if ready:
            self._check_ready()
        return ability

    # -- internal

    def _idle_sleep_control(self) -> SleepControl:
        """Returns the engine's control by which the replica sleeps when it is idle.

        Raises UnsupportedError if the engine cannot sleep, and the errors of `SleepControl.check_sleep`.
        """
        control = self.engine.abilities.sleep
        if control is None:
            raise UnsupportedError(
                f"engine {self.config.engine} of stage {self.config.stage} cannot sleep; remove sleep_when_idle_s from "
                "the replica's config",
                metadata={"engine": self.config.engine, "ability": "sleep"},
            )
        control.check_sleep(_IDLE_LEVEL)
        return control

    async def _sleep_when_idle(self, idle_s: float) -> str:
        """Puts the replica to sleep whenever no step has run for `idle_s` seconds. Runs until it is cancelled.

        If the engine cannot fall asleep, returns the cause as a sentence for operators.
        """
        clock = asyncio.get_running_loop().time
        while True:
            is_idle = self.state is ReplicaState.READY and not self._runs.running()
            left_s = self._used_at_s + idle_s - clock() if is_idle else idle_s
            if left_s > 0:
                await asyncio.sleep(left_s)
                continue
            try:
                await self._fall_asleep()
            except StagemeshError as exc:
                return f"the engine cannot fall asleep: {exc.message}"

    async def _fall_asleep(self) -> None:
        """Stops the planning of new steps, and puts the engine to sleep unless a step arrives that was planned before.

        Does nothing if the replica begins to shut down or fails meanwhile.
        """
        self._begin_drain()
        self._set_state(ReplicaState.DRAINING, _STANDING_BY, stands_by=True)
        self.on_serving(False)
        used_at_s = self._used_at_s
        await self._wait_finished()
        if not self._stands_by:
            return
        self._accepts_planned = False
        self._set_state(ReplicaState.ASLEEP, _STANDING_BY, stands_by=True)
        control = self._idle_sleep_control()
        async with self._falling_asleep:
            try:
                if self._used_at_s == used_at_s:
                    await control.sleep(_IDLE_LEVEL)
            finally:
                self._resume_if_awake(control)

    async def _pause(self, why: str, *, drain: bool) -> None:
        """Sets the state to ASLEEP, so that new steps are rejected until `_resume_if_awake` is called. Then waits until
        no step is running.

        `why` is the detail that the replica reports with its state. Raises NotReadyError if steps are running and
        `drain` is False, or if the replica does not accept steps.
        """
        self._check_ready()
        running = self._runs.running()
        if running and not drain:
            raise NotReadyError(
                f"{len(running)} steps run on replica {self.config.replica} of stage {self.config.stage}; wait for "
                "them, or set drain so that the call waits",
                reason="STEPS_RUNNING",
                metadata={"running": str(len(running))},
            )
        self._set_state(ReplicaState.ASLEEP, why)
        self.on_serving(False)
        await _wait_ended(running)

    def _resume_if_awake(self, engine: SleepControl) -> None:
        """Accepts steps again if the state is ASLEEP and no part of the engine is asleep. Does nothing if the replica
        is shutting down or has failed.
        """
        if self.state is ReplicaState.ASLEEP and not engine.asleep():
            self._set_state(ReplicaState.READY)
            self._used_at_s = asyncio.get_running_loop().time()
            self.on_serving(True)

    def _set_state(self, state: ReplicaState, detail: str = "", *, stands_by: bool = False) -> None:
        self.state, self.detail, self._stands_by = state, detail, stands_by

    def _begin_drain(self) -> None:
        self._accepts_planned, self._drained_at_s = True, asyncio.get_running_loop().time()

    async def _wait_finished(self) -> None:
        """Waits until no step is running and orchestrators cannot have planned further ones."""
        while True:
            running = self._runs.running()
            planned_s = self._drained_at_s + PLANNED_S - asyncio.get_running_loop().time()
            if running:
                await _wait_ended(running)
            elif self._accepts_planned and self.rollout.is_watched and planned_s > 0:
                await asyncio.sleep(planned_s)
            else:
                return

    def _hand_over_later(self, move_after_s: float | None) -> None:
        if self._handing_over is not None:
            self._handing_over.cancel()
        self._handing_over = None
        if move_after_s is not None:
            self._handing_over = asyncio.create_task(self._hand_over(move_after_s), name="hand over running steps")

    async def _hand_over(self, after_s: float) -> None:
        await asyncio.sleep(after_s)
        self._accepts_planned = False
        if self._can_pause:
            await self._pause_runs(_PAUSE_S)
        await self._stop(self._runs.running(), drained_error(self.where))

    @property
    def _can_pause(self) -> bool:
        return self.engine.abilities.can_pause and self.state is not ReplicaState.FAILED

    async def _pause_runs(self, within_s: float) -> None:
        """Pauses the running steps, so that other replicas can resume them. Waits at most `within_s` seconds for the
        steps to end.
        """
        runs = self._runs.running()
        for run in runs:
            run.request_pause()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                await _wait_ended(runs)

    async def _wait_engine_failed(self) -> str:
        """Waits until the engine fails or hangs. Returns the cause as a sentence for operators. Meanwhile, puts the
        replica to sleep when it is idle, if its config says so.
        """
        waits = [asyncio.ensure_future(self.engine.wait_failed())]
        if self.config.stall_s:
            watch = StallWatch(self._runs.running, stall_s=self.config.stall_s, on_hung=self._stop_hung)
            waits.append(asyncio.ensure_future(watch.wait_stalled()))
        if self.config.sleep_when_idle_s is not None:
            waits.append(asyncio.ensure_future(self._sleep_when_idle(self.config.sleep_when_idle_s)))
        try:
            done, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            return done.pop().result()
        finally:
            for wait in waits:
                wait.cancel()
            await asyncio.gather(*waits, return_exceptions=True)

    def _stop_hung(self, run: StepRun) -> None:
        """Stops a step that hangs while other steps make progress. The step may succeed on another replica."""
        what = f"the engine has made no progress on the step for {self.config.stall_s:g} s (the stage's stall_s)"
        _log.error("step %s hangs: %s, but has made progress on later steps", run.step_id, what)
        run.stop(UnavailableError(f"{what}, but has made progress on later steps", reason="STEP_HANGS"))

    def _pin_arena(self) -> None:
        """Page-locks the arena if there is a GPU, so that the GPU can copy tensors directly into the arena. If
        page-locking fails, only logs a warning.
        """
        arena = self.data_plane.arena
        try:
            pin_if_cuda(arena.address, arena.file_bytes)
        except NotReadyError as exc:
            _log.warning("the arena is not page-locked: %s", exc.message)

    def _admit(self, spec: StepSpec, *, deadline_s: float | None) -> StepRun:
        check_spec(spec, self.signature, engine=self.config.engine, abilities=self.engine.abilities)
        known = self._runs.find(spec)
        if known is not None:
            known.extend(deadline_s=deadline_s)
            return known
        if not self._accepts_planned:
            self._check_ready()
        self._check_capacity()
        run = StepRun(
            spec,
            engine=self.engine,
            data_plane=self.data_plane,
            signature=self.signature,
            states=self.states,
            store=self.store,
            config=self.config,
            results=self._results,
            where=self.where,
            frame_intervals=self._frame_intervals,
        )
        self._runs.add(run)
        self._used_at_s = asyncio.get_running_loop().time()
        run.start(deadline_s=deadline_s, on_ended=self._retire)
        return run

    def _retire(self, run: StepRun, left: StepEdges | None) -> None:
        self._runs.retire(run, left)
        self._used_at_s = asyncio.get_running_loop().time()

    def _check_ready(self) -> None:
        """Raises NotReadyError unless the replica accepts steps. The error contains the replica's state."""
        if self.state is not ReplicaState.READY:
            raise NotReadyError(
                f"replica {self.config.replica} of stage {self.config.stage} is {self.state.name.lower()}"
                f"{': ' if self.detail else ''}{self.detail}; try again when it is ready"
            )

    def _check_capacity(self) -> None:
        held = len(self._runs.running())
        if held >= self.config.max_queued:
            retry_after_s = min(_MAX_RETRY_S, max(_MIN_RETRY_S, self.engine.load().work_s or 0.0))
            raise OverloadedError(
                f"stage {self.config.stage} has {held} steps, its max_queued; try again in {retry_after_s:.1f} s",
                retry_after_s=retry_after_s,
            )

    def _report(self, line: str) -> None:
        self.detail = line
        _log.info("%s", line)

    def _fail(self, detail: str) -> None:
        self._drained_by_operator = False
        self._set_state(ReplicaState.FAILED, detail)

    async def _stop(self, runs: Sequence[StepRun], cause: StagemeshError) -> None:
        for run in runs:
            run.stop(cause)
        await _wait_ended(runs)


async def _all_left(runs: Sequence[StepRun]) -> bool:
    """Waits at most LEAVE_S seconds until no step has a caller. Returns whether this is the case."""
    # The caller that has ended its calls may be ahead of them.
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(LEAVE_S):
            await asyncio.gather(*(run.left() for run in runs))
    return not any(run.has_callers for run in runs)


async def _wait_ended(runs: Sequence[StepRun]) -> None:
    await asyncio.gather(*(run.ended() for run in runs))


def _sent_chunks(edge: str, _connector: ConnectorName, meter: EdgeMeter) -> stage_pb2.SentChunks:
    return stage_pb2.SentChunks(edge=edge, chunks=meter.transfer_s.count, size_bytes=meter.size_bytes)


def _call_cost(frames: int, seconds: float) -> stage_pb2.CallCost:
    return stage_pb2.CallCost(frames=frames, seconds=seconds)
