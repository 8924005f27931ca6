"""The engine for diffusion models, with its operator controls. Alternates between the denoising steps of concurrent
requests.
"""

import asyncio
import itertools
from collections.abc import AsyncGenerator, AsyncIterable, Callable, Mapping
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from stagemesh.common.errors import InternalError, InvalidChunkError, InvalidRequestError
from stagemesh.common.process.stage_process import StageConfig
from stagemesh.common.requests.adapter_selection import parse_adapters
from stagemesh.common.wire.tensors import Array, Value
from stagemesh.connectors.packets import MetadataValue, Packet
from stagemesh.services.engines.abilities import CacheStatistics, EngineAbilities
from stagemesh.services.engines.adapters import AdapterManager, Entry
from stagemesh.services.engines.base import Checkpoint, Emission, EngineEvent, EngineLoad, Paused, Progress, Task, Usage
from stagemesh.services.engines.controls import Profiles, SleepManager, private_folder
from stagemesh.services.engines.diffusion import AUDIO, CONDITIONING, FRAMES, IMAGE, LATENTS, STATE, TEXT, signature_of
from stagemesh.services.engines.diffusion.admission import Admission
from stagemesh.services.engines.diffusion.executor import Executor, make_executor
from stagemesh.services.engines.diffusion.options import DiffusionOptions, stage_options
from stagemesh.services.engines.diffusion.step_scheduler import RequestProgress, StepLoop, StepScheduler
from stagemesh.services.engines.options import request_options

if TYPE_CHECKING:
    from stagemesh.services.engines.diffusion.model.families import Family
    from stagemesh.services.engines.diffusion.model.memory_estimate import ModelFacts
    from stagemesh.services.engines.diffusion.state import DiffusionInputs
    from stagemesh.services.engines.diffusion.worker import Decoded, PreparedRequest


WEIGHTS, BUFFERS = "weights", "buffers"


class DiffusionAdapters(AdapterManager):
    """Manages a stage's LoRA adapters. All loaded adapters remain on the device, each in its own slot."""

    def __init__(self, executor: Executor, options: DiffusionOptions, *, stage: str) -> None:
        limit = options.max_loras if options.enable_lora else 0
        super().__init__(stage=stage, slots=limit, capacity=limit, capacity_option="max_loras", lock=asyncio.Lock())
        self._executor = executor

    @asynccontextmanager
    async def lease_all(self, selection: str | None) -> AsyncGenerator[None]:
        """Allows a task to use the adapters that `selection` names until the context exits. Raises the errors of
        `parse_adapters` and of `lease`.
        """
        async with AsyncExitStack() as leases:
            for adapter in parse_adapters(selection or ""):
                await leases.enter_async_context(self.lease(adapter.name))
            yield

    async def _engine_load(self, entry: Entry) -> int:
        rank: int = await self._executor.call("runner.adapters.load", entry.name, entry.path)
        return rank

    async def _engine_unload(self, entry: Entry) -> None:
        await self._executor.call("runner.adapters.unload", entry.name)

    async def _engine_pin(self, entry: Entry) -> None:
        """Does nothing, because every loaded adapter has its own slot and does not need to be pinned."""

    def _check_awake(self) -> None:
        """Does nothing, because the engine loads all adapters again when it wakes up."""


class WorkerControls(SleepManager):
    """Puts the engine's worker to sleep and wakes it up, and controls the worker's prompt cache.

    Implements `abilities.SleepControl` and `abilities.CacheControl`.
    """

    def __init__(
        self, executor: Executor, adapters: DiffusionAdapters, options: DiffusionOptions, *, stage: str
    ) -> None:
        super().__init__(stage=stage)
        self._executor, self._adapters = executor, adapters
        self.prompt_cache = CacheStatistics(limit_bytes=options.prompt_cache_bytes)
        """Statistics of the prompt cache, as last reported by the worker."""
        # Each worker writes a separate file.
        private = Path(private_folder(options.profile_dir)) if options.profile_dir else Path()
        self.profiles = Profiles(
            lambda prefix, max_steps: executor.call("start_profile", str(private / prefix), max_steps=max_steps),
            lambda: executor.call("stop_profile"),
            stage=stage,
            base=options.profile_dir,
            private=private,
        )

    async def clear_caches(self, *, preempt: bool) -> None:
        # Running requests retain the embeddings that they have read, so clearing needs no preemption.
        del preempt
        self.prompt_cache = await self._executor.call("prompt_cache.clear")

    def cache_statistics(self) -> CacheStatistics:
        return self.prompt_cache

    # -- inner workings

    async def _engine_sleep(self, level: int) -> set[str]:
        await self._executor.call("sleep", level)
        return {WEIGHTS} if level == 1 else {WEIGHTS, BUFFERS}

    async def _engine_wake(self, tags: set[str]) -> None:
        # Buffers need no call, because they are allocated when they are used.
        if WEIGHTS in tags and await self._executor.call("wake"):
            for adapter in self._adapters.list_adapters():
                await self._executor.call("runner.adapters.load", adapter.name, adapter.path)


