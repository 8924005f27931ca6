"""Runs each pipeline of diffusers as a stage does, and compares the results with the pipeline's own `__call__`.

`pipelines.toml` lists the pipelines and what their requests contain. The page docs/diffusion-models.md shows the
results.
"""

import inspect
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers.modular_pipelines.modular_pipeline import MODULAR_PIPELINE_MAPPING
from PIL import Image
from pydantic import TypeAdapter

from stagemesh.services.engines.diffusion.model import classic_pipeline
from stagemesh.services.engines.diffusion.model.classic_pipeline import ClassicStepPipeline
from stagemesh.services.engines.diffusion.model.declarations import outputs_of, request_inputs
from stagemesh.services.engines.diffusion.model.definition import define, is_classic
from stagemesh.services.engines.diffusion.model.loading import load_image_processor
from stagemesh.services.engines.diffusion.model.modular_pipeline import ModularStepPipeline
from stagemesh.services.engines.diffusion.options import DiffusionOptions
from stagemesh.services.engines.diffusion.state import DiffusionInputs, DiffusionRequestState, Outputs
from stagemesh.tiny_models.diffusion.configs import TABLES
from stagemesh.tiny_models.diffusion.pipelines import TinyPipeline, tiny_pipeline
from tests.diffusion.tiny.calls import load
from tests.pictures import encoded_image

_MEDIA = ("image", "last_image", "mask_image", "control_image", "video", "driving_video", "references", "audio")
_KINDS = {"images": "images", "videos": "video", "audio": "audio", "audios": "audio", "sound": "audio"}
"""The kinds of the outputs of modular pipelines, by name."""
_SIDE, _FRAMES = 64, 9


