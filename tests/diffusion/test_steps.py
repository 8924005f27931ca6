"""Requests that alternate at every step, or share forward passes, get the same results as alone."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from stagemesh.services.engines.diffusion import STATE
from stagemesh.services.engines.diffusion.model.modular_pipeline import ModularStepPipeline
from stagemesh.services.engines.diffusion.options import DiffusionOptions
from stagemesh.services.engines.diffusion.request_transfer import RequestTransfer
from stagemesh.services.engines.diffusion.state import DiffusionRequestState
from tests.diffusion.batched_qwen import Comparison, compare
from tests.diffusion.pipeline_runs import frames_of, inputs_of, run_alone, run_together
from tests.diffusion.tiny.calls import ImageSpec, classic_image, load
from tests.diffusion.tiny.pipelines import WRITERS

pytestmark = pytest.mark.timeout(180)

SPECS = (
    ImageSpec(),
    ImageSpec(prompt="two dogs and a very long tail", seed=7, height=64, width=96, steps=6, scale=5.0),
    ImageSpec(prompt="x", seed=3, height=96, width=64, steps=2, scale=2.0),
)
TOLERANCE = 1e-5
"""For float32 images in [0, 1]: the matrix library's order of sums depends on the batch size."""
OTHERS = tuple(name for name in WRITERS if name != "qwen-image")
ALIKE = [ImageSpec(seed=seed, scale=2.0 + seed) for seed in range(3)]
WIDE, HIGH = ImageSpec(height=64, width=96, seed=1), ImageSpec(height=96, width=64, seed=2)

Pipelines = Callable[[str], ModularStepPipeline]


@pytest.fixture(scope="module")
def pipelines(tiny_diffusion: Callable[[str], Path]) -> Pipelines:
    return cache(lambda model: ModularStepPipeline(tiny_diffusion(model), DiffusionOptions(dtype="float32")))


# -- requests that alternate


def state(model: str, spec: ImageSpec) -> DiffusionRequestState:
    return DiffusionRequestState("r", inputs_of(model, spec))


def take_turns(pipeline: ModularStepPipeline, states: list[DiffusionRequestState]) -> list[torch.Tensor]:
    """Alternates between requests at each step. Decodes each request after its last step."""
    made: dict[int, torch.Tensor] = {}
    while len(made) < len(states):
        for number, one in enumerate(states):
            if number in made:
                continue
            if not one.total_steps:
                pipeline.prepare_encode(one)
            (noise,) = pipeline.denoise_step([one])
            pipeline.step_scheduler(one, noise)
            if one.denoised:
                made[number] = frames_of(pipeline.post_decode(one))
    return [made[number] for number in range(len(states))]


@pytest.mark.parametrize("model", WRITERS)
def test_alternating_requests_match(model: str, pipelines: Pipelines, tiny_diffusion: Callable[[str], Path]) -> None:
    classic = load(tiny_diffusion(model))
    made = take_turns(pipelines(model), [state(model, spec) for spec in SPECS])
    for spec, one in zip(SPECS, made, strict=True):
        assert torch.equal(one, classic_image(model, classic, spec))


@pytest.mark.parametrize("model", WRITERS)
def test_a_request_resumes_elsewhere(model: str, pipelines: Pipelines, tiny_diffusion: Callable[[str], Path]) -> None:
    folder = tiny_diffusion(model)
    first, second = pipelines(model), ModularStepPipeline(folder, DiffusionOptions(dtype="float32"))
    whole, moved = state(model, SPECS[1]), state(model, SPECS[1])
    first.prepare_encode(moved)
    for _ in range(3):
        (noise,) = first.denoise_step([moved])
        first.step_scheduler(moved, noise)
    packed = RequestTransfer(first, folder).serialize(moved, STATE)
    there = RequestTransfer(second, folder).restore_state("r", moved.inputs, packed)
    assert torch.equal(*(take_turns(pipeline, [one])[0] for pipeline, one in ((second, there), (first, whole))))


