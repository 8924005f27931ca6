"""Step-by-step execution of diffusers' modular pipelines.

A modular pipeline is a sequence of blocks. One of these blocks is the denoising loop, which contains the blocks of a
single step. A block reads the model's components from the pipeline that the block receives as an argument. Each request
therefore uses a shallow copy of the pipeline with its own scheduler, its own guider and a stand-in for the transformer.
"""

import copy
import io
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import diffusers as _diffusers
import torch
from diffusers.modular_pipelines.modular_pipeline import (
    LoopSequentialPipelineBlocks,
    PipelineState,
    SequentialPipelineBlocks,
)
from PIL import Image

from stagemesh.common.media.decoding import DecodedBytes
from stagemesh.common.media.images import read_image
from stagemesh.services.engines.diffusion.caches import PromptCache
from stagemesh.services.engines.diffusion.model.families import family_of
from stagemesh.services.engines.diffusion.model.loading import Loader, load_image_processor
from stagemesh.services.engines.diffusion.model.shared_forwards import Call, CallRecorder, SharedForwards, replay
from stagemesh.services.engines.diffusion.options import DiffusionOptions
from stagemesh.services.engines.diffusion.state import DiffusionInputs, DiffusionRequestState

diffusers: Any = _diffusers

_DENOISER = "denoiser"
"""Name of the block that predicts the noise in a step. The subsequent blocks of the step update the latents."""
_GUIDED = 2.0
"""A guidance scale that enables guidance, so that both guidance branches are computed."""
_IMAGE_ENCODER = "vae_encoder"
_MAX_IMAGE_BYTES = 256 << 20
_SUB_BLOCKS: Mapping[str, tuple[str, ...]] = {
    "encode": ("text_encoder", _IMAGE_ENCODER),
    "denoise": ("denoise",),
    "decode": ("decode",),
}
"""The names of the diffusers blocks that belong to each part of a pipeline, by part."""


@dataclass(frozen=True)
class PhaseBlocks:
    """The blocks of a pipeline, grouped by phase. The groups of a phase that the stage does not run are empty."""

    encode: Sequence[Any] = ()
    before: Sequence[Any] = ()
    loop: Any = None
    denoise: Sequence[Any] = ()
    advance: Sequence[Any] = ()
    after: Sequence[Any] = ()
    decode: Sequence[Any] = ()


