"""Diffusion models behind the engine contract: requests take turns at each step."""

import asyncio
import itertools
import logging
from collections.abc import AsyncGenerator, AsyncIterable, Callable, Mapping
from contextlib import aclosing
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from stagemesh.common.errors import InvalidChunkError, InvalidRequestError, NotReadyError
from stagemesh.common.stage_config import StageConfig
from stagemesh.common.tensors import Array
from stagemesh.connectors.edge import Packet
from stagemesh.services.engines.abilities import EngineAbilities
from stagemesh.services.engines.base import (
    Checkpoint,
    Emission,
    EngineEvent,
    EngineLoad,
    Paused,
    Progress,
    Task,
    Usage,
)
from stagemesh.services.engines.diffusion import CONDITIONING, FRAMES, IMAGE, LATENTS, STATE, signature_of
from stagemesh.services.engines.diffusion.adapters.manager import AdapterManager
from stagemesh.services.engines.diffusion.caches.prompt_cache_control import PromptCacheControl
from stagemesh.services.engines.diffusion.controls import Controls
from stagemesh.services.engines.diffusion.executor import Executor, make_executor
from stagemesh.services.engines.diffusion.options import stage_options
from stagemesh.services.engines.diffusion.scheduling.admission import Admission
from stagemesh.services.engines.diffusion.scheduling.step_scheduler import StepScheduler
from stagemesh.services.engines.diffusion.scheduling.stepper import RequestProgress, Stepper
from stagemesh.services.engines.options import request_options

if TYPE_CHECKING:
    from stagemesh.services.engines.diffusion.state import DiffusionInputs
    from stagemesh.services.engines.diffusion.worker import Begun, ModelFacts

_log = logging.getLogger(__name__)


