"""Step-by-step execution of diffusers' classic pipelines, whose denoising loop is a part of their `__call__`.

Each request runs `__call__` on its own copy of the pipeline, which shares the models. The call is suspended where its
loop starts and at the end of each step. A pipeline reports these points by its progress bar and, if it has one, by
`callback_on_step_end`. A pipeline that reports neither runs in a single step.
"""

import copy
import inspect
import io
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import diffusers as _diffusers
import numpy as np
import torch
from PIL import Image

from stagemesh.common.errors import InvalidRequestError, UnsupportedError
from stagemesh.common.media.decoding import DecodedBytes
from stagemesh.common.media.images import read_image
from stagemesh.services.engines.diffusion.caches import PromptCache
from stagemesh.services.engines.diffusion.model.families import Family, Hints
from stagemesh.services.engines.diffusion.model.loading import Loader
from stagemesh.services.engines.diffusion.model.shared_forwards import SharedForwards
from stagemesh.services.engines.diffusion.model.suspended_call import Suspend, SuspendedCall
from stagemesh.services.engines.diffusion.options import DiffusionOptions
from stagemesh.services.engines.diffusion.state import DiffusionInputs, DiffusionRequestState, Outputs
from stagemesh.services.engines.torch_setup import UnusableOptionError

diffusers: Any = _diffusers

_STEP_END = "callback_on_step_end"
_MAX_IMAGE_BYTES = 256 << 20
_IMAGE_INPUTS = ("image", "mask_image", "mask", "control_image", "last_image", "reference_image")
_FRAME_INPUTS = ("video", "conditioning_frames")
"""The parameters of pipelines that receive the images of a prompt. The first images are the single images, in this
order. The other images are the frames of the video."""
_MAX_FRAMES = 1024
_FRAMES, _AUDIO = ("images", "image", "frames", "video", "prediction"), ("audios", "audio")
"""The fields of a pipeline's output that contain images or a video, and audio."""
_FINAL_TOKENS = {
    "DiffusionGemmaPipeline": ("cur_input_ids", "cur_len", "prompt_length"),
    "LLaDA2Pipeline": ("x", "block_start_pos", "prompt_length"),
}
"""For pipelines that generate text in blocks: the variables of `__call__` with the token ids [1, tokens], with the
number of tokens that later steps do not change, and with the number of tokens in the prompt."""
_TEXT = "text"


@dataclass(frozen=True)
class StepPoint:
    """A point at which a pipeline's call is suspended: the start of its loop or the end of a step."""

    completed: int
    """Number of completed steps."""
    total: int
    """Total number of steps. 0 if the pipeline does not report it."""
    token_ids: Sequence[int] = ()
    """The tokens of a text that later steps do not change. Empty for other results."""


