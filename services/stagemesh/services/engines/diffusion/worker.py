"""The worker of a diffusion engine and the worker's runner. The worker owns the device and its memory. The runner runs
requests on the loaded model.
"""

import io
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import methodcaller
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from PIL import Image
from torch.profiler import ProfilerActivity, profile, record_function

from stagemesh.common.errors import NotReadyError, StagemeshError
from stagemesh.common.plugins.entry_points import import_factory
from stagemesh.common.wire.tensors import Array
from stagemesh.services.engines import torch_setup
from stagemesh.services.engines.abilities import CacheStatistics
from stagemesh.services.engines.diffusion import CONDITIONING, LATENTS
from stagemesh.services.engines.diffusion.caches import PromptCache, enable_caches
from stagemesh.services.engines.diffusion.model.classic_pipeline import ClassicStepPipeline
from stagemesh.services.engines.diffusion.model.definition import is_classic
from stagemesh.services.engines.diffusion.model.lora_adapters import ModelAdapters
from stagemesh.services.engines.diffusion.model.memory_estimate import ModelFacts, image_tokens, model_facts
from stagemesh.services.engines.diffusion.model.modular_pipeline import ModularStepPipeline
from stagemesh.services.engines.diffusion.options import DiffusionOptions, LoadOptions
from stagemesh.services.engines.diffusion.request_transfer import RequestTransfer
from stagemesh.services.engines.diffusion.state import DiffusionInputs, DiffusionRequestState, to_stagemesh_error

if TYPE_CHECKING:
    from stagemesh.services.engines.diffusion.rank_group import RankGroup

PROFILED_STEP = "denoising step"
"""Name under which each denoising step is recorded in a profile."""


@dataclass(frozen=True)
class PreparedRequest:
    """The scheduling data of a request that is ready for its first step, or for its next step if it resumes from a
    checkpoint.
    """

    key: tuple[object, ...]
    """Compatibility key. Only requests with equal keys can share a step."""
    tokens: int
    step_index: int
    total_steps: int
    prompt_cache: CacheStatistics
    """Statistics of the prompt cache after the request has been prepared."""


@dataclass(frozen=True)
class Decoded:
    """The output of a request."""

    frames: Array | None
    """Images or the frames of a video with values in [0, 1], float32[frames, 3, height, width]. None if the model
    generates neither. An image with transparency has 4 channels."""
    audio: Array | None = None
    """Audio with values in [-1, 1], float32[samples, channels]. None if the model generates no audio."""
    sample_rate_hz: int = 0
    text: str | None = None
    """The part of a text that was not returned before. None if the model generates no text."""