class DiffusionEngine:
    """See `stagemesh.services.engines.base.Engine`.

    Models are loaded and used by an executor's worker, one call after the other. Each request waits here for its turn,
    and this loop has the worker make one step of those whose turn it is, over and over.
    """

    def __init__(self, config: StageConfig) -> None:
        if config.model is None:
            raise InvalidRequestError(
                f"stage {config.stage}: the diffusion engine needs a model", reason="MISSING_MODEL"
            )
        self._stage = config.stage
        self._options = options = stage_options(config.options, stage=config.stage)
        self._signature = signature_of(options)
        self._executor: Executor = make_executor(Path(config.model), options)
        self._scheduler = StepScheduler(max_wait_steps=options.max_wait_steps, max_batch=options.max_batch)
        self._admission = Admission(max_running=options.max_running, memory_bytes=0)
        self._lending = AdapterManager(self._executor, options, stage=config.stage)
        self._controls = Controls(self._executor, self._lending, stage=config.stage, profile_dir=options.profile_dir)
        self._remembering = PromptCacheControl(self._executor, limit_bytes=options.prompt_cache_bytes)
        self._facts: ModelFacts | None = None
        self._stepper = Stepper(self._executor, self._scheduler)
        self._serving: asyncio.Task[None] | None = None
        self._numbers = itertools.count()

    async def start(self, report: Callable[[str], None]) -> None:
        """See `Engine`."""
        await self._executor.start(report)
        report("loading the model")
        self._facts = facts = await self._executor.call("load")
        memory_bytes = self._options.memory_bytes or facts.free_bytes
        self._admission = Admission(max_running=self._options.max_running, memory_bytes=memory_bytes)
        self._serving = asyncio.create_task(self._stepper.serve(), name="diffusion steps")

    @property
    def abilities(self) -> EngineAbilities:
        """See `Engine`."""
        return EngineAbilities(
            can_pause=True,
            can_resume=True,
            adapters=self._lending,
            sleep=self._controls.sleeper,
            profiles=self._controls.profiles,
            caches=self._remembering,
        )

    async def submit(self, task: Task) -> AsyncGenerator[EngineEvent, None]:
        """See `Engine`."""
        if self._facts is None:
            raise NotReadyError(f"stage {self._stage} is still loading its model")
        self._controls.sleeper.check_awake()
        run = self._decode_all if self._options.part == "decode" else self._run
        async with aclosing(run(task)) as events:
            async for event in events:
                yield event

    def load(self) -> EngineLoad:
        """See `Engine`."""
        return EngineLoad(self._admission.running, self._admission.waiting, self._scheduler.work_s())

    async def wait_failed(self) -> str:
        """See `Engine`."""
        assert self._serving is not None, "start comes first"
        failed = asyncio.create_task(self._executor.wait_failed())
        try:
            await asyncio.wait([failed, self._serving], return_when=asyncio.FIRST_COMPLETED)
            return failed.result() if failed.done() else "the loop that makes its steps has ended"
        finally:
            failed.cancel()

    async def close(self) -> None:
        """See `Engine`."""
        if self._serving is not None:
            self._serving.cancel()
            await asyncio.wait([self._serving])
        await self._executor.close()
        self._controls.profiles.discard()

    # -- a request's way

    async def _run(self, task: Task) -> AsyncGenerator[EngineEvent, None]:
        inputs, facts = self._inputs(task), self._facts
        assert facts is not None, "start comes first"
        footprint = facts.sizes.footprint(inputs)
        async with self._lending.using(task.adapter), self._admission.admitted(footprint, priority=task.priority):
            # A new attempt may begin while the last still ends, so the request's id alone is no name.
            name = f"{task.request_id}/{next(self._numbers)}"
            try:
                begun: Begun = await self._begin(name, task, inputs)
                self._remembering.figures = begun.prompt_cache
                if self._options.part == "encode":
                    yield await self._emission(CONDITIONING, "conditioning", name)
                    yield Usage()
                    return
                async with aclosing(self._steps(name, task, begun)) as events:
                    async for event in events:
                        yield event
            finally:
                # Whatever comes first: the worker does one thing after the other.
                await asyncio.shield(self._stepper.call("drop", name))

    async def _begin(self, name: str, task: Task, inputs: "DiffusionInputs") -> "Begun":
        if task.resume_from is not None:
            state = task.resume_from.tensors.get(STATE)
            if state is None:
                raise InvalidRequestError(
                    f"the checkpoint holds no tensor {STATE!r}; resume from one that this stage gave",
                    reason="INVALID_CHECKPOINT",
                )
            try:
                begun: Begun = await self._stepper.call("begin", name, inputs, state=state)
            except InvalidChunkError as exc:
                raise InvalidRequestError(exc.message, reason="INVALID_CHECKPOINT") from exc
            return begun
        conditioning = await _only(task.inlets, CONDITIONING) if self._options.part == "denoise" else None
        return await self._stepper.call("begin", name, inputs, conditioning=conditioning)  # type: ignore[no-any-return]

    async def _steps(self, name: str, task: Task, begun: "Begun") -> AsyncGenerator[EngineEvent, None]:
        """From the first step to the picture, or until it is paused."""
        course = RequestProgress(name, begun, priority=task.priority, deadline_s=task.deadline_s)
        last = begun.total_steps
        if task.max_steps is not None:
            last = min(last, begun.step_index + task.max_steps)
        while course.done < last:
            upto = self._next_stop(course.done, last)
            async with aclosing(self._stepper.turns(course, upto)) as steps:
                async for done in steps:
                    yield Progress(done, begun.total_steps)
                    if task.pause_requested.is_set():
                        course.cut()
            if task.pause_requested.is_set():
                break
            if course.done < last:
                async with aclosing(self._at_stop(name, task, course.done)) as events:
                    async for event in events:
                        yield event
        if course.done < begun.total_steps:
            yield Paused(await self._checkpoint(name, course.done))
            return
        async with aclosing(self._made(name, task, course.done, final=True)) as events:
            async for event in events:
                yield event
        yield Usage(steps=course.done - begun.step_index)

    def _next_stop(self, done: int, last: int) -> int:
        """The step after which something is to be done beside the next step."""
        every = [each for each in (self._options.checkpoint_steps, self._options.preview_steps) if each]
        return min([last, *(done - done % each + each for each in every)])

    async def _at_stop(self, name: str, task: Task, done: int) -> AsyncGenerator[EngineEvent, None]:
        if self._options.preview_steps and not done % self._options.preview_steps:
            async with aclosing(self._made(name, task, done, final=False)) as events:
                async for event in events:
                    yield event
        if self._options.checkpoint_steps and not done % self._options.checkpoint_steps:
            yield await self._checkpoint(name, done)

    async def _checkpoint(self, name: str, done: int) -> Checkpoint:
        return Checkpoint(done, tensors={STATE: await self._stepper.call("state", name)})

    async def _made(self, name: str, task: Task, done: int, *, final: bool) -> AsyncGenerator[EngineEvent, None]:
        said = {"step": done, "final": final}
        if self._options.part == "denoise":
            latents = await self._stepper.call("latents", name)
            yield Emission(Packet({LATENTS: latents}, said))
            return
        if tensors := await self._tensors(await self._stepper.call("picture", name), task):
            yield Emission(Packet(tensors, said))

    async def _decode_all(self, task: Task) -> AsyncGenerator[EngineEvent, None]:
        """For the stage that decodes: a picture for whatever comes, previews and the last."""
        flow, steps = _flow(task.inlets), 0
        async for packet in flow:
            frames = await self._stepper.call("picture_of", packet.tensors[LATENTS])
            steps += 1
            if tensors := await self._tensors(frames, task):
                yield Emission(Packet(tensors, packet.metadata))
            yield Progress(steps)
        if not steps:
            raise InvalidRequestError("the edge brought no latents", reason="MISSING_INPUT")
        yield Usage(steps=steps)

    # -- inner workings

    def _inputs(self, task: Task) -> "DiffusionInputs":
        from stagemesh.services.engines.diffusion.requests import inputs_of

        assert self._facts is not None, "start comes first"
        options = request_options(task.options, self._signature.options, stage=self._stage)
        return inputs_of(task, options, stage=self._options, facts=self._facts)

    async def _emission(self, tensor: str, method: str, name: str) -> Emission:
        return Emission(Packet({tensor: await self._stepper.call(method, name)}))

    async def _tensors(self, frames: Array, task: Task) -> dict[str, Array]:
        from stagemesh.services.engines.diffusion.image_files import encoded

        tensors: dict[str, Array] = {}
        if task.wanted is None or IMAGE in task.wanted:
            tensors[IMAGE] = await asyncio.to_thread(encoded, frames)
        if task.wanted is None or FRAMES in task.wanted:
            tensors[FRAMES] = np.asarray(frames)
        return tensors


def _flow(inlets: Mapping[str, AsyncIterable[Packet]]) -> AsyncIterable[Packet]:
    flows = list(inlets.values())
    if len(flows) != 1:
        raise InvalidRequestError(f"this stage is fed by one edge, and {len(flows)} are bound", reason="INVALID_EDGE")
    return flows[0]


async def _only(inlets: Mapping[str, AsyncIterable[Packet]], tensor: str) -> Array:
    """What the edge brings, once: the flow is read to its end."""
    packets = [packet async for packet in _flow(inlets)]
    if len(packets) != 1:
        raise InvalidRequestError(
            f"the edge brought {tensor} {len(packets)} times; it is to come once", reason="INVALID_EDGE"
        )
    return packets[0].tensors[tensor]
