"""`stagemesh verify` compares running and started pipelines with their reference implementations."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from stagemesh.common.errors import ExitCode
from tests.cli.commands import Ran, invoke, run_process
from tests.deployment import deployed
from tests.diffusion.tiny.pipelines import write_qwen_image
from tests.models.qwen3_omni.deployment import PIPELINE, with_torchvision
from tests.system.pipelines import pipeline_file

pytestmark = pytest.mark.timeout(300)

IMAGE = """\
pipeline: image
stages:
  image:
    engine: diffusion
    model: {model}
    options: {{dtype: float32, device: cpu, height: 64, width: 64, num_inference_steps: 2}}
outputs: {{image: image}}
"""


def verdicts(ran: Ran) -> Mapping[str, str]:
    report = json.loads(ran.stdout.splitlines()[-1])
    return {f"{each['stage']}.{each['output']}": each["verdict"] for each in report["comparisons"]}


def changed(model: Path, folder: Path) -> Path:
    """Returns a copy of a checkpoint in which one weight of the talker differs."""
    shutil.copytree(model, folder)
    weights = load_file(folder / "model.safetensors")
    weights["talker.codec_head.weight"] = weights["talker.codec_head.weight"].roll(1, 0).contiguous()
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


def test_a_stage_with_another_weight_is_named(tiny_qwen3_omni: Path, tmp_path: Path) -> None:
    file = pipeline_file(tmp_path, PIPELINE.format(model=tiny_qwen3_omni))
    other = changed(tiny_qwen3_omni, tmp_path / "changed")
    with with_torchvision(), deployed(file, "--set", f"stages.talker.model={other}") as up:

        def verify(*arguments: str) -> Ran:
            limits = ("--prompt", "Hello", "--max-tokens", "8", "--max-frames", "8")
            return invoke("verify", str(file), "--server", up.endpoint, *limits, "--json", *arguments)

        original, same = verify(), verify("--set", f"stages.*.model={other}")
    others = {
        "thinker.token_ids": "equal",
        "code2wav.audio": "equal",
        # The pipeline file has no such outputs.
        "thinker.prompt_ids": "skipped",
        "thinker.hidden_states_accept": "skipped",
    }
    assert verdicts(original) == {**others, "talker.codes": "differs"}
    assert verdicts(same) == {**others, "talker.codes": "equal"}
    assert (original.exit_code, same.exit_code) == (ExitCode.FAILED, 0)


async def test_a_diffusion_pipeline_is_started_and_verified(tmp_path: Path) -> None:
    file = pipeline_file(tmp_path, IMAGE.format(model=write_qwen_image(tmp_path / "model")))
    ran = await run_process("verify", str(file), "--prompt", "a red cube")
    assert "1 equal" in ran.output.splitlines()[-1]
    assert "loading the reference of image" in ran.stderr


def test_a_pipeline_without_a_reference_is_refused_with_those_that_can_be_verified(tmp_path: Path) -> None:
    text = "pipeline: fake\nstages: {text: {engine: fake}}\noutputs: {text: text.text}\n"
    error = refusal(pipeline_file(tmp_path, text))
    assert error["reason"] == "NO_REFERENCE"
    assert "Qwen3-Omni" in error["message"]


def test_media_that_no_reference_accepts_are_refused(tmp_path: Path, tiny_qwen3_omni: Path) -> None:
    file, video = pipeline_file(tmp_path, PIPELINE.format(model=tiny_qwen3_omni)), tmp_path / "a.mp4"
    video.write_bytes(b"")
    assert "is a video" in refusal(file, "--media", str(video))["message"]


def refusal(file: Path, *arguments: str) -> Mapping[str, Any]:
    ran = invoke("verify", str(file), "--json", *arguments)
    assert ran.exit_code == ExitCode.USAGE
    error: Mapping[str, Any] = json.loads(ran.stderr)["error"]
    return error
