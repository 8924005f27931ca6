import hashlib
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from diffusers.modular_pipelines.qwenimage import prompt_templates

from stagemesh.tiny_models.diffusion.tokenizers import qwen_tokenizer
from tests.cli.commands import invoke
from tests.diffusion.tiny.calls import ImageSpec, classic_image, load
from tests.diffusion.tiny.pipelines import WRITERS, write_qwen_image


@pytest.mark.parametrize("model", WRITERS)
def test_the_same_bytes_are_written_again(model: str, tiny_diffusion: Callable[[str], Path], tmp_path: Path) -> None:
    torch.rand(3)
    assert _digests(WRITERS[model](tmp_path)) == _digests(tiny_diffusion(model))


@pytest.mark.parametrize("model", WRITERS)
def test_an_image_depends_only_on_its_spec(model: str, tiny_diffusion: Callable[[str], Path]) -> None:
    pipeline = load(tiny_diffusion(model))
    made = classic_image(model, pipeline, ImageSpec())
    assert made.shape == ((1, 9, 3, 64, 64) if model.startswith("wan") else (1, 3, 64, 64))
    assert torch.isfinite(made).all()
    others = [ImageSpec(prompt="two dogs"), ImageSpec(seed=1), ImageSpec(scale=5.0)]
    assert not any(torch.equal(classic_image(model, pipeline, spec), made) for spec in others)
    assert torch.equal(classic_image(model, pipeline, ImageSpec()), made)


def test_weights_may_be_written_in_bfloat16(tmp_path: Path) -> None:
    pipeline = load(write_qwen_image(tmp_path, torch.bfloat16), torch.bfloat16)
    assert {part.dtype for part in (pipeline.transformer, pipeline.vae, pipeline.text_encoder)} == {torch.bfloat16}
    assert torch.isfinite(classic_image("qwen-image", pipeline, ImageSpec())).all()


@pytest.mark.parametrize("kind", ["", "EDIT_"])
def test_a_template_has_the_number_of_tokens_that_the_pipeline_removes(kind: str) -> None:
    template: str = getattr(prompt_templates, f"QWENIMAGE_{kind}PROMPT_TEMPLATE")
    before = template[: template.index("user\n") + len("user\n")]
    start: int = getattr(prompt_templates, f"QWENIMAGE_{kind}PROMPT_TEMPLATE_START_IDX")
    assert len(qwen_tokenizer([template])(before).input_ids) == start


def test_the_command_writes_a_pipeline_by_the_name_of_its_class(tmp_path: Path) -> None:
    report = json.loads(invoke("models", "tiny", "DDPMPipeline", str(tmp_path / "model"), "--json").stdout)
    assert report["size_bytes"] == sum(path.stat().st_size for path in (tmp_path / "model").rglob("*.*"))
    pipeline = load(tmp_path / "model")
    assert type(pipeline).__name__ == "DDPMPipeline"


def _digests(folder: Path) -> dict[Path, str]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}