class ClassicStepPipeline:
    """Runs a classic pipeline of diffusers in the phases of `ModularStepPipeline`.

    The result equals the result of the pipeline's own `__call__`. Requests do not share forward passes and cannot be
    transferred. Not thread-safe.
    """

    def __init__(
        self,
        folder: Path,
        options: DiffusionOptions,
        *,
        device: torch.device | None = None,
        prompt_cache: PromptCache | None = None,
    ) -> None:
        """Loads the pipeline in `folder`. If `device` is None, uses the CPU. Does not cache prompts.

        Raises NotReadyError if the pipeline cannot be loaded or does not support the options.
        """
        del prompt_cache
        _check_options(options)
        self.device = device or torch.device("cpu")
        self.components: Any = Loader(folder, options, device=self.device).load_classic()
        self.components.set_progress_bar_config(disable=True)
        self.forwards = SharedForwards(Hints(), {})
        self._parameters = inspect.signature(self.components.__call__).parameters
        if unknown := options.arguments.keys() - self._parameters.keys():
            raise UnusableOptionError(f"{self._name} has no parameter {', '.join(sorted(unknown))}; see `arguments`")
        self._images = [name for name in _IMAGE_INPUTS if name in self._parameters]
        self._videos = [name for name in _FRAME_INPUTS if name in self._parameters]
        self.family = self._make_family()
        self._emits_audio = options.audio_rate_hz > 0
        self._output_type = _output_type(type(self.components), self._parameters)
        if (self._output_type == _TEXT) != options.text:
            raise UnusableOptionError(
                f"{self._name} generates {'images or audio' if options.text else 'text'}; "
                f"set the option text to {str(not options.text).lower()}"
            )
        self._models = [each for each in self.components.components.values() if isinstance(each, torch.nn.Module)]
        modules = [module for model in self._models for module in model.modules() if hasattr(module, "processor")]
        self._processors = [(module, module.processor) for module in modules]

    @property
    def resumable(self) -> bool:
        """Whether requests can be paused, transferred or previewed: never."""
        return False

    def prepare_encode(self, state: DiffusionRequestState) -> None:
        """Runs the pipeline's call up to the start of its loop, or up to the end of its first step."""
        state.call = call = SuspendedCall(partial(self._run, state.inputs.seed, self._arguments(state.inputs)))
        point = call.advance()
        state.total_steps = 1 if point is None else point.total or state.inputs.num_inference_steps

    def denoise_step(self, batch: Sequence[DiffusionRequestState]) -> list[torch.Tensor | None]:
        """Runs the current step of each request. Returns None for each request."""
        for state in batch:
            call = _call_of(state)
            # The call may have ended early, and its first step may have been completed before.
            while not call.ended and call.point is not None and call.point.completed <= state.step_index:
                call.advance()
        return [None] * len(batch)

    def step_scheduler(self, state: DiffusionRequestState, noise_pred: torch.Tensor | None) -> None:
        """Increments the request's number of completed steps."""
        del noise_pred
        state.step_index += 1

    def post_decode(self, state: DiffusionRequestState) -> Outputs:
        """Runs the request's call to its end and returns its results.

        If steps remain, returns only the part of a text that they do not change.
        """
        call = _call_of(state)
        if not state.denoised:
            return Outputs(text=_new_text(state, self._final_text(call.point)))
        while not call.ended:
            call.advance()
        output = call.result
        frames, audio, texts = _first(output, _FRAMES), _first(output, _AUDIO), output.get("texts")
        if frames is None and texts is None and not (self._emits_audio and audio is not None):
            raise UnsupportedError(
                f"{self._name} generates {', '.join(output)}, which this stage does not emit; set "
                "audio_rate_hz if it is audio"
            )
        return Outputs(
            frames=None if frames is None else _to_frames(frames),
            audio=None if audio is None else _to_audio(audio),
            sample_rate_hz=0 if audio is None else self._sample_rate_hz(),
            text=None if texts is None else _new_text(state, texts[0]),
        )

    def end_loop(self, state: DiffusionRequestState) -> DiffusionRequestState:
        """Returns `state`, because a suspended call cannot be copied."""
        return state

    def batch_key(self, state: DiffusionRequestState) -> tuple[object, ...]:
        """Returns a key that no other request has."""
        return (state.request_id,)

    # -- inner workings

    @property
    def _name(self) -> str:
        return type(self.components).__name__

    def _arguments(self, inputs: DiffusionInputs) -> dict[str, Any]:
        """Returns the arguments of the pipeline's call.

        Raises InvalidRequestError if the request lacks an input that the pipeline needs, or sets an option that it does
        not have.
        """
        images = [read_image(io.BytesIO(each), DecodedBytes(_MAX_IMAGE_BYTES)) for each in inputs.images]
        offered = {
            "prompt": inputs.prompt or None,
            "negative_prompt": inputs.negative_prompt,
            "height": inputs.height or None,
            "width": inputs.width or None,
            "num_frames": inputs.num_frames,
            "num_inference_steps": inputs.num_inference_steps,
            "guidance_scale": inputs.guidance_scale,
            "generator": torch.Generator().manual_seed(inputs.seed),
            "output_type": self._output_type,
            **inputs.arguments,
            **dict(zip(self._images, images, strict=False)),
            **{name: images[len(self._images) :] or None for name in self._videos},
        }
        given = {name: value for name, value in offered.items() if name in self._parameters and value is not None}
        required = [name for name, each in self._parameters.items() if _is_required(each)]
        if missing := [name for name in required if name not in given]:
            raise InvalidRequestError(f"{self._name} needs the inputs {', '.join(missing)}", reason="MISSING_INPUT")
        if unknown := inputs.requested & offered.keys() - self._parameters.keys():
            raise InvalidRequestError(
                f"{self._name} has no option {', '.join(sorted(unknown))}; omit it", reason="UNKNOWN_OPTION"
            )
        # Some pipelines accept only lists, such as class labels.
        return {
            name: [value] if str(self._parameters[name].annotation).startswith("list[") else value
            for name, value in given.items()
        }

    def _make_family(self) -> Family:
        media = [*self._images, *self._videos]
        return Family(
            # The pipeline itself checks its sizes.
            size_multiple=1,
            frames_multiple=int("num_frames" in self._parameters or bool(self._videos)),
            min_images=sum(_is_required(self._parameters[name]) for name in media),
            max_images=_MAX_FRAMES if self._videos else len(media),
        )

    def _run(self, seed: int, arguments: Mapping[str, Any], suspend: Suspend[StepPoint]) -> Any:
        def suspend_unless_changed(point: StepPoint) -> None:
            # Other requests would compute with the attention processors that this call has installed.
            if all(module.processor is processor for module, processor in self._processors):
                # Other requests use torch's generators, too.
                with torch.random.fork_rng([self.device] if self.device.type == "cuda" else []):
                    suspend(point)

        # Some pipelines do not pass their generator to all functions.
        torch.manual_seed(seed)
        # The copy shares all models and has its own schedulers.
        parts = self.components.components.values()
        shared = {id(part): part for part in parts if not isinstance(part, diffusers.SchedulerMixin)}
        pipeline = copy.deepcopy(self.components, shared)
        observer = _LoopObserver(pipeline, suspend_unless_changed, calls_back=_STEP_END in self._parameters)
        return pipeline(**arguments, **observer.arguments)

    def _final_text(self, point: StepPoint | None) -> str:
        pipeline, ids = self.components, list(point.token_ids if point is not None else ())
        if pipeline.eos_token_id in ids:
            ids = ids[: ids.index(pipeline.eos_token_id)]
        tokenizer = getattr(pipeline, "tokenizer", None) or pipeline.processor
        # A character whose last bytes are not final is decoded as the replacement character.
        text: str = tokenizer.decode(ids, skip_special_tokens=True)
        return text.rstrip("\ufffd")

    def _sample_rate_hz(self) -> int:
        for owner in (self.components, *(each.config for each in self._models)):
            for name in ("sample_rate", "sampling_rate"):
                if rate := getattr(owner, name, None):
                    return int(rate)
        raise UnsupportedError(f"{self._name} does not state the sampling rate of its audio")


