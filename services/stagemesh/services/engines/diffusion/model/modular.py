"""Any model that diffusers has in modular form, cut into the four phases.

A modular pipeline is a list of blocks, of which one is the denoising loop, itself made of blocks for one step. Blocks
find the model's parts on the pipeline that they are given: each request has a shallow copy of it, with a scheduler and
a guider of its own, and a stand-in for the transformer.
"""

import copy
import inspect
import io
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import diffusers as _diffusers
import torch
from diffusers.modular_pipelines.modular_pipeline import (
    LoopSequentialPipelineBlocks,
    PipelineState,
    SequentialPipelineBlocks,
)

from stagemesh.common.errors import InvalidRequestError, NotReadyError
from stagemesh.services.engines.diffusion.batching.recorded_calls import Call, CallRecorder, CallReplayer, Transformer
from stagemesh.services.engines.diffusion.batching.shared_forwards import SharedForwards
from stagemesh.services.engines.diffusion.caches.prompt_cache import PromptCache
from stagemesh.services.engines.diffusion.model.families import FAMILIES, Family
from stagemesh.services.engines.diffusion.model.image_processor import picture_processor
from stagemesh.services.engines.diffusion.model.load_options import LoadOptions
from stagemesh.services.engines.diffusion.model.loading import Loader
from stagemesh.services.engines.diffusion.options import Part
from stagemesh.services.engines.diffusion.state import DiffusionInputs, DiffusionRequestState

diffusers: Any = _diffusers

_DENOISER = "denoiser"
"""The block of a step that makes the noise; those after it go on by it."""
_GUIDED = 2.0
"""A scale that asks for both branches of guidance."""
_PICTURE_ENCODER = "vae_encoder"
_SUB_BLOCKS: Mapping[str, tuple[str, ...]] = {
    "encode": ("text_encoder", _PICTURE_ENCODER),
    "denoise": ("denoise",),
    "decode": ("decode",),
}
"""What diffusers calls each part's blocks."""


@dataclass(frozen=True)
class Flow:
    """The blocks that a request goes through; those of parts that are not here are missing."""

    encode: Sequence[Any]
    before: Sequence[Any]
    loop: Any
    denoise: Sequence[Any]
    advance: Sequence[Any]
    after: Sequence[Any]
    decode: Sequence[Any]


