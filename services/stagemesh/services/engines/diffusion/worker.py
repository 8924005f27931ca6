"""Owns a device: the model on it, the requests that are under way, and the device's memory. Used by one thread."""

import gc
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from stagemesh.common.errors import NotReadyError, StagemeshError
from stagemesh.common.settings import library_variable
from stagemesh.common.tensors import Array
from stagemesh.services.engines.diffusion.caches.prompt_cache import PromptCache, PromptCacheFigures
from stagemesh.services.engines.diffusion.devices import device_of
from stagemesh.services.engines.diffusion.memory import give_back, settle
from stagemesh.services.engines.diffusion.model.memory_estimates import ModelSizes, free_bytes, image_tokens, sizes_of
from stagemesh.services.engines.diffusion.options import DiffusionOptions
from stagemesh.services.engines.diffusion.profiler import ProfilerRecording
from stagemesh.services.engines.diffusion.runner import DiffusionRunner
from stagemesh.services.engines.diffusion.state import DiffusionInputs, DiffusionRequestState

if TYPE_CHECKING:
    from stagemesh.services.engines.diffusion.parallel.ranks import Ranks


@dataclass(frozen=True)
class ModelFacts:
    """What has to be known of a model before a request reaches it."""

    sizes: ModelSizes
    frames_multiple: int
    """Frames are one more than a multiple of it; 0 where it makes pictures."""
    min_steps: int
    takes_image: bool
    free_bytes: int
    """What the device has left for requests."""


@dataclass(frozen=True)
class Begun:
    """A request that is ready for its first step, or for its next."""

    key: tuple[object, ...]
    """Requests with the same key can share a step."""
    tokens: int
    step_index: int
    total_steps: int
    prompt_cache: PromptCacheFigures
    """At this moment."""