class _LoopObserver:
    """Suspends a pipeline's call where its loop starts and at the end of each step."""

    def __init__(self, pipeline: Any, suspend: Suspend[StepPoint], *, calls_back: bool) -> None:
        self._pipeline, self._suspend, self._completed = pipeline, suspend, 0
        self._variables = _FINAL_TOKENS.get(type(pipeline).__name__, ())
        self.arguments: dict[str, Any] = {_STEP_END: self._on_step_end} if calls_back else {}
        """The arguments of `__call__` with which the pipeline reports the end of each step. Empty if its progress bar
        reports them."""
        if self._variables:
            # The pipeline reports only variables with these names.
            pipeline._callback_tensor_inputs = self._variables  # noqa: SLF001
            self.arguments[f"{_STEP_END}_tensor_inputs"] = self._variables
        self._progress_bar, pipeline.progress_bar = pipeline.progress_bar, self._on_loop_start

    def _on_loop_start(self, *args: Any, **kwargs: Any) -> Any:
        bar = self._progress_bar(*args, **kwargs)
        if not self._completed:
            self._suspend(StepPoint(0, self._total(bar.total)))
        if not self.arguments:
            # A loop either updates its bar or iterates over it.
            bar.update = lambda _steps=1: self._end_step(bar.total)
            bar.iterable = self._steps(bar.iterable, bar.total)
        return bar

    def _steps(self, iterable: Iterable[Any], total: int) -> Iterator[Any]:
        for each in iterable:
            yield each
            self._end_step(total)

    def _on_step_end(self, _pipeline: Any, _step: int, _timestep: Any, values: dict[str, Any]) -> dict[str, Any]:
        ids: Sequence[int] = ()
        if self._variables:
            tokens, end, start = (values[name] for name in self._variables)
            ids = tokens[0, start:end].tolist()
        self._end_step(0, ids)
        return values

    def _end_step(self, bar_total: int, token_ids: Sequence[int] = ()) -> None:
        self._completed += 1
        self._suspend(StepPoint(self._completed, self._total(bar_total), token_ids))

    def _total(self, bar_total: int) -> int:
        # With schedulers of higher order, the pipeline calls back more often than it updates its bar.
        counted = getattr(self._pipeline, "_num_timesteps", None) if self.arguments else None
        return int(counted or bar_total or 0)


