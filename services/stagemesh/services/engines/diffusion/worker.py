"""The worker of a diffusion engine. It owns the model, the state of running requests and the device memory."""

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from stagemesh.common.errors import NotReadyError, StagemeshError
from stagemesh.common.settings import library_variable
from stagemesh.common.tensors import Array
from stagemesh.services.engines.abilities import CacheStatistics
from stagemesh.services.engines.diffusion import CONDITIONING, LATENTS
from stagemesh.services.engines.diffusion.caches.prompt_cache import PromptCache
from stagemesh.services.engines.diffusion.device import choose_device, freeze_loaded_objects, release_unused_memory
from stagemesh.services.engines.diffusion.model.facts import ModelFacts, image_tokens, model_facts
from stagemesh.services.engines.diffusion.options import DiffusionOptions
from stagemesh.services.engines.diffusion.runner import DiffusionRunner
from stagemesh.services.engines.diffusion.state import DiffusionInputs, DiffusionRequestState

if TYPE_CHECKING:
    from stagemesh.services.engines.diffusion.parallel.rank_group import RankGroup

T = TypeVar("T")

PROFILED_STEP = "denoising step"
"""Name of each denoising step in a profile."""


@dataclass(frozen=True)
class PreparedRequest:
    """Scheduling data of a request that is ready for its first step, or for its next step after a checkpoint."""

    key: tuple[object, ...]
    """Compatibility key. Only requests with equal keys can share a step."""
    tokens: int
    step_index: int
    total_steps: int
    prompt_cache: CacheStatistics
    """Statistics of the prompt cache, taken after the request was prepared."""


