"""The states of a replica: it loads, serves, drains, sleeps, and shuts down or fails."""

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from stagemesh.common.errors import (
    InvalidRequestError,
    NotReadyError,
    StagemeshError,
    UnavailableError,
    UnsupportedError,
)
from stagemesh.common.process.stage_process import ReplicaState, StageConfig
from stagemesh.common.tasks import wait_within
from stagemesh.services.engines.abilities import SleepControl
from stagemesh.services.engines.base import Engine
from stagemesh.services.stage.rollout import RolloutRelease
from stagemesh.services.stage.step.journal import drained_error
from stagemesh.services.stage.step.run import StepRun
from stagemesh.services.stage.step.run_index import RunIndex

_log = logging.getLogger(__name__)

AbilityT = TypeVar("AbilityT")

PLANNED_S = 2.0
"""The time after the beginning of a drain in which orchestrators may still send steps that they planned before, in
seconds. They receive the replica's state within milliseconds."""
_PAUSE_S = 2.0
"""Time limit for running steps to pause before they are stopped, in seconds. Other replicas resume the paused steps."""
_IDLE_LEVEL = 1
"""The level at which an idle replica sleeps: its weights stay in host memory, so that it wakes quickly."""
_STANDING_BY = "standing by"


class ReplicaLifecycle:
    """The state of one replica and its changes. Stops, pauses and hands over steps if a change requires it.

    `runs` contains the replica's steps, and `where` contains the names of the stage and of the replica for errors.
    """

    def __init__(self, config: StageConfig, engine: Engine, runs: RunIndex, where: Mapping[str, str]) -> None:
        self.state = ReplicaState.LOADING
        self.detail = "starting"
        self.on_serving: Callable[[bool], None] = lambda _: None
        """Called with False when the replica stops accepting new steps, and with True when it accepts them again."""
        self.rollout = RolloutRelease()
        """The verdicts of the orchestrators whether a rolling update may count this replica as ready."""
        self._config, self._engine, self._runs, self._where = config, engine, runs, where
        self._is_closed = False
        self._stands_by = False
        """Whether the replica sleeps, or is about to, because it was idle."""
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

    # -- loading

    def report(self, line: str) -> None:
        """Sets the detail of the state, for example the progress of loading."""
        self.detail = line
        _log.info("%s", line)

    async def end_loading(self) -> None:
        """Sets the state to READY, or puts the engine to sleep if the config says that the replica sleeps when idle.

        Raises UnsupportedError if the engine cannot sleep, and the errors of `SleepControl`.
        """
        if self._config.sleep_when_idle_s is not None:
            await self._idle_sleep_control().sleep(_IDLE_LEVEL)
            self._set_state(ReplicaState.ASLEEP, _STANDING_BY, stands_by=True)
        elif self.state is ReplicaState.LOADING:
            self._set_state(ReplicaState.READY)

    def fail(self, detail: str) -> None:
        """Sets the state to FAILED for good."""
        self._drained_by_operator = False
        self._set_state(ReplicaState.FAILED, detail)

    # -- accepting steps

    @property
    def is_available(self) -> bool:
        """Whether the replica accepts steps, or does so as soon as an orchestrator needs it."""
        return self.state is ReplicaState.READY or self._stands_by

    def check_ready(self) -> None:
        """Raises NotReadyError unless the replica accepts steps. The error contains the replica's state."""
        if self.state is not ReplicaState.READY:
            raise NotReadyError(
                f"replica {self._config.replica} of stage {self._config.stage} is {self.state.name.lower()}"
                f"{': ' if self.detail else ''}{self.detail}; try again when it is ready"
            )

    def check_accepts(self) -> None:
        """Raises NotReadyError unless the replica accepts a step, which may have been planned before a drain."""
        if not self._accepts_planned:
            self.check_ready()

    def check_loaded(self) -> None:
        """Raises NotReadyError if the engine is not loaded. The error contains the replica's state."""
        if self._is_closed or self.state in {ReplicaState.LOADING, ReplicaState.FAILED}:
            self.check_ready()

    def require(self, ability: AbilityT | None, name: str, *, ready: bool = True) -> AbilityT:
        """Returns `ability`, an optional interface of the engine, if it can be used now.

        Raises UnsupportedError if `ability` is None, because then the engine does not have this interface. `name` is
        the interface's name in the error. Raises NotReadyError if the engine is not loaded, or if `ready` is True and
        the replica does not accept steps.
        """
        self.check_loaded()
        if ability is None:
            raise UnsupportedError(
                f"engine {self._config.engine} of stage {self._config.stage} does not have the ability {name}",
                metadata={"engine": self._config.engine, "ability": name},
            )
        if ready:
            self.check_ready()
        return ability

    def note_use(self) -> None:
        """Records that a step has begun or ended, so that the replica does not sleep soon."""
        self._used_at_s = asyncio.get_running_loop().time()

    # -- shutdown and drains

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
        await wait_within(grace_s - pause_s, self._wait_finished())
        self._accepts_planned = False
        if pause_s and self._runs.running():
            await self._pause_runs(pause_s)
        left = self._runs.running()
        await self.stop(
            left, UnavailableError(f"replica {self._config.replica} is shutting down", reason="SHUTTING_DOWN")
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
            self.check_ready()
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
            self.check_ready()

    # -- sleep

    async def sleep(self, level: int, *, drain: bool) -> Sequence[str]:
        """Rejects new steps, waits until no step is running, and puts the engine to sleep at this level.

        Returns the tags of the engine's parts that are asleep. If the call is cancelled while it waits, the replica
        accepts steps again. Raises NotReadyError (STEPS_RUNNING) if steps are running and `drain` is False. Raises the
        errors of `require` if the replica is not ready or the engine cannot sleep.
        """
        engine = self.require(self._engine.abilities.sleep, "sleep")
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
        engine = self.require(self._engine.abilities.sleep, "sleep", ready=False)
        async with self._falling_asleep:
            try:
                await engine.wake(tags)
            finally:
                self._resume_if_awake(engine)
            return engine.asleep()

    async def sleep_when_idle(self, idle_s: float) -> str:
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

    async def stop(self, runs: Sequence[StepRun], cause: StagemeshError) -> None:
        """Stops steps with the error `cause`, and waits until they have ended."""
        for run in runs:
            run.stop(cause)
        await wait_ended(runs)

    def close(self) -> None:
        """Cancels what a drain has scheduled, and the timer of the rollout. No ability can be used any more."""
        self._is_closed = True
        self.rollout.close()
        self._hand_over_later(None)

    # -- inner workings

    def _idle_sleep_control(self) -> SleepControl:
        """Returns the engine's control by which the replica sleeps when it is idle.

        Raises UnsupportedError if the engine cannot sleep, and the errors of `SleepControl.check_sleep`.
        """
        control = self._engine.abilities.sleep
        if control is None:
            raise UnsupportedError(
                f"engine {self._config.engine} of stage {self._config.stage} cannot sleep; remove sleep_when_idle_s "
                "from the replica's config",
                metadata={"engine": self._config.engine, "ability": "sleep"},
            )
        control.check_sleep(_IDLE_LEVEL)
        return control

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
        self.check_ready()
        running = self._runs.running()
        if running and not drain:
            raise NotReadyError(
                f"{len(running)} steps run on replica {self._config.replica} of stage {self._config.stage}; wait for "
                "them, or set drain so that the call waits",
                reason="STEPS_RUNNING",
                metadata={"running": str(len(running))},
            )
        self._set_state(ReplicaState.ASLEEP, why)
        self.on_serving(False)
        await wait_ended(running)

    def _resume_if_awake(self, engine: SleepControl) -> None:
        """Accepts steps again if the state is ASLEEP and no part of the engine is asleep. Does nothing if the replica
        is shutting down or has failed.
        """
        if self.state is ReplicaState.ASLEEP and not engine.asleep():
            self._set_state(ReplicaState.READY)
            self.note_use()
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
                await wait_ended(running)
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
        await self.stop(self._runs.running(), drained_error(self._where))

    @property
    def _can_pause(self) -> bool:
        return self._engine.abilities.can_pause and self.state is not ReplicaState.FAILED

    async def _pause_runs(self, within_s: float) -> None:
        """Pauses the running steps, so that other replicas can resume them. Waits at most `within_s` seconds for the
        steps to end.
        """
        runs = self._runs.running()
        for run in runs:
            run.request_pause()
        await wait_within(within_s, wait_ended(runs))


async def wait_ended(runs: Sequence[StepRun]) -> None:
    """Waits until all of these steps have ended."""
    await asyncio.gather(*(run.ended() for run in runs))
