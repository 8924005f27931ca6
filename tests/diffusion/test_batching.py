"""Requests that share forwards get what each gets alone."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from stagemesh.services.engines.diffusion.model.modular import ModularStepPipeline
from stagemesh.services.engines.diffusion.state import DiffusionRequestState
from tests.diffusion.tiny_calls import Wish
from tests.diffusion.tiny_pipelines import WRITERS, write_qwen_image
from tests.diffusion.turns import alone, inputs_of, together

pytestmark = pytest.mark.timeout(180)

TOLERANCE = 1e-5
"""Of pictures in [0, 1], in float32: by how much the order of a matrix library's sums may differ with the batch."""
OTHERS = tuple(name for name in WRITERS if name != "qwen-image")
ALIKE = [Wish(seed=seed, scale=2.0 + seed) for seed in range(3)]
WIDE, HIGH = Wish(height=64, width=96, seed=1), Wish(height=96, width=64, seed=2)


@pytest.fixture(scope="module")
def pipelines(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ModularStepPipeline]:
    return {
        model: ModularStepPipeline(write(tmp_path_factory.mktemp(model)), torch.float32)
        for model, write in WRITERS.items()
    }


@contextmanager
def rows_counted(pipeline: ModularStepPipeline) -> Iterator[list[int]]:
    """How many rows each forward of the transformer has."""
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
def test_mixed_lengths_sizes_and_scales_share_forwards(dtype: str, mode: str, tolerance: float, tmp_path: Path) -> None:
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
def test_requests_of_one_shape_share_forwards(model: str, pipelines: dict[str, ModularStepPipeline]) -> None:
    pipeline = pipelines[model]
    expected = [alone(model, pipeline, wish) for wish in ALIKE]
    with rows_counted(pipeline) as rows:
        made = together(model, pipeline, ALIKE)
    for one, other in zip(made, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=TOLERANCE)
    assert max(rows) >= len(ALIKE)


@pytest.mark.parametrize("model", OTHERS)
def test_requests_of_as_many_tokens_and_another_shape_share_none(
    model: str, pipelines: dict[str, ModularStepPipeline]
) -> None:
    pipeline = pipelines[model]
    expected = [alone(model, pipeline, wish) for wish in (WIDE, HIGH)]
    with rows_counted(pipeline) as rows:
        made = together(model, pipeline, [WIDE, HIGH])
    for one, other in zip(made, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=TOLERANCE)
    # Both branches of one request's guidance may be in it.
    assert max(rows) <= 2


@pytest.mark.parametrize("model", OTHERS)
def test_what_shares_no_forward_has_another_key(model: str, pipelines: dict[str, ModularStepPipeline]) -> None:
    def key(wish: Wish) -> tuple[object, ...]:
        state = DiffusionRequestState("r", inputs_of(model, wish))
        pipelines[model].prepare_encode(state)
        return pipelines[model].batch_key(state)

    assert key(WIDE) != key(HIGH)
    assert key(Wish(seed=1)) == key(Wish(seed=2, scale=2.0))


def test_keys_of_qwen_image_tell_guidance_alone_apart(pipelines: dict[str, ModularStepPipeline]) -> None:
    wishes = (WIDE, HIGH, Wish(prompt="a longer prompt than that"), Wish(scale=1.0))
    states = [DiffusionRequestState("r", inputs_of("qwen-image", wish)) for wish in wishes]
    for state in states:
        pipelines["qwen-image"].prepare_encode(state)
    keys = [pipelines["qwen-image"].batch_key(state) for state in states]
    assert len(set(keys[:3])) == 1
    assert keys[3] != keys[0]


def test_a_model_is_left_as_it_was(pipelines: dict[str, ModularStepPipeline]) -> None:
    pipeline = pipelines["qwen-image"]
    transformer = pipeline.components.transformer

    def parts() -> list[object]:
        return [transformer.pos_embed, *(block.attn.processor for block in transformer.transformer_blocks)]

    before = parts()
    together("qwen-image", pipeline, [WIDE, HIGH])
    assert all(one is other for one, other in zip(parts(), before, strict=True))
    assert "pos_embed" not in vars(transformer)
