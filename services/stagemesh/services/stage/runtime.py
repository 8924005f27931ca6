"""A stage replica, independent of gRPC. Runs steps and reports the replica's load."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Callable, Sequence

from stagemesh.common.errors import (
    ENGINE_DIED,
    CancelledRequestError,
    NotReadyError,
    OverloadedError,
    StagemeshError,
    UnavailableError,
)
from stagemesh.common.media.store import MediaStore
from stagemesh.common.notification import Journal
from stagemesh.common.plugins.descriptors import Signature
from stagemesh.common.process import settings
from stagemesh.common.process.host import RecentMemory
from stagemesh.common.process.stage_process import ReplicaState, StageConfig
from stagemesh.common.requests.request_checks import check_choice_id
from stagemesh.common.tasks import end_tasks, wait_within
from stagemesh.common.wire.encoding import to_message
from stagemesh.connectors.arena.memory import pin_if_cuda
from stagemesh.connectors.data_plane import DataPlane
from stagemesh.services.engines.base import Engine, EngineLoad
from stagemesh.services.stage.lifecycle import ReplicaLifecycle
from stagemesh.services.stage.step.checks import check_handover, check_rebinding, check_spec, engine_result_check
from stagemesh.services.stage.step.edges import StepEdges
from stagemesh.services.stage.step.journal import PausedStates
from stagemesh.services.stage.step.run import StepContext, StepRun
from stagemesh.services.stage.step.run_index import RunIndex
from stagemesh.services.stage.step.spec import Rebinding, StepSpec
from stagemesh.services.stage.step.timings import FrameIntervals
from stagemesh.services.stage.step_hangs import StallWatch
from stagemesh.v1 import control_pb2, playout_pb2, stage_pb2

_log = logging.getLogger(__name__)

_RELEASE_S = 5.0
"""Time limit for the steps of a failed engine to end, in seconds."""
LEAVE_S = 0.2
"""The time for which the cancellation of steps without callers waits for the callers to leave, in seconds."""
_MIN_RETRY_S, _MAX_RETRY_S = 0.1, 10.0


class StageRuntime:
    """One replica of one stage. Owns the engine and the data plane, and awaits every run that it starts."""

    def __init__(self, engine: Engine, data_plane: DataPlane, config: StageConfig, signature: Signature) -> None:
        self.data_plane, self.config, self.signature = data_plane, config, signature
        self.closed = asyncio.Event()
        self.on_shutdown: Callable[[], None] = lambda: None
        """Callback that terminates the process in the same way as the signal SIGTERM."""
        self.engine = engine
        self.where = {"stage": config.stage, "replica": config.replica}
        """The names of the stage and of the replica, for log records and errors."""
        self._runs = RunIndex()
        self.lifecycle = ReplicaLifecycle(config, engine, self._runs, self.where)
        """The replica's state, and the operations that change it: drains, sleep and shutdown."""
        self._frame_intervals, self._memory = FrameIntervals(), RecentMemory()
        self.states = PausedStates()
        """The states from which paused requests can resume."""
        writer = f"{config.pipeline}.{config.replica}"
        self._store = MediaStore(config.media, writer=writer, spool=settings.spool_dir()) if config.media else None
        self._context = StepContext(
            engine,
            data_plane,
            signature,
            config,
            states=self.states,
            store=self._store,
            results=engine_result_check(config, signature),
            where=self.where,
            frame_intervals=self._frame_intervals,
        )

    # -- lifecycle

    async def start(self) -> None:
        """Loads the engine and sets the replica's state to READY. If the engine fails to load, sets the state to FAILED
        and raises a StagemeshError.
        """
        try:
            if self._store is not None:
                self._store.prepare()
            if use_partitions := self.engine.abilities.use_partitions:
                use_partitions(self.data_plane.arena)
            await self.engine.start(self.lifecycle.report)
            check_handover(self.signature, self.engine.abilities, engine=self.config.engine)
            await self.lifecycle.end_loading()
        except StagemeshError as exc:
            self.lifecycle.fail(exc.message)
            raise exc.located(**self.where) from exc
        except Exception as exc:
            _log.exception("the engine failed to load with an unexpected exception")
            self.lifecycle.fail(f"{type(exc).__name__}: {exc}")
            raise NotReadyError(
                f"engine {self.config.engine} of stage {self.config.stage} failed to load: {self.lifecycle.detail}",
                reason="LOAD_FAILED",
                metadata=self.where,
            ) from exc
        self._pin_arena()

    async def watch_engine(self) -> None:
        """Waits until the engine fails or hangs, then ends all runs with an error.

        Always raises UnavailableError (ENGINE_DIED), which contains the cause.
        """
        cause = await self._wait_engine_failed()
        self.lifecycle.fail(cause)
        self.lifecycle.on_serving(False)
        error = UnavailableError(f"stage {self.config.stage}: {cause}", reason=ENGINE_DIED, metadata=self.where)
        # An engine that hangs may not release its steps. These steps end with the process.
        await wait_within(_RELEASE_S, self.lifecycle.stop(self._runs.running(), error))
        raise error

    async def close(self) -> None:
        """Stops all steps, then closes the engine and the data plane. May be called more than once."""
        if self.closed.is_set():
            return
        self.closed.set()
        self.lifecycle.close()
        await self.lifecycle.finish_steps(grace_s=0)
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
        check_spec(spec, self.signature, engine=self.config.engine, abilities=self.engine.abilities)
        known = self._runs.find(spec)
        if known is not None:
            known.extend(deadline_s=deadline_s)
            return known.journal
        self.lifecycle.check_accepts()
        self._check_capacity()
        run = StepRun(spec, self._context)
        self._runs.add(run)
        self.lifecycle.note_use()
        run.start(deadline_s=deadline_s, on_ended=self._retire)
        return run.journal

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
        await self.lifecycle.stop(runs, CancelledRequestError(reason or "the step was cancelled", metadata=self.where))
        response = stage_pb2.CancelStepResponse(stopped=len(runs))
        for run in runs:
            for field, value in run.usage().ListFields():
                setattr(response.usage, field.name, getattr(response.usage, field.name) + value)
        return response

    def rebind(self, rebinding: Rebinding) -> None:
        """Binds edges of a step to other peer replicas. Raises InvalidRequestError if the rebinding is invalid, and the
        errors of `RunIndex.rebind`.
        """
        check_rebinding(rebinding)
        self._runs.rebind(rebinding)

    # -- load and reports

    def load(self) -> stage_pb2.WatchLoadResponse:
        """Returns the current load of the engine and of the data plane."""
        is_loaded = self.lifecycle.state is not ReplicaState.LOADING
        engine = self.engine.load() if is_loaded else EngineLoad(0, 0)
        adapters = self.engine.abilities.adapters if is_loaded else None
        plane = self.data_plane
        arena, landing = plane.arena, plane.landing.present
        return to_message(
            stage_pb2.WatchLoadResponse,
            engine,
            arena_used_bytes=arena.used_bytes,
            arena_size_bytes=arena.size_bytes,
            credit_bytes=plane.consumer.credit_bytes,
            free_memory_bytes=self._memory.available_bytes,
            arena_largest_free_bytes=arena.largest_free_bytes,
            arena_waiting=arena.waiting,
            landing_used_bytes=landing.used_bytes if landing else 0,
            landing_size_bytes=landing.size_bytes if landing else 0,
            adapters=[adapter.name for adapter in adapters.list_adapters()] if adapters is not None else (),
            playout=playout_pb2.PlayoutMeasures(
                call_costs=[
                    playout_pb2.CallCost(frames=at, seconds=cost_s)
                    for at, cost_s in sorted(engine.call_costs_s.items())
                ],
                frame_audio_s=engine.frame_audio_s or None,
                audio_delay_s=engine.audio_delay_s if engine.call_costs_s else None,
                frame_intervals_s=self._frame_intervals.seconds,
            ),
            sent=[
                stage_pb2.SentChunks(edge=edge, chunks=meter.transfer_s.count, size_bytes=meter.size_bytes)
                for edge, _, meter in plane.meters
            ],
        )

    def reports(self, request_id: str = "") -> list[control_pb2.StepReport]:
        """Returns the status of the running steps of one request, or of all requests if `request_id` is empty."""
        return [run.report for run in self._runs.running(request_id)]

    # -- internal

    async def _wait_engine_failed(self) -> str:
        """Waits until the engine fails or hangs. Returns the cause as a sentence for operators. Meanwhile, puts the
        replica to sleep when it is idle, if its config says so.
        """
        waits = [asyncio.ensure_future(self.engine.wait_failed())]
        if self.config.stall_s:
            watch = StallWatch(self._runs.running, stall_s=self.config.stall_s, on_hung=self._stop_hung)
            waits.append(asyncio.ensure_future(watch.wait_stalled()))
        if self.config.sleep_when_idle_s is not None:
            waits.append(asyncio.ensure_future(self.lifecycle.sleep_when_idle(self.config.sleep_when_idle_s)))
        try:
            done, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            return done.pop().result()
        finally:
            await end_tasks(waits)

    def _stop_hung(self, run: StepRun) -> None:
        """Stops a step that hangs while other steps make progress. The step may succeed on another replica."""
        what = f"the engine has made no progress on the step for {self.config.stall_s:g} s (the stage's stall_s)"
        _log.error("step %s hangs: %s, but has made progress on later steps", run.step_id, what)
        run.stop(UnavailableError(f"{what}, but has made progress on later steps", reason="STEP_HANGS"))

    def _pin_arena(self) -> None:
        """Page-locks the arena if there is a GPU, so that the GPU can copy tensors directly into the arena. If
        page-locking fails, only logs a warning.
        """
        try:
            pin_if_cuda(self.data_plane.arena.memory)
        except NotReadyError as exc:
            _log.warning("the arena is not page-locked: %s", exc.message)

    def _retire(self, run: StepRun, left: StepEdges | None) -> None:
        self._runs.retire(run, left)
        self.lifecycle.note_use()

    def _check_capacity(self) -> None:
        held = len(self._runs.running())
        if held >= self.config.max_queued:
            retry_after_s = min(_MAX_RETRY_S, max(_MIN_RETRY_S, self.engine.load().work_s or 0.0))
            raise OverloadedError(
                f"stage {self.config.stage} has {held} steps, its max_queued; try again in {retry_after_s:.1f} s",
                retry_after_s=retry_after_s,
            )


async def _all_left(runs: Sequence[StepRun]) -> bool:
    """Waits at most LEAVE_S seconds until no step has a caller. Returns whether this is the case."""
    # The caller that has ended its calls may be ahead of them.
    await wait_within(LEAVE_S, asyncio.gather(*(run.left() for run in runs)))
    return not any(run.has_callers for run in runs)