def _check_options(options: DiffusionOptions) -> None:
    """Raises NotReadyError if the options need a pipeline with a modular form."""
    unusable = {
        f"part {options.part}": options.part != "all",
        "blocks": bool(options.blocks),
        "enable_lora": options.enable_lora,
        "step_cache": options.step_cache is not None,
        "parallel": options.parallel.ranks > 1,
        "load.weights": bool(options.load.weights),
    }
    if names := [name for name, is_set in unusable.items() if is_set]:
        raise UnusableOptionError(f"the pipeline has no modular form, which {', '.join(names)} needs; omit it")


def _call_of(state: DiffusionRequestState) -> SuspendedCall[StepPoint, Any]:
    assert state.call is not None, "a request is encoded before its steps"
    return state.call


def _new_text(state: DiffusionRequestState, text: str) -> str:
    """Returns the part of a request's text that was not returned before."""
    returned = state.values.get(_TEXT) or ""
    state.values.set(_TEXT, text)
    return text.removeprefix(returned)


def _output_type(kind: Any, parameters: Mapping[str, inspect.Parameter]) -> str | None:
    """Returns the type in which a class of pipelines returns its output, or None if it has no choice of types."""
    parameter = parameters.get("output_type")
    if parameter is None or parameter.default == _TEXT:
        return _TEXT if parameter is not None else None
    # Classes whose code mentions only one of the types reject or ignore the other.
    source = inspect.getsource(kind.__call__)
    return "np" if '"np"' in source and '"pt"' not in source else "pt"


def _is_required(parameter: inspect.Parameter) -> bool:
    return parameter.kind is parameter.POSITIONAL_OR_KEYWORD and parameter.default is parameter.empty


def _first(output: Mapping[str, Any], names: Sequence[str]) -> Any:
    return next((output[name] for name in names if output.get(name) is not None), None)


def _to_frames(result: Any) -> torch.Tensor:
    """Converts images or videos to float[images or frames, 3, height, width] with values in [0, 1]. Arrays and PIL
    images have their channels last.
    """
    if isinstance(result, list):
        return torch.cat([*map(_to_frames, result)])  # pyright: ignore[reportUnknownArgumentType]
    if isinstance(result, Image.Image):
        result = np.asarray(result.convert("RGB"), np.float32) / 255
    tensor = torch.from_numpy(result).movedim(-1, -3) if isinstance(result, np.ndarray) else result
    return tensor.reshape(-1, *tensor.shape[-3:]).expand(-1, 3, -1, -1)


def _to_audio(result: Any) -> torch.Tensor:
    """Converts audio of shape [clips, samples] or [clips, channels, samples] to [clips, channels, samples]."""
    audio = torch.as_tensor(result)
    return audio.reshape(len(audio), -1, audio.shape[-1])
