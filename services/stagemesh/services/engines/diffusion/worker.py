"""The worker of a diffusion engine. It owns the device, its memory and the runner with the loaded model."""

from collections.abc import Sequence
from operator import methodcaller
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from stagemesh.common.errors import NotReadyError, StagemeshError
from stagemesh.common.settings import library_variable
from stagemesh.services.engines.abilities import CacheStatistics
from stagemesh.services.engines.diffusion.caches.prompt_cache import PromptCache
from stagemesh.services.engines.diffusion.device import choose_device, freeze_loaded_objects, release_unused_memory
from stagemesh.services.engines.diffusion.model.facts import ModelFacts, model_facts
from stagemesh.services.engines.diffusion.options import DiffusionOptions
from stagemesh.services.engines.diffusion.runner import DiffusionRunner

if TYPE_CHECKING:
    from stagemesh.services.engines.diffusion.parallel.rank_group import RankGroup

PROFILED_STEP = "denoising step"
"""Name of each denoising step in a profile."""


class DiffusionWorker:
    """Owns the device and the memory of one process, and loads the runner. Not thread-safe.

    Executors call the methods of the worker and of its runner. Arguments and results can be pickled, because the worker
    may run in another process.
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
        self._profile: Any = None
        """The profiler of torch while a profile is in progress, otherwise None."""
        self._profile_steps_left: int | None = None

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

    def step(self, names: Sequence[str]) -> list[StagemeshError | None]:
        """Advances each request by one denoising step. Returns the results of `DiffusionRunner.step`."""
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

    def clear_prompt_cache(self) -> CacheStatistics:
        """Clears the prompt cache and returns its statistics. Running requests retain their embeddings."""
        self._prompt_cache.clear()
        return self._prompt_cache.statistics

    def sleep(self, level: int) -> None:
        """Frees the device memory of the weights and discards all requests.

        Level 1 retains the weights in host memory if possible. Level 2 also clears the prompt cache.
        """
        runner, self._runner = self.runner, None
        runner.states.clear()
        if level > 1:
            self._prompt_cache.clear()
        load = self._options.load
        is_movable = self._rank_group is None and load.offload == "none" and not load.changes_weights
        if level == 1 and is_movable and self._device.type != "cpu":
            runner.pipeline.components.to(torch.device("cpu"))
            self._sleeping_runner = runner
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
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        export = methodcaller("export_chrome_trace", f"{path}-rank{rank}.json.gz")
        self._profile = profile(activities=activities, on_trace_ready=export)
        self._profile_steps_left = max_steps
        self._profile.start()

    def stop_profile(self) -> None:
        """Ends the profile and writes its file. Does nothing if no profile is in progress."""
        started, self._profile = self._profile, None
        if started is not None:
            started.stop()

    def shutdown(self) -> None:
        """Frees the model and all requests, and ends a profile in progress. May be called more than once."""
        self.stop_profile()
        self._runner = self._sleeping_runner = None
        release_unused_memory()
