"""Step-by-step execution of diffusers' modular pipelines.

A modular pipeline is a sequence of blocks. One of these blocks is the denoising loop, which contains the blocks of a
single step. A block reads the model's components from the pipeline that the block receives as an argument. Each request
therefore uses a shallow copy of the pipeline with its own schedulers and guiders, and with stand-ins for the models.
"""

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import diffusers as _diffusers
import torch
from diffusers.guiders.guider_utils import BaseGuidance
from diffusers.modular_pipelines.modular_pipeline import LoopSequentialPipelineBlocks, PipelineState
from PIL import Image

from stagemesh.common.errors import UnsupportedError
from stagemesh.services.engines.diffusion.caches import PromptCache
from stagemesh.services.engines.diffusion.model.blocks import (
    all_leaves,
    block_at,
    freeze_properties,
    frozen,
    is_plain,
    plan_steps,
    run_order,
    sequence,
)
from stagemesh.services.engines.diffusion.model.declarations import (
    changed_properties,
    family_of,
    outlined,
    outputs_of,
    request_inputs,
)
from stagemesh.services.engines.diffusion.model.definition import DECODE, DENOISE, ENCODE, define
from stagemesh.services.engines.diffusion.model.loading import Loader, load_image_processor
from stagemesh.services.engines.diffusion.model.shared_forwards import (
    Call,
    CallRecorder,
    Predict,
    SharedForwards,
    replay,
)
from stagemesh.services.engines.diffusion.model.suspended_call import SuspendedCall
from stagemesh.services.engines.diffusion.options import DiffusionOptions
from stagemesh.services.engines.diffusion.state import DiffusionRequestState, Outputs

diffusers: Any = _diffusers