class ModularStepPipeline:
    """Runs a diffusers pipeline in four phases. A request's state contains all of its data, so the next step may belong
    to another request.

    For each request, call `prepare_encode` once, then `denoise_step` and `step_scheduler` for each step, then
    `post_decode` once. The result equals the result of the diffusers pipeline's own `__call__`. Not thread-safe.
    """

    def __init__(
        self,
        folder: Path,
        options: DiffusionOptions,
        *,
        device: torch.device | None = None,
        prompt_cache: PromptCache | None = None,
    ) -> None:
        """Loads the pipeline in `folder`, or only the part of the pipeline that the stage's options select.

        If `device` is None, uses the CPU. If `prompt_cache` is None, does not cache prompts. Raises NotReadyError if
        the pipeline cannot be loaded.
        """
        self.family = family_of(folder)
        self.device = device or torch.device("cpu")
        parts = tuple(_SUB_BLOCKS) if options.part == "all" else (options.part,)
        blocks = getattr(diffusers, self.family.blocks)()
        chosen_blocks = {
            each: {name: blocks.sub_blocks[name] for name in _SUB_BLOCKS[each] if self._has(name, blocks)}
            for each in parts
        }
        chosen = {name: block for each in chosen_blocks.values() for name, block in each.items()}
        self.components: Any = _sequence(chosen, like=blocks).init_pipeline(str(folder))
        if self.family.takes_image and "encode" in parts:
            self.components.update_components(processor=load_image_processor(folder))
        Loader(folder, options, device=self.device).load(self.components)
        self.forwards = SharedForwards(self.family, getattr(self.components, "transformer", None))
        if options.load.compile:
            self.forwards.disable_mixed_lengths()
        self._prompt_cache = prompt_cache or PromptCache(0)
        # diffusers recomputes these properties at every access.
        self._inputs = list(self.components.blocks.inputs)
        _freeze_properties(self.components, _execution_device=self.device)
        self._phases = self._make_phases(chosen_blocks, whole=blocks)

    @torch.no_grad()
    def prepare_encode(self, state: DiffusionRequestState) -> None:
        """Runs all blocks that precede the first denoising step. These blocks encode the prompt, generate the noise and
        set the noise schedule.
        """
        self.adopt(state)
        if self._phases.encode:
            self._encode(state)
        if self._phases.loop is not None:
            self._begin_loop(state)

    @torch.no_grad()
    def denoise_step(self, batch: Sequence[DiffusionRequestState]) -> list[torch.Tensor]:
        """Predicts the noise of each request at the request's current step. Returns one tensor for each request, in the
        order of `batch`.
        """
        single = len(batch) == 1 and self.forwards.split_calls is None and not self._guides_jointly(batch[0])
        if single or self.forwards.caches is not None:
            return [self._denoise(state, self.forwards.forward_alone(state)) for state in batch]
        recorded: list[list[Call]] = []
        for state in batch:
            recorder = CallRecorder()
            self._denoise(state, recorder)
            recorded.append(recorder.calls)
        predictions = self.forwards.forward_together(batch, recorded)
        return [
            self._denoise(state, replay(predictions[call] for call in calls))
            for state, calls in zip(batch, recorded, strict=True)
        ]

    @torch.no_grad()
    def step_scheduler(self, state: DiffusionRequestState, noise_pred: torch.Tensor) -> None:
        """Updates the latents of a request with the predicted noise, and increments the request's number of completed
        steps.
        """
        assert state.loop is not None, "a request is encoded before its steps"
        state.loop.noise_pred = noise_pred
        self._run_step(self._phases.advance, state, self._view(state))
        state.step_index += 1
        if state.denoised:
            state.values = self.end_loop(state).values
            state.loop = None

    @torch.no_grad()
    def post_decode(self, state: DiffusionRequestState) -> torch.Tensor:
        """Decodes the latents of a request. Returns images or videos with values in [0, 1].

        The shape is [images, channels, height, width] or [videos, frames, channels, height, width].
        """
        for block in self._phases.decode:
            block(self._view(state), state.values)
        result: torch.Tensor = state.values.get(self.family.output)
        return result

    @torch.no_grad()
    def end_loop(self, state: DiffusionRequestState) -> DiffusionRequestState:
        """Returns a copy of the request that can be decoded. In the copy, denoising ends after the steps completed so
        far.

        Returns `state` itself if denoising has already ended. Does not modify `state`.
        """
        if state.loop is None:
            return state
        ended = replace(state, values=PipelineState(dict(state.values.values), state.values.kwargs_mapping), loop=None)
        self._phases.loop.set_block_state(ended.values, state.loop)
        for block in self._phases.after:
            block(self._view(state), ended.values)
        return ended

    def adopt(self, state: DiffusionRequestState) -> None:
        """Prepares a new or transferred request for this pipeline: creates the request's guider, and sets the pipeline
        inputs that the request does not have yet.
        """
        state.guider = self._guider(state.inputs.guidance_scale)
        inputs = _request_inputs(state.inputs)
        for param in self._inputs:
            if param.name is not None and state.values.get(param.name) is None:
                state.values.set(param.name, inputs.get(param.name, param.default), param.kwargs_type)

    def batch_key(self, state: DiffusionRequestState) -> tuple[object, ...]:
        """Returns the request's compatibility key. Requests with equal keys can share a forward pass."""
        guided = state.guider is None or state.guider.num_conditions
        return (state.inputs.adapter, state.inputs.adapter_scale, guided, *self.forwards.batch_key(state))

    # -- inner workings

    def _has(self, name: str, blocks: Any) -> bool:
        """Returns whether `blocks` contains the block `name` and the pipeline uses this block.

        Text-to-image pipelines do not use the image encoder, which diffusers often lists for them.
        """
        return name in blocks.sub_blocks and (name != _IMAGE_ENCODER or self.family.takes_image)

    def _make_phases(self, chosen_blocks: Mapping[str, Mapping[str, Any]], *, whole: Any) -> PhaseBlocks:
        with_image = {"image": True, "image_latents": True} if self.family.takes_image else {}
        chosen = {
            part: [
                _copy_block(block)
                for block in _sequence(blocks, like=whole)
                .get_execution_blocks(prompt="", **with_image)
                .sub_blocks.values()
            ]
            for part, blocks in chosen_blocks.items()
        }
        phases = PhaseBlocks(encode=chosen.get("encode", ()), decode=chosen.get("decode", ()))
        if "denoise" not in chosen:
            return phases
        blocks = chosen["denoise"]
        at = next(i for i, each in enumerate(blocks) if isinstance(each, LoopSequentialPipelineBlocks))
        names, steps = list(blocks[at].sub_blocks), list(blocks[at].sub_blocks.values())
        advance_at = names.index(_DENOISER) + 1
        return replace(
            phases,
            before=blocks[:at],
            loop=blocks[at],
            denoise=steps[:advance_at],
            advance=steps[advance_at:],
            after=blocks[at + 1 :],
        )

    def _encode(self, state: DiffusionRequestState) -> None:
        inputs = state.inputs
        guided = state.guider is not None and state.guider.num_conditions > 1
        key = (inputs.prompt, inputs.negative_prompt if guided else None, inputs.image, inputs.height, inputs.width)
        cached = self._prompt_cache.get(key)
        if cached is None:
            before = dict(state.values.values)
            view = self._view(state)
            if self.family.encodes_both:
                view.guider = self._guider(_GUIDED)
            for block in self._phases.encode:
                block(view, state.values)
            new = {name: value for name, value in state.values.values.items() if before.get(name) is not value}
            # Input images are needed only while encoding, so they are not cached.
            cached = {name: value for name, value in new.items() if not _is_image(value)}
            self._prompt_cache.put(key, cached)
        for name, value in cached.items():
            state.values.set(name, value)

    def _begin_loop(self, state: DiffusionRequestState) -> None:
        # Copied before the blocks call `set_timesteps`, because each request has its own schedule.
        state.scheduler = copy.deepcopy(self.components.scheduler)
        view = self._view(state)
        for block in self._phases.before:
            block(view, state.values)
        state.loop = loop = self._phases.loop.get_block_state(state.values)
        # The blocks of a step read these values. The loop's own `__call__` usually sets them.
        loop.num_warmup_steps, loop.additional_cond_kwargs = 0, {}
        for name in self.family.masks:
            # The pipeline's own `__call__` does the same. Attention without a mask is faster and has the same result.
            if (mask := loop[name]) is not None and mask.all():
                loop[name] = None
        state.total_steps = len(loop.timesteps)

    def _guides_jointly(self, state: DiffusionRequestState) -> bool:
        return self.family.joint_guidance is not None and state.guider.num_conditions > 1

    def _denoise(self, state: DiffusionRequestState, forward: Any) -> torch.Tensor:
        view = self._view(state)
        view.transformer = self.forwards.stand_in(forward)
        noise: torch.Tensor = self._run_step(self._phases.denoise, state, view)["noise_pred"]
        return noise

    def _run_step(self, blocks: Sequence[Any], state: DiffusionRequestState, view: Any) -> Any:
        assert state.loop is not None, "a request is encoded before its steps"
        i = state.step_index
        for block in blocks:
            _, state.loop = block(view, state.loop, i=i, t=state.loop.timesteps[i])
        return state.loop

    def _guider(self, scale: float) -> Any:
        """Returns a copy of the model's guider with the guidance scale `scale`.

        Returns None if the model has no guider. The transformer of such a model receives the guidance scale as an
        input.
        """
        guider = copy.deepcopy(getattr(self.components, "guider", None))
        if guider is not None:
            guider.guidance_scale = scale
            guider.use_original_formulation = self.family.guidance_from_zero
            guider.enable()
        return guider

    def _view(self, state: DiffusionRequestState) -> Any:
        """Returns a shallow copy of the pipeline that uses the request's own scheduler and guider."""
        view = copy.copy(self.components)
        if state.scheduler is not None:
            view.scheduler = state.scheduler
        if state.guider is not None:
            view.guider = state.guider
        return view

    @property
    def request_input_names(self) -> Iterable[str]:
        """The names of the pipeline inputs whose values are specified by a request."""
        return _request_inputs(DiffusionInputs(seed=0)).keys()


