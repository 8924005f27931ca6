"""Runs diffusion requests on a loaded model. Not thread-safe."""

from collections.abc import Sequence
from pathlib import Path

import torch

from stagemesh.common.descriptors import import_factory
from stagemesh.common.errors import NotReadyError, StagemeshError
from stagemesh.common.tensors import Array
from stagemesh.services.engines.diffusion.caches.prompt_cache import PromptCache
from stagemesh.services.engines.diffusion.caches.step_caches import enable_caches
from stagemesh.services.engines.diffusion.model.loading import Loader
from stagemesh.services.engines.diffusion.model.lora_adapters import ModelAdapters
from stagemesh.services.engines.diffusion.model.modular_pipeline import ModularStepPipeline
from stagemesh.services.engines.diffusion.model_errors import to_stagemesh_error
from stagemesh.services.engines.diffusion.options import DiffusionOptions, LoadOptions
from stagemesh.services.engines.diffusion.state import DiffusionRequestState
from stagemesh.services.engines.diffusion.transfer.request_transfer import RequestTransfer


class DiffusionRunner:
    """Loads a pipeline, or one part of a pipeline, on one device and runs requests on it. Not thread-safe."""

    def __init__(
        self,
        folder: Path,
        options: DiffusionOptions,
        device: torch.device,
        *,
        prompt_cache: PromptCache | None = None,
    ) -> None:
        """Loads the model in `folder`. Raises NotReadyError if the model cannot be loaded or is not supported."""
        dtype = getattr(torch, options.dtype)
        self._loader = Loader(folder, options.load, dtype=dtype, device=device)
        self.pipeline = _pipeline_class(options.load)(
            folder,
            dtype,
            part=options.part,
            device=device,
            prompt_cache=prompt_cache,
            loader=self._loader,
        )
        self.transfer = RequestTransfer(self.pipeline, folder)
        forwards = self.pipeline.forwards
        self.adapters = ModelAdapters(forwards.model, options.max_lora_rank)
        if options.step_cache is not None and forwards.model is not None:
            forwards.caches = enable_caches(forwards.model, options.step_cache)

    def prepare(self, state: DiffusionRequestState) -> None:
        """Prepares a request for its first step: encodes the prompt, generates the noise and sets the noise
        schedule."""
        try:
            self.pipeline.prepare_encode(state)
        except Exception as exc:
            raise to_stagemesh_error(exc) from exc

    def step(self, states: Sequence[DiffusionRequestState]) -> list[StagemeshError | None]:
        """Advances each request by one denoising step in as few forward passes as possible.

        Returns one item for each request: the request's error, or None if the request succeeded. If a shared forward
        pass fails, runs each request alone, so that only the request that caused the failure fails.
        """
        try:
            self.adapters.select(states[0].inputs.adapter, states[0].inputs.adapter_scale)
            noises = self.pipeline.denoise_step(states)
        except Exception as exc:  # noqa: BLE001  # models raise any exception
            if len(states) == 1:
                return [to_stagemesh_error(exc)]
            return [self.step([state])[0] for state in states]
        return [self._advance(state, noise) for state, noise in zip(states, noises, strict=True)]

    def decode(self, state: DiffusionRequestState) -> Array:
        """Decodes the latents of a request. Before the last step, the returned frames are a preview.

        Returns float32[images or frames, 3, height, width] with values in [0, 1].
        """
        try:
            result = self.pipeline.post_decode(self.pipeline.end_loop(state))
        except Exception as exc:
            raise to_stagemesh_error(exc) from exc
        frames = result.reshape(-1, *result.shape[-3:])
        return frames.to("cpu", torch.float32).contiguous().numpy()

    def forget(self, state: DiffusionRequestState) -> None:
        """Frees the data that the step cache stores for a request."""
        if self.pipeline.forwards.caches is not None:
            self.pipeline.forwards.caches.forget(state.request_id)

    def close(self) -> None:
        """Deletes the offload folder, if any. May be called more than once."""
        self._loader.close()

    # -- inner workings

    def _advance(self, state: DiffusionRequestState, noise: torch.Tensor) -> StagemeshError | None:
        try:
            self.pipeline.step_scheduler(state, noise)
        except Exception as exc:  # noqa: BLE001  # schedulers raise any exception
            return to_stagemesh_error(exc)
        return None


def _pipeline_class(options: LoadOptions) -> type[ModularStepPipeline]:
    if options.custom_pipeline is None:
        return ModularStepPipeline
    try:
        factory = import_factory(options.custom_pipeline)
    except (ImportError, AttributeError, ValueError) as exc:
        raise NotReadyError(
            f"load.custom_pipeline {options.custom_pipeline!r} cannot be imported: {exc}; write it as module:Class, "
            "and install its module in addition to Stagemesh",
            reason="MISSING_MODULE",
        ) from exc
    if not (isinstance(factory, type) and issubclass(factory, ModularStepPipeline)):
        raise NotReadyError(
            f"load.custom_pipeline {options.custom_pipeline!r} is not a subclass of ModularStepPipeline"
        )
    return factory
