"""Requests that share forward passes get the same results as alone."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from stagemesh.services.engines.diffusion.model.modular_pipeline import ModularStepPipeline
from stagemesh.services.engines.diffusion.options import DiffusionOptions
from stagemesh.services.engines.diffusion.state import DiffusionRequestState
from tests.diffusion.pipeline_runs import inputs_of, run_alone, run_together
from tests.diffusion.tiny.calls import ImageSpec
from tests.diffusion.tiny.pipelines import WRITERS, write_qwen_image

pytestmark = pytest.mark.timeout(180)

TOLERANCE = 1e-5
"""For float32 images in [0, 1]: the matrix library's order of sums depends on the batch size."""
OTHERS = tuple(name for name in WRITERS if name != "qwen-image")
ALIKE = [ImageSpec(seed=seed, scale=2.0 + seed) for seed in range(3)]
WIDE, HIGH = ImageSpec(height=64, width=96, seed=1), ImageSpec(height=96, width=64, seed=2)


@pytest.fixture(scope="module")
def pipelines(tiny_diffusion: Callable[[str], Path]) -> dict[str, ModularStepPipeline]:
    return {model: ModularStepPipeline(tiny_diffusion(model), DiffusionOptions(dtype="float32")) for model in WRITERS}


@contextmanager
def rows_counted(pipeline: ModularStepPipeline) -> Iterator[list[int]]:
    """Records the number of rows of each forward pass of the transformer."""
    rows: list[int] = []

    def note(_model: Any, _args: Any, kwargs: Any) -> None:
        rows.append(len(kwargs["x"] if "x" in kwargs else kwargs["hidden_states"]))

    hook = pipeline.components.transformer.register_forward_pre_hook(note, with_kwargs=True)
    yield rows
    hook.remove()


@pytest.mark.parametrize(
    ("dtype", "mode", "tolerance"),
    [("float32", "AVX2,STRICT", 0.0), ("bfloat16", "AVX2,STRICT", 0.0), ("float32", "", TOLERANCE)],
)
def test_mixed_lengths_sizes_and_scales_share_forward_passes(
    dtype: str, mode: str, tolerance: float, tmp_path: Path
) -> None:
    folder = write_qwen_image(tmp_path, getattr(torch, dtype))
    answer = subprocess.run(
        [sys.executable, "-m", "tests.diffusion.batched_qwen", str(folder), dtype],
        env=os.environ | {"MKL_CBWR": mode},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert answer.returncode == 0, answer.stderr
    worst, forwards, calls = answer.stdout.splitlines()[-1].split()
    assert float(worst) <= tolerance
    assert int(forwards) < int(calls) / 3


@pytest.mark.parametrize("model", OTHERS)
def test_requests_of_one_shape_share_forward_passes(model: str, pipelines: dict[str, ModularStepPipeline]) -> None:
    pipeline = pipelines[model]
    expected = [run_alone(model, pipeline, spec) for spec in ALIKE]
    with rows_counted(pipeline) as rows:
        made = run_together(model, pipeline, ALIKE)
    for one, other in zip(made, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=TOLERANCE)
    assert max(rows) >= len(ALIKE)


@pytest.mark.parametrize("model", OTHERS)
def test_requests_of_different_shapes_share_no_forward_pass(
    model: str, pipelines: dict[str, ModularStepPipeline]
) -> None:
    pipeline = pipelines[model]
    expected = [run_alone(model, pipeline, spec) for spec in (WIDE, HIGH)]
    with rows_counted(pipeline) as rows:
        made = run_together(model, pipeline, [WIDE, HIGH])
    for one, other in zip(made, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=TOLERANCE)
    # A forward pass may contain both guidance branches of one request.
    assert max(rows) <= 2


@pytest.mark.parametrize("model", OTHERS)
def test_requests_that_share_no_forward_pass_have_different_keys(
    model: str, pipelines: dict[str, ModularStepPipeline]
) -> None:
    def key(spec: ImageSpec) -> tuple[object, ...]:
        state = DiffusionRequestState("r", inputs_of(model, spec))
        pipelines[model].prepare_encode(state)
        return pipelines[model].batch_key(state)

    assert key(WIDE) != key(HIGH)
    assert key(ImageSpec(seed=1)) == key(ImageSpec(seed=2, scale=2.0))


def test_keys_of_qwen_image_depend_only_on_guidance(pipelines: dict[str, ModularStepPipeline]) -> None:
    specs = (WIDE, HIGH, ImageSpec(prompt="a longer prompt than that"), ImageSpec(scale=1.0))
    states = [DiffusionRequestState("r", inputs_of("qwen-image", spec)) for spec in specs]
    for state in states:
        pipelines["qwen-image"].prepare_encode(state)
    keys = [pipelines["qwen-image"].batch_key(state) for state in states]
    assert len(set(keys[:3])) == 1
    assert keys[3] != keys[0]


def test_a_mixed_forward_pass_leaves_the_model_unchanged(pipelines: dict[str, ModularStepPipeline]) -> None:
    pipeline = pipelines["qwen-image"]
    transformer = pipeline.components.transformer

    def parts() -> list[object]:
        return [transformer.pos_embed, *(block.attn.processor for block in transformer.transformer_blocks)]

    before = parts()
    run_together("qwen-image", pipeline, [WIDE, HIGH])
    assert all(one is other for one, other in zip(parts(), before, strict=True))
    assert "pos_embed" not in vars(transformer)