def _request_inputs(inputs: DiffusionInputs) -> dict[str, object]:
    return {
        "prompt": inputs.prompt,
        "negative_prompt": inputs.negative_prompt,
        "image": None if inputs.image is None else read_image(io.BytesIO(inputs.image), DecodedBytes(_MAX_IMAGE_BYTES)),
        "height": inputs.height or None,
        "width": inputs.width or None,
        "num_frames": inputs.num_frames,
        "num_inference_steps": inputs.num_inference_steps,
        "guidance_scale": inputs.guidance_scale,
        "generator": torch.Generator().manual_seed(inputs.seed),
        "output_type": "pt",
    }


def _freeze_properties(owner: Any, **values: object) -> None:
    """Replaces properties of `owner` with constants. `values` contains the constants, by property name."""
    kind: Any = owner.__class__
    owner.__class__ = type(kind.__name__, (kind,), values)


def _copy_block(block: Any) -> Any:
    """Returns a private copy of `block`, so that diffusers can modify the copy without affecting other pipelines.

    diffusers modifies blocks in place when it combines them into a pipeline.
    """
    copied = copy.copy(block)
    _freeze_properties(
        copied,
        inputs=[copy.copy(param) for param in block.inputs],
        intermediate_outputs=[copy.copy(param) for param in block.intermediate_outputs],
    )
    return copied


def _sequence(blocks: Mapping[str, Any], *, like: Any) -> Any:
    """Returns a sequence of `blocks` that has the model name of the block `like`. diffusers selects the pipeline class
    by this model name.
    """
    kind: Any = type(type(like).__name__, (SequentialPipelineBlocks,), {"model_name": like.model_name})
    return kind.from_blocks_dict(dict(blocks))


def _is_image(value: Any) -> bool:
    """Returns whether the value is a PIL image or a list of PIL images."""
    images: Any = value
    return isinstance(images[0] if isinstance(value, list) and value else images, Image.Image)