@dataclass(frozen=True)
class Case:
    """The contents of the requests to a pipeline in addition to a prompt and a seed."""

    images: int = 0
    arguments: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Further inputs of the pipeline. `{ frames = 9 }` stands for a video with 9 frames."""
    steps: tuple[int, int] = (3, 2)
    tolerance: float = 0.0
    gap: str = ""
    """A part of the error because of which the pipeline cannot be built or run here."""


CASES: Mapping[str, Case] = {
    **dict.fromkeys((*MODULAR_PIPELINE_MAPPING, *TABLES["variants"]), Case()),
    **TypeAdapter(dict[str, Case]).validate_python(
        tomllib.loads(Path(__file__).with_name("pipelines.toml").read_text(encoding="utf-8"))
    ),
}


@dataclass(frozen=True)
class Row:
    """A row of the page: a pipeline and the result of its comparison."""

    name: str
    kind: str
    way: str
    parts: str
    takes: str
    makes: str
    result: str


def compare(name: str, folder: Path) -> Row:
    """Builds a pipeline in `folder`, and runs two requests in alternation. Returns the row of the page."""
    case, pipeline = CASES[name], tiny_pipeline(name)
    assert pipeline is not None, f"diffusers has no pipeline {name}"
    way = "step by step" if pipeline.is_modular else "whole"
    try:
        pipeline.write(folder)
        runs = (_run_modular if pipeline.is_modular else _run_classic)(pipeline, folder, case)
    except Exception as exc:
        problem = f"{type(exc).__name__}: {exc}"
        if not case.gap or case.gap not in problem:
            raise
        return Row(name, pipeline.kind.__name__, way, "", "", "", f"does not run: {case.gap}")
    assert not case.gap, f"{name} runs"
    takes = [each for each in ("prompt", "negative_prompt", *_MEDIA) if each in runs.inputs]
    result = _difference(runs.made, runs.expected, tolerance=case.tolerance)
    return Row(name, pipeline.kind.__name__, way, runs.parts, ", ".join(takes), runs.makes, result)


@dataclass(frozen=True)
class _Runs:
    made: Sequence[Outputs]
    expected: Sequence[Outputs]
    parts: str
    inputs: Sequence[str]
    """The names of the inputs of the pipeline."""
    makes: str


def _run_modular(pipeline: TinyPipeline, folder: Path, case: Case) -> _Runs:
    stage = ModularStepPipeline(folder, DiffusionOptions(dtype="float32"))
    reference = pipeline.kind(None, str(folder))
    reference.load_components(dtype=torch.float32)
    if "processor" in reference.null_component_names and (folder / "processor").exists():
        # Its own class needs torchvision.
        reference.update_components(processor=load_image_processor(folder))
    inputs = reference.blocks.input_names
    arguments = _arguments(case)
    states = [DiffusionRequestState(str(i), request) for i, request in enumerate(_requests(case))]
    for state in states:
        for name, value in arguments.items():
            state.values.set(name, value)
    made = _run_in_turn(stage, states)
    expected = []
    for state in states:
        given = {name: value for name, value in request_inputs(state.inputs, inputs).items() if name in inputs}
        values = reference(**{name: value for name, value in given.items() if value is not None} | arguments)
        expected.append(outputs_of(values, reference))
    phases = define(folder).phases
    kinds = {kind for name, kind in _KINDS.items() if states[0].values.get(name) is not None}
    return _Runs(made, expected, _describe_parts(phases), inputs, ", ".join(sorted(kinds, reverse=True)))


def _run_classic(pipeline: TinyPipeline, folder: Path, case: Case) -> _Runs:
    assert is_classic(folder)
    stage = ClassicStepPipeline(folder, DiffusionOptions(dtype="float32", audio_rate_hz=48_000))
    reference = load(folder)
    inputs = list(inspect.signature(pipeline.kind.__call__).parameters)
    requests = [replace(request, arguments=_arguments(case)) for request in _requests(case)]
    states = [DiffusionRequestState(str(i), request) for i, request in enumerate(requests)]
    made = _run_in_turn(stage, states)
    reference.set_progress_bar_config(disable=True)
    expected = [_classic_outputs(reference(**stage._arguments(state.inputs))) for state in states]
    frames = (
        "" if made[0].frames is None else "video" if {"num_frames", "frames", "video_length"} & {*inputs} else "images"
    )
    makes = frames or ("audio" if made[0].audio is not None else "text")
    return _Runs(made, expected, "", inputs, makes)


def _classic_outputs(result: Mapping[str, Any]) -> Outputs:
    frames, audio = (classic_pipeline._first(result, names) for names in (_FRAME_OUTPUTS, _AUDIO_OUTPUTS))
    return Outputs(
        None if frames is None else classic_pipeline._to_frames(frames),
        None if audio is None else classic_pipeline._to_audio(audio),
    )


_FRAME_OUTPUTS, _AUDIO_OUTPUTS = classic_pipeline._FRAMES, classic_pipeline._AUDIO


def _run_in_turn(stage: Any, states: Sequence[DiffusionRequestState]) -> list[Outputs]:
    try:
        for state in states:
            stage.prepare_encode(state)
        while running := [state for state in states if not state.denoised]:
            for state in running:
                (noise,) = stage.denoise_step([state])
                stage.step_scheduler(state, noise)
        return [stage.post_decode(state) for state in states]
    finally:
        for state in states:
            state.close()


def _requests(case: Case) -> list[DiffusionInputs]:
    images = tuple(encoded_image(_picture(seed)) for seed in range(case.images))
    prompts = ("a red cube", "two dogs with long tails")
    return [
        DiffusionInputs(
            seed=seed,
            prompt=prompt,
            negative_prompt="blur",
            images=images,
            height=_SIDE,
            width=_SIDE,
            num_inference_steps=case.steps[seed],
            num_frames=_FRAMES,
            guidance_scale=None,
        )
        for seed, prompt in enumerate(prompts)
    ]


def _arguments(case: Case) -> dict[str, Any]:
    return {
        name: [_picture(number) for number in range(value["frames"])] if isinstance(value, dict) else value
        for name, value in case.arguments.items()
    }


def _picture(seed: int) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (_SIDE, _SIDE, 3), np.uint8))


def _describe_parts(phases: Mapping[str, str]) -> str:
    """Returns the names of a pipeline's blocks. A stage may run those between two arrows."""
    by_phase = [[name for name, phase in phases.items() if phase == each] for each in dict.fromkeys(phases.values())]
    return " → ".join(", ".join(names) for names in by_phase)


def _difference(made: Sequence[Outputs], expected: Sequence[Outputs], *, tolerance: float) -> str:
    """Returns how the results differ. Raises AssertionError if they differ by more than the tolerance."""
    for one, other in zip(made, expected, strict=True):
        for mine, theirs in ((one.frames, other.frames), (one.audio, other.audio)):
            assert (mine is None) == (theirs is None)
            if mine is None or theirs is None:
                continue
            assert mine.isfinite().all()
            assert mine.float().std() > 0, "the result is constant"
            torch.testing.assert_close(mine, theirs, rtol=0, atol=tolerance)
    return f"equal up to {tolerance:g}" if tolerance else "equal"