class DiffusionRunner:
    """Loads a pipeline, or one part of a pipeline, on one device, and runs requests. Each request is identified by a
    name.

    Not thread-safe.
    """

    def __init__(
        self, folder: Path, options: DiffusionOptions, device: torch.device, *, prompt_cache: PromptCache | None = None
    ) -> None:
        """Loads the model in `folder`. Raises NotReadyError if the model cannot be loaded or is not supported."""
        self._prompt_cache = prompt_cache or PromptCache(0)
        pipeline_class = _pipeline_class(folder, options.load)
        self.pipeline = pipeline_class(folder, options, device=device, prompt_cache=self._prompt_cache)
        previews = options.preview_steps > 0 and not options.text
        if (options.checkpoint_steps or previews) and not self.pipeline.resumable:
            raise torch_setup.UnusableOptionError(
                "checkpoint_steps and preview_steps need a model whose loop can be read between steps; omit them"
            )
        forwards = self.pipeline.forwards
        self.adapters = ModelAdapters(self.pipeline.components, options.max_lora_rank)
        if options.step_cache is not None and forwards.model is not None:
            if len(forwards.models) > 1:
                raise torch_setup.UnusableOptionError(
                    f"step_cache needs a pipeline with one denoising model; this one has {', '.join(forwards.models)}"
                )
            forwards.caches = enable_caches(forwards.model, options.step_cache)
        self._folder = folder
        self.states: dict[str, DiffusionRequestState] = {}
        """The state of each running request, by request name."""

    def begin(
        self, name: str, inputs: DiffusionInputs, *, conditioning: Sequence[Array] = (), state: Array | None = None
    ) -> PreparedRequest:
        """Adds a request and prepares its next step. Encodes the prompt, generates the noise and sets the noise
        schedule, unless `state` contains them.

        `conditioning` contains the encoding results of each encoding stage, and `state` contains the state of a
        checkpoint. Without them, the request starts from its prompt.
        """
        if state is not None:
            request = self._transfer.restore_state(name, inputs, state)
        else:
            request = DiffusionRequestState(name, inputs)
            for encoded in conditioning:
                self._transfer.restore_values(request, CONDITIONING, encoded)
            self._prepare(request)
        self.states[name] = request
        key = self.pipeline.batch_key(request) if request.total_steps else ()
        tokens = image_tokens(inputs, self.pipeline.family)
        return PreparedRequest(key, tokens, request.step_index, request.total_steps, self._prompt_cache.statistics)

    def step(self, names: Sequence[str]) -> list[StagemeshError | None]:
        """Advances each request by one denoising step, in as few forward passes as possible. `names` are the requests'
        names.

        Returns one item for each request: the request's error, or None if the request succeeded. If a shared forward
        pass fails, each request is computed separately, so that only the request that caused the failure fails.
        """
        states = [self.states[name] for name in names]
        try:
            self.adapters.select(states[0].inputs.adapter, states[0].inputs.adapter_scale)
            noises = self.pipeline.denoise_step(states)
        except Exception as exc:  # noqa: BLE001  # models raise any exception
            if len(names) == 1:
                return [to_stagemesh_error(exc)]
            return [self.step([name])[0] for name in names]
        return [self._advance(state, noise) for state, noise in zip(states, noises, strict=True)]

    def decode(self, name: str) -> Decoded:
        """Decodes the latents of a request. Before the last step, the result is a preview."""
        return self._decode(self.states[name])

    def decode_latents(self, latents: Array) -> Decoded:
        """Decodes latents that another stage has serialized as uint8[bytes]."""
        request = DiffusionRequestState("", DiffusionInputs(seed=0))
        self._transfer.restore_values(request, LATENTS, latents)
        self._prepare(request)
        return self._decode(request)

    def warm_up(self, height: int, width: int, *, guidance_scale: float) -> None:
        """Runs a request of two steps. Raises NotReadyError (UNUSABLE_OPTION) if the model cannot make this size."""
        name, image = "warm-up", io.BytesIO()
        Image.new("RGB", (width, height)).save(image, "PNG")
        inputs = DiffusionInputs(
            seed=0,
            prompt=name,
            images=(image.getvalue(),) * self.pipeline.family.min_images,
            height=height,
            width=width,
            num_inference_steps=2,
            guidance_scale=guidance_scale,
        )
        try:
            for _ in range(self.begin(name, inputs).total_steps):
                for error in self.step([name]):
                    if error is not None:
                        raise error
            self.decode(name)
        except StagemeshError as exc:
            raise torch_setup.UnusableOptionError(
                f"load.warmup_sizes contains {height} by {width} pixels, which the model cannot make: {exc.message}"
            ) from exc
        finally:
            self.drop(name)

    def serialize(self, name: str, kind: str) -> Array:
        """Returns data of a request, serialized as uint8[bytes]. `kind` selects the data: CONDITIONING, LATENTS or
        STATE.
        """
        return self._transfer.serialize(self.states[name], kind)

    def drop(self, name: str) -> None:
        """Removes a request and frees its data. Does nothing if no request has this name."""
        state = self.states.pop(name, None)
        if state is not None:
            state.close()
        if state is not None and self.pipeline.forwards.caches is not None:
            self.pipeline.forwards.caches.forget(name)

    # -- inner workings

    @cached_property
    def _transfer(self) -> RequestTransfer:
        # Created when it is needed, because classic pipelines cannot transfer requests.
        return RequestTransfer(self.pipeline, self._folder)

    def _prepare(self, state: DiffusionRequestState) -> None:
        try:
            self.pipeline.prepare_encode(state)
        except Exception as exc:
            raise to_stagemesh_error(exc) from exc

    def _decode(self, state: DiffusionRequestState) -> Decoded:
        try:
            outputs = self.pipeline.post_decode(self.pipeline.end_loop(state))
        except Exception as exc:
            raise to_stagemesh_error(exc) from exc
        frames, audio = outputs.frames, outputs.audio
        return Decoded(
            _array(frames.reshape(-1, *frames.shape[-3:])) if frames is not None else None,
            _array(audio.flatten(0, 1).T) if audio is not None else None,
            outputs.sample_rate_hz,
            outputs.text,
        )

    def _advance(self, state: DiffusionRequestState, noise: torch.Tensor | None) -> StagemeshError | None:
        try:
            self.pipeline.step_scheduler(state, noise)
        except Exception as exc:  # noqa: BLE001  # schedulers raise any exception
            return to_stagemesh_error(exc)
        return None