class DiffusionWorker:
    """Loads a model on one device and runs requests, which are identified by name. Not thread-safe.

    Arguments and results can be pickled, because the worker may run in another process.
    """

    def __init__(self, folder: Path, options: DiffusionOptions, *, rank_group: "RankGroup | None" = None) -> None:
        self._folder, self._options, self._rank_group = folder, options, rank_group
        self._device = rank_group.device if rank_group is not None else choose_device(options)
        if not library_variable("OMP_NUM_THREADS"):
            # Stages share a machine. With more threads in each stage, they would compete for the cores.
            torch.set_num_threads(1)
        self._runner: DiffusionRunner | None = None
        self._sleeping_runner: DiffusionRunner | None = None
        """The runner while the engine is asleep and retains the weights in host memory. None otherwise."""
        self._prompt_cache = PromptCache(options.prompt_cache_bytes)
        self._profile: _StepProfile | None = None
        self._states: dict[str, DiffusionRequestState] = {}

    def load(self) -> ModelFacts:
        """Loads the model and returns its properties. Raises NotReadyError if the model cannot be loaded."""
        self._runner = runner = DiffusionRunner(
            self._folder, self._options, self._device, prompt_cache=self._prompt_cache
        )
        if self._rank_group is not None:
            self._rank_group.distribute(runner.pipeline.forwards)
        return model_facts(runner.pipeline)

    @property
    def runner(self) -> DiffusionRunner:
        """Runner with the loaded model. Raises NotReadyError if no model is loaded."""
        if self._runner is None:
            raise NotReadyError("the model is not loaded")
        return self._runner

    # -- requests

    def begin(
        self, name: str, inputs: DiffusionInputs, *, conditioning: Array | None = None, state: Array | None = None
    ) -> PreparedRequest:
        """Adds a request and prepares its next step.

        `conditioning` contains encoding results of another stage, and `state` contains the state of a checkpoint. If
        both are None, the request starts from its prompt.
        """
        if state is not None:
            request = self.runner.transfer.restore_state(name, inputs, state)
        else:
            request = DiffusionRequestState(name, inputs)
            if conditioning is not None:
                self.runner.transfer.restore_values(request, CONDITIONING, conditioning)
            self.runner.prepare(request)
        self._states[name] = request
        pipeline = self.runner.pipeline
        key = pipeline.batch_key(request) if request.total_steps else ()
        tokens = image_tokens(inputs, pipeline.family)
        return PreparedRequest(key, tokens, request.step_index, request.total_steps, self._prompt_cache.statistics)

    def step(self, names: Sequence[str]) -> list[StagemeshError | None]:
        """Advances each request by one denoising step.

        Returns one item for each request: the request's error, or None if the request succeeded.
        """
        states = [self._states[name] for name in names]
        if self._profile is None:
            return self.runner.step(states)
        return self._profile.record_step(lambda: self.runner.step(states))

    def decode(self, name: str) -> Array:
        """Decodes the latents of a request. Before the last step, the returned frames are a preview.

        Returns float32[images or frames, 3, height, width] with values in [0, 1].
        """
        return self.runner.decode(self._states[name])

    def decode_latents(self, latents: Array) -> Array:
        """Decodes latents that another stage has serialized. Returns frames in the format of `decode`."""
        request = DiffusionRequestState("", DiffusionInputs(seed=0))
        self.runner.transfer.restore_values(request, LATENTS, latents)
        self.runner.prepare(request)
        return self.runner.decode(request)

    def serialize(self, name: str, kind: str) -> Array:
        """Returns the data of a request that `kind` selects: CONDITIONING, LATENTS or STATE.

        The data is serialized as uint8[bytes].
        """
        return self.runner.transfer.serialize(self._states[name], kind)

    def drop(self, name: str) -> None:
        """Removes a request and frees its data. Does nothing if no request has this name."""
        state = self._states.pop(name, None)
        if state is not None:
            self.runner.forget(state)

    # -- operators' controls

    def load_adapter(self, name: str, path: str) -> int:
        """Loads a LoRA adapter from the folder `path` and returns its LoRA rank.

        Raises InvalidRequestError if the adapter is not valid.
        """
        return self.runner.adapters.load(name, path)

    def unload_adapter(self, name: str) -> None:
        """Unloads a LoRA adapter. Does nothing if the adapter is not loaded."""
        self.runner.adapters.unload(name)

    def clear_prompt_cache(self) -> CacheStatistics:
        """Clears the prompt cache and returns its statistics. Running requests retain their embeddings."""
        self._prompt_cache.clear()
        return self._prompt_cache.statistics

    def sleep(self, level: int) -> None:
        """Frees the device memory of the weights and discards all requests.

        Level 1 retains the weights in host memory if possible. Level 2 also clears the prompt cache.
        """
        runner, self._runner = self.runner, None
        self._states.clear()
        if level > 1:
            self._prompt_cache.clear()
        load = self._options.load
        is_movable = self._rank_group is None and load.offload == "none" and not load.changes_weights
        if level == 1 and is_movable and self._device.type != "cpu":
            runner.pipeline.components.to(torch.device("cpu"))
            self._sleeping_runner = runner
        else:
            runner.close()
        del runner
        release_unused_memory()

    def wake(self) -> bool:
        """Restores the weights after `sleep`. Returns True if the weights were read from files.

        In that case, all LoRA adapters must be loaded again.
        """
        if self._sleeping_runner is None:
            self.load()
            freeze_loaded_objects()
            return True
        self._sleeping_runner.pipeline.components.to(self._device)
        self._runner, self._sleeping_runner = self._sleeping_runner, None
        return False

    def start_profile(self, path: str, *, max_steps: int | None) -> None:
        """Starts a profile of the next `max_steps` steps. If `max_steps` is None, the profile ends at `stop_profile`.

        Each rank writes its profile to the file `{path}-rank{rank}.json.gz`.
        """
        rank = self._rank_group.rank if self._rank_group is not None else 0
        self._profile = _StepProfile(Path(f"{path}-rank{rank}.json.gz"), max_steps=max_steps)

    def stop_profile(self) -> None:
        """Ends the profile and writes its file. Does nothing if no profile is in progress."""
        started, self._profile = self._profile, None
        if started is not None:
            started.end()

    def shutdown(self) -> None:
        """Frees the model and all requests, and ends a profile in progress. May be called more than once."""
        self.stop_profile()
        self._states.clear()
        if self._runner is not None:
            self._runner.close()
        self._runner = self._sleeping_runner = None
        gc.collect()


class _StepProfile:
    """Profiles denoising steps with torch's profiler. A profile must be started and ended on the same thread."""

    def __init__(self, file: Path, *, max_steps: int | None) -> None:
        """Starts a profile that `end` writes to `file` as a Chrome trace. `max_steps` is None if the number of steps is
        not limited."""
        self._file, self._steps_left = file, max_steps
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        self._profile: Any = profile(activities=activities)
        self._profile.start()

    def record_step(self, step: Callable[[], T]) -> T:
        """Runs a step, profiles it and returns its result. Ends the profile after `max_steps` steps."""
        with record_function(PROFILED_STEP):
            result = step()
        if self._steps_left is not None:
            self._steps_left -= 1
            if self._steps_left <= 0:
                self.end()
        return result

    def end(self) -> None:
        """Ends the profile and writes the file. May be called more than once."""
        ended, self._profile = self._profile, None
        if ended is not None:
            ended.stop()
            ended.export_chrome_trace(str(self._file))
