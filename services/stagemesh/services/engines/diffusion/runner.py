"""Loads a model and executes requests on it. Used by one thread."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from stagemesh.common.descriptors import import_factory
from stagemesh.common.errors import NotReadyError, StagemeshError
from stagemesh.common.tensors import Array
from stagemesh.services.engines.diffusion.adapters.model_adapters import ModelAdapters
from stagemesh.services.engines.diffusion.caches.prompt_cache import PromptCache
from stagemesh.services.engines.diffusion.caches.step_caches import caches_of
from stagemesh.services.engines.diffusion.failures import named
from stagemesh.services.engines.diffusion.model.load_options import LoadOptions
from stagemesh.services.engines.diffusion.model.loading import Loader
from stagemesh.services.engines.diffusion.model.modular import ModularStepPipeline
from stagemesh.services.engines.diffusion.options import DiffusionOptions
from stagemesh.services.engines.diffusion.state import DiffusionInputs, DiffusionRequestState
from stagemesh.services.engines.diffusion.transfer.request_transfer import RequestTransfer


class DiffusionRunner:
    """One part of a pipeline, or all of it, on one device."""

    def __init__(
        self,
        folder: Path,
        options: DiffusionOptions,
        device: torch.device,
        *,
        prompt_cache: PromptCache | None = None,
    ) -> None:
        """Loads; raises NotReadyError for what is no model that can be stepped through."""
        self.prompt_cache = prompt_cache or PromptCache(options.prompt_cache_bytes)
        dtype = getattr(torch, options.dtype)
        self._loader = Loader(folder, options.load, dtype=dtype, device=device)
        self.pipeline = _pipeline_class(options.load)(
            folder,
            dtype,
            part=options.part,
            device=device,
            prompt_cache=self.prompt_cache,
            loader=self._loader,
        )
        self.carrier = RequestTransfer(self.pipeline, folder)
        forwarding = self.pipeline.forwarding
        self._adapters = ModelAdapters(forwarding.model, options.max_lora_rank) if options.enable_lora else None
        if options.step_cache is not None and forwarding.model is not None:
            forwarding.caches = caches_of(forwarding.model, options.step_cache)

    def prepare(self, state: DiffusionRequestState) -> None:
        """Everything before the first step."""
        try:
            self.pipeline.prepare_encode(state)
        except Exception as exc:
            raise named(exc) from exc

    def step(self, states: Sequence[DiffusionRequestState]) -> list[StagemeshError | None]:
        """One step of each, in as few forwards as they allow; what each failed with.

        Where a forward of several fails, each is tried alone: the one at fault fails alone.
        """
        try:
            if self._adapters is not None:
                self._adapters.select(states[0].inputs.adapter, states[0].inputs.adapter_scale)
            noises = self.pipeline.denoise_step(states)
        except Exception as exc:  # noqa: BLE001  # whatever a model raises
            if len(states) == 1:
                return [named(exc)]
            return [self.step([state])[0] for state in states]
        return [self._advance(state, noise) for state, noise in zip(states, noises, strict=True)]

    def decode(self, state: DiffusionRequestState) -> Array:
        """float32[pictures or frames, 3, height, width] in [0, 1]: of what there is of it so far."""
        try:
            made = self.pipeline.post_decode(self.pipeline.so_far(state))
        except Exception as exc:
            raise named(exc) from exc
        frames = made.reshape(-1, *made.shape[-3:])
        return frames.to("cpu", torch.float32).contiguous().numpy()

    def execute_model(self, inputs: DiffusionInputs) -> Array:
        """A whole request at once; see `decode`."""
        *_, made = self.execute_stepwise(inputs)
        assert made is not None, "the last is the picture"
        return made

    def execute_stepwise(self, inputs: DiffusionInputs) -> Iterator[Array | None]:
        """A whole request: None after each step, and what was made at the end."""
        state = DiffusionRequestState("", inputs)
        self.prepare(state)
        while not state.denoised:
            (error,) = self.step([state])
            if error is not None:
                raise error
            yield None
        yield self.decode(state)
        self.forget(state)

    @property
    def adapters(self) -> ModelAdapters:
        """The model's LoRA adapters; raises NotReadyError where it was loaded for none."""
        if self._adapters is None:
            raise NotReadyError("the stage takes no adapters; start it with the option enable_lora")
        return self._adapters

    def forget(self, state: DiffusionRequestState) -> None:
        """Frees what the model keeps of a request."""
        if self.pipeline.forwarding.caches is not None:
            self.pipeline.forwarding.caches.forget(state.request_id)

    def close(self) -> None:
        """Removes what it has put on the disk. Closing twice is harmless."""
        self._loader.close()

    # -- inner workings

    def _advance(self, state: DiffusionRequestState, noise: torch.Tensor) -> StagemeshError | None:
        try:
            self.pipeline.step_scheduler(state, noise)
        except Exception as exc:  # noqa: BLE001  # whatever a scheduler raises
            return named(exc)
        return None


def _pipeline_class(options: LoadOptions) -> type[ModularStepPipeline]:
    if options.custom_pipeline is None:
        return ModularStepPipeline
    try:
        made = import_factory(options.custom_pipeline)
    except (ImportError, AttributeError, ValueError) as exc:
        raise NotReadyError(
            f"load.custom_pipeline {options.custom_pipeline!r} cannot be imported: {exc}; write it as module:Class, "
            "and install the module beside Stagemesh",
            reason="MISSING_MODULE",
        ) from exc
    if not (isinstance(made, type) and issubclass(made, ModularStepPipeline)):
        raise NotReadyError(f"load.custom_pipeline {options.custom_pipeline!r} is no kind of ModularStepPipeline")
    return made