class DiffusionWorker:
    """Owns the device and the memory of one process, and creates the runner, which loads the model. Not thread-safe.

    Executors call the methods of the worker and of its runner. Their arguments and results can be pickled, because the
    worker may run in another process.
    """

    def __init__(self, folder: Path, options: DiffusionOptions, *, rank_group: "RankGroup | None" = None) -> None:
        self._folder, self._options, self._rank_group = folder, options, rank_group
        self._device = rank_group.device if rank_group is not None else torch_setup.choose_device(options.device)
        torch_setup.set_up_torch(self._device)
        self._runner: DiffusionRunner | None = None
        self._sleeping_runner: DiffusionRunner | None = None
        """The runner whose weights are in host memory while the engine is asleep. None if the engine is awake or has
        freed the weights."""
        self.prompt_cache = PromptCache(options.prompt_cache_bytes)
        self._profile: Any = None
        """The running profiler of torch, or None if no profile is in progress."""
        self._profile_steps_left: int | None = None

    def load(self) -> ModelFacts:
        """Loads the model and returns its properties. Raises NotReadyError if the model cannot be loaded."""
        self._runner = runner = DiffusionRunner(
            self._folder, self._options, self._device, prompt_cache=self.prompt_cache
        )
        if self._rank_group is not None:
            self._rank_group.distribute(runner.pipeline.forwards)
        for height, width in self._options.load.warmup_sizes:
            runner.warm_up(height, width, guidance_scale=self._options.guidance_scale)
        return model_facts(runner.pipeline)

    @property
    def runner(self) -> DiffusionRunner:
        """The runner with the loaded model. Raises NotReadyError if no model is loaded."""
        if self._runner is None:
            raise NotReadyError("the model is not loaded")
        return self._runner

    def step(self, names: Sequence[str]) -> list[StagemeshError | None]:
        """Advances each request by one denoising step. Returns the result of `DiffusionRunner.step`. Counts the step in
        a running profile.
        """
        if self._profile is None:
            return self.runner.step(names)
        with record_function(PROFILED_STEP):
            errors = self.runner.step(names)
        if self._profile_steps_left is not None:
            self._profile_steps_left -= 1
            if self._profile_steps_left <= 0:
                self.stop_profile()
        return errors

    def drop(self, name: str) -> None:
        """Removes a request and frees its data. Does nothing if no request has this name, or if no model is loaded."""
        if self._runner is not None:
            self._runner.drop(name)

    def sleep(self, level: int) -> None:
        """Discards all requests and frees the device memory of the weights.

        Level 1 retains the weights in host memory if possible. Level 2 also clears the prompt cache.
        """
        runner, self._runner = self.runner, None
        for state in runner.states.values():
            state.close()
        runner.states.clear()
        if level > 1:
            self.prompt_cache.clear()
        load = self._options.load
        is_movable = self._rank_group is None and load.offload == "none" and not load.changes_weights
        if level == 1 and is_movable and self._device.type != "cpu":
            runner.pipeline.components.to(torch.device("cpu"))
            self._sleeping_runner = runner
        del runner
        torch_setup.release_unused_memory()

    def wake(self) -> bool:
        """Restores the weights after `sleep`. Returns True if the weights were read from files, or False if they were
        in host memory.

        If the weights were read from files, all LoRA adapters must be loaded again.
        """
        if self._sleeping_runner is None:
            self.load()
            torch_setup.freeze_loaded_objects()
            return True
        self._sleeping_runner.pipeline.components.to(self._device)
        self._runner, self._sleeping_runner = self._sleeping_runner, None
        return False

    def start_profile(self, path: str, *, max_steps: int | None) -> None:
        """Starts a profile of the next `max_steps` denoising steps. If `max_steps` is None, the profile ends when
        `stop_profile` is called.

        Each rank writes its profile to the file `{path}-rank{rank}.json.gz`.
        """
        rank = self._rank_group.rank if self._rank_group is not None else 0
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        export = methodcaller("export_chrome_trace", f"{path}-rank{rank}.json.gz")
        started = profile(activities=activities, on_trace_ready=export)
        started.start()
        self._profile, self._profile_steps_left = started, max_steps

    def stop_profile(self) -> None:
        """Ends the profile and writes its file. Does nothing if no profile is in progress."""
        started, self._profile = self._profile, None
        if started is not None:
            started.stop()

    def shutdown(self) -> None:
        """Frees the model and all requests, and ends a profile in progress. May be called more than once."""
        self.stop_profile()
        self._runner = self._sleeping_runner = None
        torch_setup.release_unused_memory()


def _array(tensor: torch.Tensor) -> Array:
    return tensor.to("cpu", torch.float32).contiguous().numpy()


def _pipeline_class(folder: Path, options: LoadOptions) -> Any:
    """Returns the class that runs the pipeline in `folder`. Classic pipelines have the same phases as modular ones."""
    if options.custom_pipeline is None:
        return ClassicStepPipeline if is_classic(folder) else ModularStepPipeline
    try:
        factory = import_factory(options.custom_pipeline)
    except (ImportError, AttributeError, ValueError) as exc:
        raise NotReadyError(
            f"load.custom_pipeline {options.custom_pipeline!r} cannot be imported: {exc}; write it as module:Class, "
            "and install its module in addition to Stagemesh",
            reason="MISSING_MODULE",
        ) from exc
    if not (isinstance(factory, type) and issubclass(factory, ModularStepPipeline)):
        raise torch_setup.UnusableOptionError(
            f"load.custom_pipeline {options.custom_pipeline!r} is not a subclass of ModularStepPipeline"
        )
    return factory