class DiffusionWorker:
    """Requests are known by their names; everything that goes in and out is numbers, texts and arrays."""

    def __init__(self, folder: Path, options: DiffusionOptions, *, ranks: "Ranks | None" = None) -> None:
        self._folder, self._options, self._ranks = folder, options, ranks
        self._device = ranks.device if ranks is not None else device_of(options)
        if not library_variable("OMP_NUM_THREADS"):
            # Stages share a machine; more threads in each would only fight over the cores.
            torch.set_num_threads(1)
        self._runner: DiffusionRunner | None = None
        self._resting: DiffusionRunner | None = None
        """While it sleeps with its weights in the host's memory."""
        self._prompt_cache = PromptCache(options.prompt_cache_bytes)
        self._recording: ProfilerRecording | None = None
        self._states: dict[str, DiffusionRequestState] = {}

    def load(self) -> ModelFacts:
        """Loads the model."""
        self._runner = runner = DiffusionRunner(
            self._folder, self._options, self._device, prompt_cache=self._prompt_cache
        )
        if self._ranks is not None:
            self._ranks.spread(runner.pipeline.forwarding)
        family = runner.pipeline.family
        return ModelFacts(
            sizes_of(runner.pipeline),
            family.frames_multiple,
            family.min_steps,
            family.takes_image,
            free_bytes(self._device),
        )

    @property
    def runner(self) -> DiffusionRunner:
        """The model; raises NotReadyError while there is none."""
        if self._runner is None:
            raise NotReadyError("the model is not loaded")
        return self._runner

    def begin(
        self, name: str, inputs: DiffusionInputs, *, conditioning: Array | None = None, state: Array | None = None
    ) -> Begun:
        """Makes a request known, from its prompt, from what encoding it made elsewhere, or from where it was left."""
        if state is not None:
            request = self.runner.carrier.unpack_state(name, inputs, state)
        else:
            request = DiffusionRequestState(name, inputs)
            if conditioning is not None:
                self.runner.carrier.unpack_conditioning(request, conditioning)
            self.runner.prepare(request)
        self._states[name] = request
        pipeline = self.runner.pipeline
        key = pipeline.batch_key(request) if request.total_steps else ()
        tokens = image_tokens(inputs, size_multiple=pipeline.family.size_multiple)
        figures = replace(self.runner.prompt_cache.figures)
        return Begun(key, tokens, request.step_index, request.total_steps, figures)

    def step(self, names: Sequence[str]) -> list[StagemeshError | None]:
        """One step of each; what each failed with."""
        states = [self._states[name] for name in names]
        if self._recording is None:
            return self.runner.step(states)
        return self._recording.step(lambda: self.runner.step(states))

    def picture(self, name: str) -> Array:
        """float32[pictures or frames, 3, height, width] in [0, 1]; of a request in its steps, what there is so far."""
        return self.runner.decode(self._states[name])

    def picture_of(self, latents: Array) -> Array:
        """The same of what another stage has denoised."""
        request = DiffusionRequestState("", DiffusionInputs(seed=0))
        self.runner.carrier.unpack_latents(request, latents)
        self.runner.prepare(request)
        return self.runner.decode(request)

    def conditioning(self, name: str) -> Array:
        """What encoding made, as uint8[bytes]."""
        return self.runner.carrier.pack_conditioning(self._states[name])

    def latents(self, name: str) -> Array:
        """What is to be decoded, as uint8[bytes]."""
        return self.runner.carrier.pack_latents(self._states[name])

    def state(self, name: str) -> Array:
        """All that is needed to go on elsewhere, as uint8[bytes]."""
        return self.runner.carrier.pack_state(self._states[name])

    def drop(self, name: str) -> None:
        """Forgets a request; nothing if it is not known."""
        state = self._states.pop(name, None)
        if state is not None:
            self.runner.forget(state)

    def load_adapter(self, name: str, path: str) -> int:
        """See `ModelAdapters.load`."""
        return self.runner.adapters.load(name, path)

    def unload_adapter(self, name: str) -> None:
        """See `ModelAdapters.unload`."""
        self.runner.adapters.unload(name)

    def clear_prompt_cache(self) -> PromptCacheFigures:
        """Forgets the prompts of earlier requests; returns what is left."""
        self._prompt_cache.clear()
        return self.prompt_cache_figures()

    def prompt_cache_figures(self) -> PromptCacheFigures:
        """See `PromptCache`."""
        return self._prompt_cache.figures

    def sleep(self, level: int) -> None:
        """Gives the weights' memory back, and at level 2 that of all that is kept for later requests."""
        runner, self._runner = self.runner, None
        self._states.clear()
        if level > 1:
            self._prompt_cache.clear()
        load = self._options.load
        plain = self._ranks is None and load.offload == "none" and not load.changes_weights
        if level == 1 and plain and self._device.type != "cpu":
            runner.pipeline.move(torch.device("cpu"))
            self._resting = runner
        else:
            runner.close()
        del runner
        give_back()

    def wake(self) -> bool:
        """Takes the weights' memory again. Whether they were read again from their files, without any adapter."""
        if self._resting is None:
            self.load()
            settle()
            return True
        self._resting.pipeline.move(self._device)
        self._runner, self._resting = self._resting, None
        return False

    def start_profile(self, path: str, *, max_steps: int | None) -> None:
        """Records what is computed, in a file whose path begins so, until `max_steps` are done or it is stopped."""
        rank = self._ranks.rank if self._ranks is not None else 0
        self._recording = ProfilerRecording(Path(f"{path}-rank{rank}.json.gz"), max_steps=max_steps)

    def stop_profile(self) -> None:
        """Writes it; nothing where none goes on."""
        recording, self._recording = self._recording, None
        if recording is not None:
            recording.end()

    def shutdown(self) -> None:
        """Lets everything go. Shutting down twice is harmless."""
        self.stop_profile()
        self._states.clear()
        if self._runner is not None:
            self._runner.close()
        self._runner = self._resting = None
        gc.collect()