class ModularStepPipeline:
    """See `stagemesh.services.engines.diffusion.model.base.StepPipeline`."""

    def __init__(
        self,
        folder: Path,
        dtype: torch.dtype,
        *,
        part: Part = "all",
        device: torch.device | None = None,
        prompt_cache: PromptCache | None = None,
        loader: Loader | None = None,
    ) -> None:
        """Loads a pipeline that diffusers saved, or one part of it; raises NotReadyError where it cannot."""
        self.family = family_of(folder)
        self.device = device or torch.device("cpu")
        self.parts = tuple(_SUB_BLOCKS) if part == "all" else (part,)
        blocks = getattr(diffusers, self.family.blocks)()
        chosen_blocks = {
            each: {name: blocks.sub_blocks[name] for name in _SUB_BLOCKS[each] if self._has(name, blocks)}
            for each in self.parts
        }
        chosen = {name: block for each in chosen_blocks.values() for name, block in each.items()}
        self.components: Any = _sequence(chosen, like=blocks).init_pipeline(str(folder))
        if self.family.takes_image and "encode" in self.parts:
            self.components.update_components(processor=picture_processor(folder))
        loader = loader or Loader(folder, LoadOptions(), dtype=dtype, device=self.device)
        loader.load(self.components)
        _check_loaded(self.components, folder, dtype)
        loader.place(self.components)
        self.forwarding = SharedForwards(self.family, getattr(self.components, "transformer", None))
        if loader.compiles:
            self.forwarding.stop_mixing()
        self._prompt_cache = prompt_cache or PromptCache(0)
        model = getattr(self.components, "transformer", None)
        kind = cast("Any", type(model))
        # The class's own: what is hooked onto the object takes anything.
        self._signature = inspect.signature(kind.forward.__get__(model)) if model else inspect.Signature()
        # diffusers works these out anew each time that they are asked for, for every request.
        self._inputs = list(self.components.blocks.inputs)
        _settle(self.components, _execution_device=self.device)
        self._flow = self._flow_of(chosen_blocks, whole=blocks)

    @torch.no_grad()
    def prepare_encode(self, state: DiffusionRequestState) -> None:
        """See `StepPipeline`. Does what the loaded parts have to do before the steps."""
        self.adopt(state)
        if self._flow.encode:
            self._encode(state)
        if self._flow.loop is not None:
            self._begin_loop(state)

    @torch.no_grad()
    def denoise_step(self, batch: Sequence[DiffusionRequestState]) -> list[torch.Tensor]:
        """See `StepPipeline`."""
        single = len(batch) == 1 and self.forwarding.branches is None and not self._jointly(batch[0])
        if single or self.forwarding.caches is not None:
            return [self._denoise(state, self.forwarding.alone(state)) for state in batch]
        recorded: list[list[Call]] = []
        for state in batch:
            recorder = CallRecorder(state.request_id)
            self._denoise(state, recorder)
            recorded.append(recorder.calls)
        answers = self.forwarding.together(batch, recorded)
        return [
            self._denoise(state, CallReplayer(iter([answers[call] for call in calls])))
            for state, calls in zip(batch, recorded, strict=True)
        ]

    @torch.no_grad()
    def step_scheduler(self, state: DiffusionRequestState, noise_pred: torch.Tensor) -> None:
        """See `StepPipeline`."""
        assert state.loop is not None, "a request is encoded before its steps"
        state.loop.noise_pred = noise_pred
        self._run_step(self._flow.advance, state, self._view(state))
        state.step_index += 1
        if state.denoised:
            state.values = self.so_far(state).values
            state.loop = None

    @torch.no_grad()
    def post_decode(self, state: DiffusionRequestState) -> torch.Tensor:
        """See `StepPipeline`."""
        for block in self._flow.decode:
            block(self._view(state), state.values)
        made: torch.Tensor = state.values.get(self.family.output)
        return made

    @torch.no_grad()
    def so_far(self, state: DiffusionRequestState) -> DiffusionRequestState:
        """The request as if no step were left, for decoding what there is of it; `state` itself can go on."""
        if state.loop is None:
            return state
        ended = replace(state, values=PipelineState(dict(state.values.values), state.values.kwargs_mapping), loop=None)
        self._flow.loop.set_block_state(ended.values, state.loop)
        for block in self._flow.after:
            block(self._view(state), ended.values)
        return ended

    def move(self, device: torch.device) -> None:
        """Moves the weights, and nothing else; steps are made on `self.device` alone."""
        self.components.to(device)

    def adopt(self, state: DiffusionRequestState) -> None:
        """Makes a request, which may have been begun elsewhere, one of this pipeline."""
        state.guider = self._guider(state.inputs.guidance_scale)
        given = _given(state.inputs)
        for param in self._inputs:
            if param.name is not None and state.values.get(param.name) is None:
                state.values.set(param.name, given.get(param.name, param.default), param.kwargs_type)

    def batch_key(self, state: DiffusionRequestState) -> tuple[object, ...]:
        """Requests with the same key can share a forward."""
        guided = state.guider is None or state.guider.num_conditions
        return (state.inputs.adapter, state.inputs.adapter_scale, guided, *self.forwarding.batch_key(state))

    # -- inner workings

    def _has(self, name: str, blocks: Any) -> bool:
        """Of many models that start from text there are variants that start from pictures, and need more parts."""
        return name in blocks.sub_blocks and (name != _PICTURE_ENCODER or self.family.takes_image)

    def _flow_of(self, chosen_blocks: Mapping[str, Mapping[str, Any]], *, whole: Any) -> Flow:
        with_image = {"image": True, "image_latents": True} if self.family.takes_image else {}
        chosen = {
            part: [
                _settled_block(block)
                for block in _sequence(blocks, like=whole)
                .get_execution_blocks(prompt="", **with_image)
                .sub_blocks.values()
            ]
            for part, blocks in chosen_blocks.items()
        }
        denoise = chosen.get("denoise", [])
        at = next((i for i, each in enumerate(denoise) if isinstance(each, LoopSequentialPipelineBlocks)), None)
        if at is None:
            return Flow(chosen.get("encode", []), [], None, [], [], [], chosen.get("decode", []))
        steps = dict(denoise[at].sub_blocks)
        cut = list(steps).index(_DENOISER) + 1
        return Flow(
            encode=chosen.get("encode", []),
            before=denoise[:at],
            loop=denoise[at],
            denoise=list(steps.values())[:cut],
            advance=list(steps.values())[cut:],
            after=denoise[at + 1 :],
            decode=chosen.get("decode", []),
        )

    def _encode(self, state: DiffusionRequestState) -> None:
        inputs = state.inputs
        guided = state.guider is not None and state.guider.num_conditions > 1
        key = (inputs.prompt, inputs.negative_prompt if guided else None, inputs.image, inputs.height, inputs.width)
        known = self._prompt_cache.get(key)
        if known is None:
            before = dict(state.values.values)
            view = self._view(state)
            if self.family.encodes_both:
                view.guider = self._guider(_GUIDED)
            for block in self._flow.encode:
                block(view, state.values)
            made = {name: value for name, value in state.values.values.items() if before.get(name) is not value}
            # Pictures were read to be encoded; nothing after that looks at them.
            known = {name: value for name, value in made.items() if not _is_picture(value)}
            self._prompt_cache.put(key, known)
        for name, value in known.items():
            state.values.set(name, value)

    def _begin_loop(self, state: DiffusionRequestState) -> None:
        # Before the blocks call `set_timesteps`: a schedule is one request's.
        state.scheduler = copy.deepcopy(self.components.scheduler)
        view = self._view(state)
        for block in self._flow.before:
            block(view, state.values)
        state.loop = loop = self._flow.loop.get_block_state(state.values)
        # Blocks of a step read these; the loop's own `__call__` would have set them.
        loop.num_warmup_steps, loop.additional_cond_kwargs = 0, {}
        for name in self.family.masks:
            # As the pipeline's own `__call__`: attention without a mask is faster, and what it makes is the same.
            if (mask := loop[name]) is not None and mask.all():
                loop[name] = None
        state.total_steps = len(loop.timesteps)

    def _jointly(self, state: DiffusionRequestState) -> bool:
        return self.family.joint_guidance is not None and state.guider.num_conditions > 1

    def _denoise(self, state: DiffusionRequestState, forward: Any) -> torch.Tensor:
        view = self._view(state)
        view.transformer = Transformer(self.components.transformer, self._signature, forward)
        noise: torch.Tensor = self._run_step(self._flow.denoise, state, view)["noise_pred"]
        return noise

    def _run_step(self, blocks: Sequence[Any], state: DiffusionRequestState, view: Any) -> Any:
        assert state.loop is not None, "a request is encoded before its steps"
        i = state.step_index
        for block in blocks:
            _, state.loop = block(view, state.loop, i=i, t=state.loop.timesteps[i])
        return state.loop

    def _guider(self, scale: float) -> Any:
        """The model's own with a scale; None where the scale is an input of the model."""
        guider = copy.deepcopy(getattr(self.components, "guider", None))
        if guider is not None:
            guider.guidance_scale = scale
            guider.use_original_formulation = self.family.guidance_from_zero
            guider.enable()
        return guider

    def _view(self, state: DiffusionRequestState) -> Any:
        """The pipeline as this request's blocks see it."""
        view = copy.copy(self.components)
        if state.scheduler is not None:
            view.scheduler = state.scheduler
        if state.guider is not None:
            view.guider = state.guider
        return view

    @property
    def given_names(self) -> Iterable[str]:
        """What a request itself gives its blocks."""
        return _given(DiffusionInputs(seed=0)).keys()