_DENOISER = "denoiser"
"""Name of the block that predicts the noise in a step. The subsequent blocks of the step update the latents."""
_PREDICTION = "noise_pred"
"""Name of the loop variable that contains the predicted noise. Loops with several latents have other variables."""
_GUIDED = 2.0
"""A guidance scale that enables guidance, so that both guidance branches are computed."""


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
        self.definition = define(folder)
        self.device = device or torch.device("cpu")
        chosen = self.definition.part(options.part, options.blocks)
        whole = sequence({name: block for blocks in chosen.values() for name, block in blocks.items()})
        self.components: Any = self.definition.kind(
            blocks=whole, pretrained_model_name_or_path=str(folder), local_files_only=True
        )
        if self.definition.index.get("processor", [None, None])[1] == "Qwen2VLProcessor" and ENCODE in chosen:
            self.components.update_components(processor=load_image_processor(folder))
        self._declare_as_in_whole()
        Loader(folder, options, device=self.device).load(self.components)
        self._phases = {phase: sequence(blocks) for phase, blocks in chosen.items()}
        view = outlined(folder, self.definition, self.components, getattr(torch, options.dtype))
        self.family = family_of(folder, self.definition, view)
        self.forwards = SharedForwards(self.definition.hints, self._denoising_models())
        if options.load.compile:
            self.forwards.disable_mixed_lengths()
        self._prompt_cache = prompt_cache or PromptCache(0)
        # diffusers recomputes these properties at every access.
        self._inputs = list(self.components.blocks.inputs)
        self._frozen: dict[int, Any] = {}
        properties = changed_properties(view, self.components)
        freeze_properties(self.components, _execution_device=self.device, **properties)

    @property
    def resumable(self) -> bool:
        """Whether a request contains all data of its denoising loop after each step. It can then be paused, transferred
        and previewed between steps."""
        return all(map(self._is_plain, self._loops))

    @torch.no_grad()
    def prepare_encode(self, state: DiffusionRequestState) -> None:
        """Runs all blocks that precede the first denoising step. These blocks encode the prompt, generate the noise and
        set the noise schedule.
        """
        self.adopt(state)
        if ENCODE in self._phases:
            self._encode(state)
        if DENOISE in self._phases:
            self._begin_loop(state)

    @torch.no_grad()
    def denoise_step(self, batch: Sequence[DiffusionRequestState]) -> Sequence[torch.Tensor | None]:
        """Predicts the noise of each request at the request's current step. Returns one tensor for each request, in the
        order of `batch`, or None for a loop with several predictions, which remain in the request's state.
        """
        single = len(batch) == 1 and self.forwards.split_calls is None and not self._guides_jointly(batch[0])
        if single or not self.forwards.hints.batches or self.forwards.caches is not None:
            return [self._denoise_alone(state) for state in batch]
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
    def step_scheduler(self, state: DiffusionRequestState, noise_pred: torch.Tensor | None) -> None:
        """Updates the latents of a request with the predicted noise, and increments the request's number of completed
        steps.
        """
        if state.call is None:
            assert state.loop is not None, "a request is encoded before its steps"
            if noise_pred is not None:
                state.loop[_PREDICTION] = noise_pred
            self._run_step(self._step_blocks(state)[1], state, self._view(state))
        state.step_index += 1
        if state.denoised:
            self._finish_call(state)
            state.values = self.end_loop(state).values
            state.loop = state.call = None

    @torch.no_grad()
    def post_decode(self, state: DiffusionRequestState) -> Outputs:
        """Decodes the latents of a request. Returns the images, the video and the audio that the pipeline generates."""
        self._run(DECODE, state, state.values)
        return outputs_of(state.values, self.components)

    @torch.no_grad()
    def end_loop(self, state: DiffusionRequestState) -> DiffusionRequestState:
        """Returns a copy of the request that can be decoded. In the copy, denoising ends after the steps completed so
        far.

        Returns `state` itself if denoising has already ended. Does not modify `state`. Raises UnsupportedError if the
        loop cannot be read between two steps.
        """
        if state.loop is None and state.call is None:
            return state
        ended = replace(
            state, values=PipelineState(dict(state.values.values), state.values.kwargs_mapping), loop=None, call=None
        )
        if state.call is None:
            self._loop(state).set_block_state(ended.values, state.loop)
        elif not state.call.ended:
            raise UnsupportedError(
                f"the loop of {self.definition.name} has no state between two steps; omit checkpoints and previews",
                metadata={"ability": "checkpoints"},
            )
        self._run(DENOISE, ended, ended.values, after=state.loop_path)
        return ended

    def add_values(self, state: DiffusionRequestState, values: Mapping[str, Any]) -> None:
        """Adds results of the encoders to a request."""
        for name, value in values.items():
            tag = self.definition.tags.get(name)
            is_tagged = name in state.values.kwargs_mapping.get(tag, ())
            state.values.set(name, value, None if is_tagged else tag)

    def adopt(self, state: DiffusionRequestState) -> None:
        """Prepares a new or transferred request for this pipeline: creates the request's guiders, and sets the pipeline
        inputs that the request does not have yet.
        """
        state.guiders = self._guiders(state.inputs.guidance_scale)
        inputs = request_inputs(state.inputs, [param.name for param in self._inputs])
        if not getattr(self.components.config, "force_zeros_for_empty_prompt", False):
            # Other pipelines treat an absent negative prompt as an empty one, or would not guide without one.
            inputs["negative_prompt"] = inputs["negative_prompt"] or ""
        for param in self._inputs:
            if param.name is not None and state.values.get(param.name) is None:
                value = inputs.get(param.name)
                state.values.set(param.name, param.default if value is None else value, param.kwargs_type)
        if state.loop is not None:
            state.loop, state.steps = plan_steps(self._loop(state), self._view(state), state.values, state.loop)

    def batch_key(self, state: DiffusionRequestState) -> tuple[object, ...]:
        """Returns the request's compatibility key. Requests with equal keys can share a forward pass."""
        guided = [guider.num_conditions for guider in state.guiders.values()]
        return (state.inputs.adapter, state.inputs.adapter_scale, *guided, *self.forwards.batch_key(state))

    # -- inner workings

    def _declare_as_in_whole(self) -> None:
        """Gives the part of a pipeline the guiders and settings of the whole pipeline.

        Several blocks may declare a guider, each with another scale. The first declaration counts. Blocks may read a
        setting that only blocks of another part declare.
        """
        blocks = self.definition.blocks
        for spec in blocks.expected_components:
            if issubclass(spec.type_hint or object, BaseGuidance) and hasattr(self.components, spec.name):
                setattr(self.components, spec.name, spec.create())
        settings = {spec.name: self.definition.index.get(spec.name, spec.default) for spec in blocks.expected_configs}
        self.components.register_to_config(**settings)

    @property
    def _loops(self) -> list[Any]:
        leaves = all_leaves(self._phases[DENOISE]) if DENOISE in self._phases else ()
        return [leaf for leaf in leaves if isinstance(leaf, LoopSequentialPipelineBlocks)]

    def _denoising_models(self) -> dict[str, Any]:
        """Returns the models that the denoising loops call, by component name. The loops' main model is the first."""
        names = dict.fromkeys(spec.name for loop in self._loops for spec in loop.expected_components)
        models = {name: getattr(self.components, name, None) for name in names}
        return {
            name: model for name, model in models.items() if isinstance(model, torch.nn.Module) and "vae" not in name
        }

    def _run(self, phase: str, state: DiffusionRequestState, values: Any, **selection: Any) -> None:
        """Runs the blocks of a phase. `selection` are the arguments of `run_order` that select some of them."""
        if phase in self._phases:
            view = self._view(state)
            for _, leaf in run_order(self._phases[phase], values, **selection):
                self._frozen_block(leaf)(view, values)

    def _frozen_block(self, leaf: Any) -> Any:
        if id(leaf) not in self._frozen:
            self._frozen[id(leaf)] = frozen(leaf)
        return self._frozen[id(leaf)]

    def _encode(self, state: DiffusionRequestState) -> None:
        inputs = state.inputs
        guided = any(guider.num_conditions > 1 for guider in state.guiders.values())
        negative = (guided, inputs.negative_prompt if guided else None)
        key = (inputs.prompt, negative, inputs.images, inputs.height, inputs.width)
        cached = self._prompt_cache.get(key)
        if cached is None:
            before = dict(state.values.values)
            noise = state.values.get("generator")
            drawn = noise and noise.get_state()
            guiders = self._guiders(_GUIDED) if self.definition.hints.encodes_both else state.guiders
            self._run(ENCODE, replace(state, guiders=guiders), state.values)
            new = {name: value for name, value in state.values.values.items() if before.get(name) is not value}
            # Input images are needed only while encoding, so they are not cached.
            cached = {name: value for name, value in new.items() if not _is_image(value)}
            if noise is None or torch.equal(drawn, noise.get_state()):
                self._prompt_cache.put(key, cached)
        self.add_values(state, cached)

    def _begin_loop(self, state: DiffusionRequestState) -> None:
        # Copied before the blocks call `set_timesteps`, because each request has its own schedule.
        state.schedulers = self._copies(diffusers.SchedulerMixin)
        view = self._view(state)
        for path, leaf in run_order(self._phases[DENOISE], state.values):
            block = self._frozen_block(leaf)
            if not isinstance(leaf, LoopSequentialPipelineBlocks):
                block(view, state.values)
                continue
            state.loop_path = path
            loop, state.steps = plan_steps(block, view, state.values)
            state.total_steps = len(state.steps)
            if self._is_plain(leaf):
                state.loop = loop
                self._drop_full_masks(loop)
            else:
                state.total_steps *= 1 if is_plain(leaf) else _inner_steps(loop)
                state.call = SuspendedCall(partial(_run_loop, block, view, state.values))
            return

    def _is_plain(self, loop: Any) -> bool:
        return is_plain(loop) and not self.definition.hints.runs_whole

    def _drop_full_masks(self, loop: Any) -> None:
        for name in self.definition.hints.masks:
            # The pipeline's own `__call__` does the same. Attention without a mask is faster and has the same result.
            if (mask := loop[name]) is not None and mask.all():
                loop[name] = None

    def _finish_call(self, state: DiffusionRequestState) -> None:
        while state.call is not None and not state.call.ended:
            state.call.advance()

    def _guides_jointly(self, state: DiffusionRequestState) -> bool:
        jointly = self.forwards.hints.joint_guidance is not None
        return jointly and any(guider.num_conditions > 1 for guider in state.guiders.values())

    def _denoise_alone(self, state: DiffusionRequestState) -> torch.Tensor | None:
        if state.call is None:
            return self._denoise(state, self.forwards.forward_alone(state) if self.forwards.stands_in else None)
        if not state.call.ended:
            state.call.advance()
        return None

    def _denoise(self, state: DiffusionRequestState, predict: Predict | None) -> torch.Tensor | None:
        view = self._view(state)
        if predict is not None:
            vars(view).update(self.forwards.stand_ins(predict))
        noise: torch.Tensor | None = self._run_step(self._step_blocks(state)[0], state, view)[_PREDICTION]
        return noise

    def _loop(self, state: DiffusionRequestState) -> Any:
        return self._frozen_block(block_at(self._phases[DENOISE], state.loop_path))

    def _step_blocks(self, state: DiffusionRequestState) -> tuple[list[Any], list[Any]]:
        """Returns the blocks of a step that predict the noise, and the blocks that use the prediction."""
        blocks = self._loop(state).sub_blocks
        names = list(blocks)
        at = names.index(_DENOISER) + 1 if _DENOISER in names else len(names)
        steps = list(blocks.values())
        return steps[:at], steps[at:]

    def _run_step(self, blocks: Iterable[Any], state: DiffusionRequestState, view: Any) -> Any:
        assert state.loop is not None, "a request is encoded before its steps"
        for block in blocks:
            _, state.loop = block(view, state.loop, **state.steps[state.step_index])
        return state.loop

    def _guiders(self, scale: float | None) -> dict[str, Any]:
        """Returns copies of the model's guiders with the guidance scale `scale`, by component name. If `scale` is None,
        the guiders keep their own scales.

        Empty if the model has no guiders. The denoising model may then receive the guidance scale as an input.
        """
        guiders = self._copies(BaseGuidance)
        for guider in guiders.values():
            if scale is not None and hasattr(guider, "guidance_scale"):
                guider.guidance_scale = scale
                guider.enable()
            if self.definition.hints.guidance_from_zero:
                guider.use_original_formulation = True
        return guiders

    def _copies(self, kind: type) -> dict[str, Any]:
        values = {name: getattr(self.components, name, None) for name in self.components.component_names}
        return {name: copy.deepcopy(value) for name, value in values.items() if isinstance(value, kind)}

    def _view(self, state: DiffusionRequestState) -> Any:
        """Returns a shallow copy of the pipeline that uses the request's own schedulers and guiders."""
        view = copy.copy(self.components)
        vars(view).update(state.schedulers | state.guiders)
        return view


def _run_loop(loop: Any, view: Any, values: Any, suspend: Any) -> None:
    """Runs a loop by its own code. Suspends it after each step of a scheduler."""
    for name in view.component_names:
        scheduler = getattr(view, name)
        if isinstance(scheduler, diffusers.SchedulerMixin):
            scheduler.step = _suspending(scheduler.step, suspend)
    loop(view, values)


def _suspending(step: Any, suspend: Any) -> Any:
    def step_and_suspend(*args: Any, **kwargs: Any) -> Any:
        result = step(*args, **kwargs)
        suspend(None)
        return result

    return step_and_suspend


def _inner_steps(loop: Any) -> int:
    """Returns the number of denoising steps in each iteration of a loop that contains a loop."""
    pyramid: Sequence[int] | None = loop["pyramid_num_inference_steps_list"]
    return sum(pyramid) if pyramid is not None else int(loop["num_inference_steps"] or 1)


def _is_image(value: Any) -> bool:
    """Returns whether the value is a PIL image or a list of PIL images."""
    images: Any = value
    return isinstance(images[0] if isinstance(value, list) and value else images, Image.Image)