class DiffusionEngine:
    """Runs diffusion requests step by step on a worker. The worker loads the model and executes one call at a time.

    Each request is a coroutine that waits for its steps. The step loop repeatedly selects a batch of requests and calls
    the worker to run one step of each request in the batch.
    """

    def __init__(self, config: StageConfig) -> None:
        if config.model is None:
            raise InvalidRequestError(f"stage {config.stage}: the engine needs `model`", reason="INVALID_CONFIG")
        self._stage = config.stage
        self._options = options = stage_options(config.options, stage=config.stage)
        self._signature = signature_of(options)
        self._executor: Executor = make_executor(Path(config.model), options)
        self._scheduler = StepScheduler(max_wait_steps=options.max_wait_steps, max_batch=options.max_batch)
        self._admission = Admission(max_running=options.max_running, memory_bytes=0)
        self._adapters = DiffusionAdapters(self._executor, options, stage=config.stage)
        self._controls = WorkerControls(self._executor, self._adapters, options, stage=config.stage)
        self._facts: ModelFacts | None = None
        self._step_loop = StepLoop(self._executor, self._scheduler)
        self._serving: asyncio.Task[None] | None = None
        self._numbers = itertools.count()
        # The final part of a text leaves after each step.
        self._preview_steps = options.preview_steps or int(options.text)

    async def start(self, report: Callable[[str], None]) -> None:
        await self._executor.start(report)
        report("loading the model")
        self._facts = facts = await self._executor.call("load")
        memory_bytes = self._options.memory_bytes or facts.free_bytes
        self._admission = Admission(max_running=self._options.max_running, memory_bytes=memory_bytes)
        self._serving = asyncio.create_task(self._step_loop.serve(), name="diffusion steps")

    @property
    def abilities(self) -> EngineAbilities:
        resumable = self._facts is None or self._facts.resumable
        return EngineAbilities(
            can_pause=resumable,
            can_resume=resumable,
            adapters=self._adapters,
            sleep=self._controls,
            profiles=self._controls.profiles,
            caches=self._controls,
            metrics=self._step_loop.calls.metrics,
        )

    def submit(self, task: Task) -> AsyncGenerator[EngineEvent, None]:
        assert self._facts is not None, "tasks are submitted after `start`"
        self._controls.check_awake()
        return self._decode_all(task, self._facts) if self._options.part == "decode" else self._run(task, self._facts)

    def load(self) -> EngineLoad:
        return EngineLoad(self._admission.running, self._admission.waiting, self._scheduler.work_s())

    async def wait_failed(self) -> str:
        assert self._serving is not None, "`start` has not been called"
        failed = asyncio.create_task(self._executor.wait_failed())
        try:
            await asyncio.wait([failed, self._serving], return_when=asyncio.FIRST_COMPLETED)
            return failed.result() if failed.done() else "the step loop has ended"
        finally:
            failed.cancel()

    async def close(self) -> None:
        if self._serving is not None:
            self._serving.cancel()
            await asyncio.wait([self._serving])
        await self._executor.close()
        self._controls.profiles.discard()

    # -- phases of a request

    async def _run(self, task: Task, facts: "ModelFacts") -> AsyncGenerator[EngineEvent, None]:
        from stagemesh.services.engines.diffusion.conversion import size_warnings

        inputs = self._inputs(task, facts.family)
        footprint = facts.footprint(inputs)
        async with self._adapters.lease_all(task.adapter), self._admission.admitted(footprint, priority=task.priority):
            # The request id alone is not unique: a new attempt may begin before the previous attempt has ended.
            name = f"{task.request_id}/{next(self._numbers)}"
            try:
                prepared = await self._begin(name, task, inputs)
                self._controls.prompt_cache = prepared.prompt_cache
                if self._options.part == "encode":
                    yield Emission(Packet(await self._serialized(name, CONDITIONING)))
                    yield Usage()
                    return
                usage = Usage(warnings=size_warnings(self._with_defaults(task), inputs, facts.family))
                async with aclosing(self._run_steps(name, task, prepared, usage)) as events:
                    async for event in events:
                        yield event
            finally:
                # Shielded, because the worker must free the request even if this coroutine is cancelled.
                await asyncio.shield(self._executor.call("drop", name))

    async def _begin(self, name: str, task: Task, inputs: "DiffusionInputs") -> "PreparedRequest":
        if task.resume_from is not None:
            state = task.resume_from.tensors.get(STATE)
            if state is None:
                raise InvalidRequestError(
                    f"the checkpoint has no tensor {STATE!r}; resume from a checkpoint of this stage",
                    reason="INVALID_CHECKPOINT",
                )
            try:
                prepared: PreparedRequest = await self._executor.call("runner.begin", name, inputs, state=state)
            except InvalidChunkError as exc:
                raise InvalidRequestError(exc.message, reason="INVALID_CHECKPOINT") from exc
            return prepared
        conditioning: list[Array] = []
        if self._options.part == "denoise":
            if not task.inlets:
                raise InvalidRequestError("this stage needs an incoming edge; none is bound", reason="INVALID_EDGE")
            for edge, flow in task.inlets.items():
                conditioning.append(await _receive_once(edge, flow, CONDITIONING))
        return await self._executor.call("runner.begin", name, inputs, conditioning=conditioning)  # type: ignore[no-any-return]

    async def _run_steps(
        self, name: str, task: Task, prepared: "PreparedRequest", usage: Usage
    ) -> AsyncGenerator[EngineEvent, None]:
        """Runs the remaining steps of the request `name` and yields its events.

        The last events are the result and `usage`. If the request pauses, the last event is a checkpoint instead.
        """
        request = RequestProgress(
            name,
            prepared.key,
            prepared.tokens,
            prepared.total_steps,
            done=prepared.step_index,
            priority=task.priority,
            deadline_s=task.deadline_s,
            trace=task.trace,
        )
        last = prepared.total_steps
        if task.max_steps is not None:
            last = min(last, prepared.step_index + task.max_steps)
        yield usage
        while request.done < last:
            stop_at = self._next_stop(request.done, last)
            async with aclosing(self._step_loop.run_steps(request, stop_at)) as steps:
                async for done in steps:
                    usage.engine_steps = done - prepared.step_index
                    yield Progress(done, prepared.total_steps)
                    if task.pause_requested.is_set():
                        self._scheduler.stop_early(request)
            if task.pause_requested.is_set():
                break
            if request.done < last:
                for event in await self._at_stop(name, task, request.done):
                    yield event
        if request.done < prepared.total_steps:
            yield Paused(await self._checkpoint(name, request.done))
            return
        for event in await self._results(name, task, request.done, final=True):
            yield event
        usage.engine_steps = request.done - prepared.step_index
        _count(usage, frames=self._made_frames(task))
        yield usage

    def _made_frames(self, task: Task) -> int:
        """Returns the number of frames that the stage decodes for a task: 1 for an image, 0 if it does not decode."""
        decodes = self._options.part == "all" and not self._options.text
        return int(task.options.get("num_frames", self._options.num_frames)) if decodes else 0

    def _next_stop(self, done: int, last: int) -> int:
        """Returns the number of completed steps at which the request must next leave the step loop: at the next
        checkpoint, at the next preview, or at `last`, whichever is first. `done` is the number of steps completed so
        far.
        """
        intervals = [each for each in (self._options.checkpoint_steps, self._preview_steps) if each]
        return min([last, *(done - done % each + each for each in intervals)])

    async def _at_stop(self, name: str, task: Task, done: int) -> list[EngineEvent]:
        """Returns the preview and the checkpoint that are due after `done` completed steps. The list is empty if
        neither is due.
        """
        events: list[EngineEvent] = []
        if self._preview_steps and not done % self._preview_steps:
            events += await self._results(name, task, done, final=False)
        if self._options.checkpoint_steps and not done % self._options.checkpoint_steps:
            events.append(await self._checkpoint(name, done))
        return events

    async def _checkpoint(self, name: str, done: int) -> Checkpoint:
        return Checkpoint(done, tensors=await self._serialized(name, STATE))

    async def _results(self, name: str, task: Task, done: int, *, final: bool) -> list[Emission]:
        metadata = {"step": done, "preview": not final and not self._options.text}
        if self._options.part == "denoise":
            return [Emission(Packet(await self._serialized(name, LATENTS), metadata))]
        return await self._images(await self._executor.call("runner.decode", name), task, metadata)

    async def _decode_all(self, task: Task, facts: "ModelFacts") -> AsyncGenerator[EngineEvent, None]:
        """Runs a task of a stage that only decodes. Decodes each incoming packet of latents, and yields one result for
        each packet.
        """
        from stagemesh.services.engines.diffusion.conversion import check_format

        check_format(self._with_defaults(task), facts.family)
        flow, steps = _only_inlet(task.inlets), 0
        usage = Usage()
        yield usage
        async for packet in flow:
            decoded = await self._executor.call("runner.decode_latents", packet.tensors[LATENTS])
            steps += 1
            for event in await self._images(decoded, task, packet.metadata):
                yield event
            yield Progress(steps)
            usage.engine_steps = steps
            if not packet.metadata.get("preview"):
                _count(usage, frames=0 if decoded.frames is None else len(decoded.frames))
        if not steps:
            raise InvalidRequestError("the edge delivered no latents", reason="MISSING_INPUT")
        yield usage

    # -- inner workings

    async def _serialized(self, name: str, kind: str) -> dict[str, Array]:
        """Returns serialized data of the request `name` in a dict with the key `kind`. `kind` selects the data:
        CONDITIONING, LATENTS or STATE.
        """
        return {kind: await self._executor.call("runner.serialize", name, kind)}

    def _inputs(self, task: Task, family: "Family") -> "DiffusionInputs":
        from stagemesh.services.engines.diffusion.conversion import build_inputs

        return build_inputs(task, self._with_defaults(task), stage=self._options, family=family)

    def _with_defaults(self, task: Task) -> dict[str, Value]:
        return request_options(task.options, self._signature.options, stage=self._stage)

    async def _images(self, decoded: "Decoded", task: Task, metadata: Mapping[str, MetadataValue]) -> list[Emission]:
        """Returns one emission for a video or for each image. Each contains the outputs that the task requests."""
        assert self._facts is not None, "tasks run after `start`"
        frames = decoded.frames
        if frames is None or len(frames) == 1 or self._facts.family.frames_multiple:
            return await self._results_of(decoded, task, metadata)
        images = [replace(decoded, frames=each[None]) for each in frames]
        return [emission for each in images for emission in await self._results_of(each, task, metadata)]

    async def _results_of(
        self, decoded: "Decoded", task: Task, metadata: Mapping[str, MetadataValue]
    ) -> list[Emission]:
        """Returns a list with one emission that contains the outputs requested by the task. The list is empty if the
        task requests none of the outputs that the model generates.
        """
        from stagemesh.services.engines.diffusion.conversion import encode_file, on_white

        tensors: dict[str, Array] = {}
        frames, audio = decoded.frames, decoded.audio
        if frames is not None and (task.wanted is None or IMAGE in task.wanted):
            output_format = str(task.options.get("output_format", "auto"))
            tensors[IMAGE] = await asyncio.to_thread(encode_file, frames, output_format)
        if frames is not None and (task.wanted is None or FRAMES in task.wanted):
            tensors[FRAMES] = on_white(frames)
        wants_audio = task.wanted is None or AUDIO in task.wanted
        if audio is not None and wants_audio and (rate_hz := self._options.audio_rate_hz):
            if decoded.sample_rate_hz != rate_hz:
                raise InternalError(
                    f"audio_rate_hz is {rate_hz}, but the model generates audio at {decoded.sample_rate_hz} Hz; set "
                    f"the stage's option audio_rate_hz to {decoded.sample_rate_hz}",
                    reason="INVALID_RESULT",
                )
            tensors[AUDIO] = audio
            metadata = {**metadata, "sample_rate_hz": decoded.sample_rate_hz}
        if decoded.text is not None and (task.wanted is None or TEXT in task.wanted):
            tensors = {TEXT: np.frombuffer(decoded.text.encode(), np.uint8)}
        is_finite = all(each is None or np.isfinite(each).all() for each in (frames, audio))
        non_finite = () if is_finite else tuple(tensors)
        return [Emission(Packet(tensors, metadata), non_finite=non_finite)] if tensors else []


def _count(usage: Usage, *, frames: int) -> None:
    """Adds a result with this number of frames to a task's work: one image, or a video."""
    usage.images += frames == 1
    usage.frames += frames if frames > 1 else 0


def _only_inlet(inlets: Mapping[str, AsyncIterable[Packet]]) -> AsyncIterable[Packet]:
    flows = list(inlets.values())
    if len(flows) != 1:
        raise InvalidRequestError(f"this stage needs one incoming edge; {len(flows)} are bound", reason="INVALID_EDGE")
    return flows[0]


async def _receive_once(edge: str, flow: AsyncIterable[Packet], tensor: str) -> Array:
    """Reads an edge to its end, and returns the tensor named `tensor` from the edge's only packet.

    Raises InvalidRequestError unless there is exactly one packet.
    """
    packets = [packet async for packet in flow]
    if len(packets) != 1:
        raise InvalidRequestError(
            f"edge {edge} delivered {tensor} {len(packets)} times; it must deliver it once", reason="INVALID_EDGE"
        )
    return packets[0].tensors[tensor]