# -- requests that share forward passes


def rows_together(model: str, pipeline: ModularStepPipeline, specs: Sequence[ImageSpec]) -> list[int]:
    """Runs requests together, and compares them with single ones. Returns the rows of each forward pass."""
    rows: list[int] = []

    def note(_model: Any, _args: Any, kwargs: Any) -> None:
        rows.append(len(kwargs["x"] if "x" in kwargs else kwargs["hidden_states"]))

    expected = [run_alone(model, pipeline, spec) for spec in specs]
    hook = pipeline.components.transformer.register_forward_pre_hook(note, with_kwargs=True)
    made = run_together(model, pipeline, specs)
    hook.remove()
    for one, other in zip(made, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=TOLERANCE)
    return rows


def check(compared: Comparison, *, tolerance: float) -> None:
    assert compared.worst <= tolerance
    assert compared.forwards < compared.calls / 3


def test_mixed_lengths_sizes_and_scales_share_forward_passes(qwen_image: Path) -> None:
    check(compare(qwen_image, "float32"), tolerance=TOLERANCE)


def test_a_strict_matrix_library_gives_the_same_bits(qwen_image: Path) -> None:
    command = [sys.executable, "-m", "tests.diffusion.batched_qwen", str(qwen_image), "float32", "bfloat16"]
    strict = os.environ | {"MKL_CBWR": "AVX2,STRICT"}
    answer = subprocess.run(command, env=strict, capture_output=True, text=True, check=False, timeout=120)
    assert answer.returncode == 0, answer.stderr
    for compared in json.loads(answer.stdout.splitlines()[-1]):
        check(Comparison(*compared), tolerance=0.0)


@pytest.mark.parametrize("model", OTHERS)
def test_requests_of_one_shape_share_forward_passes(model: str, pipelines: Pipelines) -> None:
    assert max(rows_together(model, pipelines(model), ALIKE)) >= len(ALIKE)


@pytest.mark.parametrize("model", OTHERS)
def test_requests_of_different_shapes_share_no_forward_pass(model: str, pipelines: Pipelines) -> None:
    # A forward pass may contain both guidance branches of one request.
    assert max(rows_together(model, pipelines(model), [WIDE, HIGH])) <= 2


def keys_of(model: str, pipelines: Pipelines, *specs: ImageSpec) -> list[tuple[object, ...]]:
    requests = [state(model, spec) for spec in specs]
    for request in requests:
        pipelines(model).prepare_encode(request)
    return [pipelines(model).batch_key(request) for request in requests]


@pytest.mark.parametrize("model", OTHERS)
def test_requests_that_share_no_forward_pass_have_different_keys(model: str, pipelines: Pipelines) -> None:
    wide, high, one, other = keys_of(model, pipelines, WIDE, HIGH, ImageSpec(seed=1), ImageSpec(seed=2, scale=2.0))
    assert wide != high
    assert one == other


def test_keys_of_qwen_image_depend_only_on_guidance(pipelines: Pipelines) -> None:
    specs = (WIDE, HIGH, ImageSpec(prompt="a longer prompt than that"), ImageSpec(scale=1.0))
    keys = keys_of("qwen-image", pipelines, *specs)
    assert len(set(keys[:3])) == 1
    assert keys[3] != keys[0]


def test_a_mixed_forward_pass_leaves_the_model_unchanged(pipelines: Pipelines) -> None:
    pipeline = pipelines("qwen-image")
    transformer = pipeline.components.transformer

    def parts() -> list[object]:
        return [transformer.pos_embed, *(block.attn.processor for block in transformer.transformer_blocks)]

    before = parts()
    run_together("qwen-image", pipeline, [WIDE, HIGH])
    assert all(one is other for one, other in zip(parts(), before, strict=True))
    assert "pos_embed" not in vars(transformer)
