"""What a stage replica does, free of gRPC: takes orders, keeps runs, reports its state and its load."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Callable, Sequence

from stagemesh.common.descriptors import Signature
from stagemesh.common.errors import (
    CancelledRequestError,
    InvalidRequestError,
    NotReadyError,
    OverloadedError,
    StagemeshError,
    UnavailableError,
)
from stagemesh.common.stage_config import StageConfig
from stagemesh.connectors.arena.pinning import can_pin, pin
from stagemesh.connectors.data_plane import DataPlane
from stagemesh.services.engines.base import Engine, EngineLoad
from stagemesh.services.stage.replica.hang_detection import StallWatch
from stagemesh.services.stage.replica.load import ReplicaState, StageLoad, free_memory_bytes
from stagemesh.services.stage.replica.paused_states import PausedStates
from stagemesh.services.stage.step.checks import check_order, check_rebinding, check_request_id
from stagemesh.services.stage.step.events import StepEvent
from stagemesh.services.stage.step.registry import RunRegistry
from stagemesh.services.stage.step.reports import StepReport
from stagemesh.services.stage.step.run import StepRun, handed_on
from stagemesh.services.stage.step.spec import Rebinding, StepSpec

_log = logging.getLogger(__name__)

_LET_GO_S = 5.0
_PAUSE_S = 2.0
_MIN_RETRY_S, _MAX_RETRY_S = 0.1, 10.0


class StageRuntime:
    """One replica of one stage. Owns the engine and the data plane, and awaits every run that it starts."""

    def __init__(self, engine: Engine, data_plane: DataPlane, config: StageConfig, signature: Signature) -> None:
        self.data_plane, self.config, self.signature = data_plane, config, signature
        self.state = ReplicaState.LOADING
        self.detail = "starting"
        self.closed = asyncio.Event()
        self.on_serving: Callable[[bool], None] = lambda _: None
        """Told when a READY replica stops taking steps, and when it takes them again."""
        self.on_shutdown: Callable[[], None] = lambda: None
        """Asked to have the process end as SIGTERM does."""
        self._engine = engine
        self._where = {"stage": config.stage, "replica": config.replica}
        self._book = RunRegistry()
        self.states = PausedStates()
        """Of requests that can go on."""
        self._held = False
        """Whether it drains because somebody asked it to, and not because it shuts down."""
        self._moved = False
        """Whether what it ran has been handed on meanwhile."""
        self._moving: asyncio.Task[None] | None = None

    @property
    def engine(self) -> Engine:
        """What computes."""
        return self._engine

    # -- its life

    async def start(self) -> None:
        """Loads the engine, which makes the replica READY; raises NotReadyError (LOAD_FAILED) and is FAILED then."""
        try:
            if use_partitions := self._engine.abilities.use_partitions:
                use_partitions(self.data_plane)
            await self._engine.start(self._report)
        except StagemeshError as exc:
            self._fail(exc.message)
            raise exc.located(**self._where) from exc
        except Exception as exc:
            _log.exception("the engine failed to load in a way that it does not name")
            self._fail(f"{type(exc).__name__}: {exc}")
            message = f"engine {self.config.engine} of stage {self.config.stage} failed to load: {self.detail}"
            raise NotReadyError(message, reason="LOAD_FAILED", metadata=self._where) from exc
        self._pin_arena()
        if self.state is ReplicaState.LOADING:
            self.state, self.detail = ReplicaState.READY, ""

    async def watch_engine(self) -> None:
        """Runs until the engine dies or hangs: fails every run, and raises UnavailableError with the cause."""
        cause = await self._end_of_engine()
        self._fail(cause)
        self.on_serving(False)
        error = UnavailableError(f"stage {self.config.stage}: {cause}", reason="ENGINE_DIED", metadata=self._where)
        with contextlib.suppress(TimeoutError):
            # One that hangs may not let go of them; they end with the process then.
            async with asyncio.timeout(_LET_GO_S):
                await self._stop(self._book.running(), error)
        raise error

    async def drain(self, *, grace_s: float) -> None:
        """Refuses new steps, gives those that run `grace_s`, the last of it for pausing, and stops the rest."""
        self._held = False
        if self.state is not ReplicaState.FAILED:
            self.state, self.detail = ReplicaState.DRAINING, "finishing what runs"
        running = self._book.running()
        if running:
            _log.info("%d steps run still; they have %.0f s", len(running), grace_s)
            pause_s = min(_PAUSE_S, grace_s / 5) if self._can_pause else 0.0
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(grace_s - pause_s):
                    await _ended(running)
            if pause_s:
                await self._hand_on(pause_s)
        left = self._book.running()
        await self._stop(left, UnavailableError(f"replica {self.config.replica} shuts down", reason="SHUTDOWN"))

    def hold(self, *, move_after_s: float | None = None) -> int:
        """Says that it drains, so that nothing more is planned here; steps that come still are taken, for they were
        planned before. What runs after `move_after_s` is handed on, and what comes then is refused; None for never.
        Returns how many run. `release` ends it; holding twice is harmless, and the latter time counts.
        """
        if move_after_s is not None and not move_after_s >= 0:
            raise InvalidRequestError(f"move_after_s is {move_after_s:g}; it must be 0 for at once, or more")
        if not self._held:
            self.check_ready()
            self.state, self.detail, self._held = ReplicaState.DRAINING, "drained by an operator", True
            self.on_serving(False)
        self._move_later(move_after_s)
        return len(self._book.running())

    def release(self) -> None:
        """Ends `hold`; harmless where there was none. Raises NotReadyError where the replica shuts down."""
        if self._held:
            self._held = self._moved = False
            self._move_later(None)
            self.state, self.detail = ReplicaState.READY, ""
            self.on_serving(True)
        elif self.state is ReplicaState.DRAINING:
            self.check_ready()

    async def pause(self, why: str, *, drain: bool) -> None:
        """Takes no more steps, and returns when none runs; `resume` ends it.

        Raises NotReadyError (STEPS_RUNNING) where some run and `drain` is not set.
        """
        self.check_ready()
        running = self._book.running()
        if running and not drain:
            raise NotReadyError(
                f"{len(running)} steps run on replica {self.config.replica} of stage {self.config.stage}; wait for "
                "them, or have the call drain them",
                reason="STEPS_RUNNING",
                metadata={"running": str(len(running))},
            )
        self.state, self.detail = ReplicaState.ASLEEP, why
        self.on_serving(False)
        await _ended(running)

    def resume(self) -> None:
        """Takes steps again after `pause`, unless the replica shuts down or has failed meanwhile."""
        if self.state is ReplicaState.ASLEEP:
            self.state, self.detail = ReplicaState.READY, ""
            self.on_serving(True)

    async def close(self) -> None:
        """Stops everything and frees the engine and the data plane. Closing twice is harmless."""
        if self.closed.is_set():
            return
        self.closed.set()
        self._move_later(None)
        await self.drain(grace_s=0)
        self._book.close()
        await self._engine.close()
        await self.data_plane.close()

    # -- steps

    def execute(self, order: StepSpec, *, time_left_s: float | None) -> AsyncGenerator[StepEvent]:
        """The events of a step, from its first one; starts it unless it is known. Raises what it failed with.

        Iterate at once, within `contextlib.aclosing`: the step is cancelled when its last caller leaves.
        """
        deadline_s = None if time_left_s is None else asyncio.get_running_loop().time() + time_left_s
        return self._admit(order, deadline_s=deadline_s).journal.follow()

    async def cancel(self, request_id: str, *, attempt: int, reason: str) -> int:
        """Stops a request's steps of this attempt and those before it (0: all); returns, once they ended, how many."""
        check_request_id(request_id)
        self.states.forget(request_id)
        self._book.release(request_id, up_to_attempt=attempt)
        runs = list(self._book.of_request(request_id, up_to_attempt=attempt))
        await self._stop(runs, CancelledRequestError(reason or "the step was cancelled", metadata=self._where))
        return len(runs)

    def rebind(self, rebinding: Rebinding) -> None:
        """Binds edges of a step that runs, or has left something to be sent again, to other replicas; see `StepEdges`.

        Raises NotFoundError (UNKNOWN_STEP) where there is no such step.
        """
        check_rebinding(rebinding)
        self._book.of_step(rebinding).rebind(rebinding)

    # -- figures

    def load(self) -> StageLoad:
        """The load at this moment."""
        engine = EngineLoad(0, 0) if self.state is ReplicaState.LOADING else self._engine.load()
        plane = self.data_plane
        arena, landing = plane.arena_stats, plane.landing_stats
        return StageLoad(
            running=engine.running,
            queued=engine.queued,
            work_s=engine.work_s,
            arena_used_bytes=arena.used_bytes,
            arena_size_bytes=arena.size_bytes,
            credit_bytes=plane.credit_bytes,
            free_memory_bytes=free_memory_bytes(),
            arena_largest_free_bytes=arena.largest_free_bytes,
            arena_waiting=arena.waiting,
            landing_used_bytes=landing.used_bytes if landing else 0,
            landing_size_bytes=landing.size_bytes if landing else 0,
        )

    def reports(self, request_id: str = "") -> list[StepReport]:
        """Where the steps that run stand, of one request or of all."""
        runs = self._book.of_request(request_id) if request_id else self._book.running()
        return [run.report for run in runs]

    # -- inner workings

    def _move_later(self, move_after_s: float | None) -> None:
        if self._moving is not None:
            self._moving.cancel()
        self._moving = None
        if move_after_s is not None:
            self._moving = asyncio.create_task(self._move(move_after_s), name="hand on what runs")

    async def _move(self, after_s: float) -> None:
        await asyncio.sleep(after_s)
        self._moved = True
        if self._can_pause:
            await self._hand_on(_PAUSE_S)
        await self._stop(self._book.running(), handed_on(self._where))

    @property
    def _can_pause(self) -> bool:
        return self._engine.abilities.can_pause and self.state is not ReplicaState.FAILED

    async def _hand_on(self, within_s: float) -> None:
        """Has what runs pause, so that it goes on elsewhere from there."""
        runs = self._book.running()
        for run in runs:
            run.hand_on()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                await _ended(runs)

    async def _end_of_engine(self) -> str:
        """Why the engine is of no use any more, once it is not."""
        waits = [asyncio.ensure_future(self._engine.wait_failed())]
        if self.config.stall_s:
            watch = StallWatch(self._book.running, stall_s=self.config.stall_s, on_hung=self._give_up)
            waits.append(asyncio.ensure_future(watch.wait_stalled()))
        try:
            done, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            return done.pop().result()
        finally:
            for wait in waits:
                wait.cancel()
            await asyncio.gather(*waits, return_exceptions=True)

    def _give_up(self, run: StepRun) -> None:
        """A step hangs by itself; elsewhere it may not."""
        what = f"the engine has said nothing of the step for {self.config.stall_s:g} s (the stage's stall_s)"
        _log.error("step %s hangs: %s, and gets on with later ones", run.order.step_id, what)
        run.stop(UnavailableError(f"{what}, and got on with later ones", reason="STEP_HANGS"))

    def _pin_arena(self) -> None:
        """Where the engine computes on a GPU, tensors leave it for the arena without a detour."""
        if can_pin():
            try:
                pin(self.data_plane.arena)
            except NotReadyError as exc:
                _log.warning("the arena is not page-locked: %s", exc.message)

    def _admit(self, order: StepSpec, *, deadline_s: float | None) -> StepRun:
        check_order(
            order,
            self.signature,
            engine=self.config.engine,
            resumable=self._engine.abilities.can_resume,
            pausable=self._engine.abilities.can_pause,
        )
        known = self._book.find(order)
        if known is not None:
            known.extend(deadline_s=deadline_s)
            return known
        if not self._held or self._moved:
            self.check_ready()
        self._check_room()
        run = StepRun(
            self.states.completed(order),
            engine=self._engine,
            data_plane=self.data_plane,
            signature=self.signature,
            where=self._where,
            on_state=self.states.keep,
            on_left=self._book.leave,
        )
        self._book.add(run)
        run.start(deadline_s=deadline_s, on_ended=self._ended)
        return run

    def _ended(self, run: StepRun) -> None:
        self._book.retire(run)
        if run.paused is None and not run.failed:
            self.states.forget(run.order.request_id)

    def check_ready(self) -> None:
        """Raises NotReadyError, with the state, unless steps are taken."""
        if self.state is not ReplicaState.READY:
            raise NotReadyError(
                f"replica {self.config.replica} of stage {self.config.stage} is {self.state.value}"
                f"{': ' if self.detail else ''}{self.detail}; try again when it is ready"
            )

    def check_loaded(self) -> None:
        """Raises NotReadyError while there is no engine to ask."""
        if self.closed.is_set() or self.state in {ReplicaState.LOADING, ReplicaState.FAILED}:
            self.check_ready()

    def _check_room(self) -> None:
        held = len(self._book.running())
        if held >= self.config.max_queued:
            retry_after_s = min(_MAX_RETRY_S, max(_MIN_RETRY_S, self._engine.load().work_s))
            raise OverloadedError(
                f"stage {self.config.stage} holds {held} steps, its max_queued; try again in {retry_after_s:.1f} s",
                retry_after_s=retry_after_s,
            )

    def _report(self, line: str) -> None:
        self.detail = line
        _log.info("%s", line)

    def _fail(self, detail: str) -> None:
        self._held = False
        self.state, self.detail = ReplicaState.FAILED, detail

    async def _stop(self, runs: Sequence[StepRun], cause: StagemeshError) -> None:
        for run in runs:
            run.stop(cause)
        await _ended(runs)


async def _ended(runs: Sequence[StepRun]) -> None:
    await asyncio.gather(*(run.ended() for run in runs))