def _given(inputs: DiffusionInputs) -> dict[str, object]:
    return {
        "prompt": inputs.prompt,
        "negative_prompt": inputs.negative_prompt,
        "image": _picture(inputs.image) if inputs.image is not None else None,
        "height": inputs.height or None,
        "width": inputs.width or None,
        "num_frames": inputs.num_frames,
        "num_inference_steps": inputs.num_inference_steps,
        "guidance_scale": inputs.guidance_scale,
        "generator": torch.Generator().manual_seed(inputs.seed),
        "output_type": "pt",
    }


def family_of(folder: Path) -> Family:
    """The kind of model that diffusers saved there; raises NotReadyError for one that cannot be stepped through."""
    try:
        name: str = diffusers.DiffusionPipeline.load_config(folder, local_files_only=True)["_class_name"]
    except (OSError, KeyError, ValueError) as exc:
        raise NotReadyError(
            f"{folder} holds no pipeline of diffusers: {exc}; name a folder with a model_index.json",
            reason="MODEL_NOT_LOADED",
        ) from exc
    if name not in FAMILIES:
        raise NotReadyError(
            f"{folder} holds a {name}; the diffusion engine knows {', '.join(FAMILIES)}", reason="UNSUPPORTED_MODEL"
        )
    return FAMILIES[name]


def _check_loaded(components: Any, folder: Path, dtype: torch.dtype) -> None:
    """Raises NotReadyError for what diffusers could not load: it logs that, and goes on without."""
    for name in components.null_component_names:
        spec = components.get_component_spec(name)
        if not spec.pretrained_model_name_or_path:
            continue
        try:
            spec.load(dtype=dtype)
        except Exception as exc:
            raise NotReadyError(
                f"the {name} of {folder} cannot be loaded: {exc}; see whether its files are there and whole",
                reason="MODEL_NOT_LOADED",
            ) from exc


def _settle(owner: Any, **values: object) -> None:
    """Has properties of an object be what they are now."""
    kind: Any = owner.__class__
    owner.__class__ = type(kind.__name__, (kind,), values)


def _settled_block(block: Any) -> Any:
    """A copy: diffusers has one block for all pipelines, and marks its inputs as it puts blocks together."""
    settled = copy.copy(block)
    _settle(
        settled,
        inputs=[copy.copy(param) for param in block.inputs],
        intermediate_outputs=[copy.copy(param) for param in block.intermediate_outputs],
    )
    return settled


def _sequence(blocks: Mapping[str, Any], *, like: Any) -> Any:
    """Some of `like`'s blocks. By its model's name diffusers finds the class of the pipeline."""
    kind: Any = type(type(like).__name__, (SequentialPipelineBlocks,), {"model_name": like.model_name})
    return kind.from_blocks_dict(dict(blocks))


def _is_picture(value: Any) -> bool:
    """Or a list of them."""
    from PIL.Image import Image

    pictures: Any = value
    return isinstance(pictures[0] if isinstance(value, list) and value else pictures, Image)


def _picture(data: bytes) -> Any:
    from PIL import Image, UnidentifiedImageError

    try:
        picture = Image.open(io.BytesIO(data))
        return picture.convert("RGB")
    except (UnidentifiedImageError, OSError, ValueError, Image.DecompressionBombError) as exc:
        raise InvalidRequestError(f"the picture cannot be read: {exc}", reason="INVALID_MEDIA") from exc
