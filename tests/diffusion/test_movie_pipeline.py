"""LTX-2 in five services: an encoder, a denoiser, decoders of video and of audio, and one that makes the file."""

import io
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
import torch

from stagemesh.services.engines.diffusion import CONDITIONING, LATENTS
from stagemesh.services.engines.diffusion.options import stage_options
from stagemesh.services.engines.diffusion.state import DiffusionInputs
from stagemesh.services.engines.diffusion.worker import DiffusionRunner
from tests.deployment import deployed
from tests.diffusion.pipeline_runs import run_to_end
from tests.diffusion.tiny.pipelines import write_ltx2, write_qwen_image_edit
from tests.media.samples import NOISE
from tests.pictures import encoded_image

pytestmark = pytest.mark.timeout(240)

PIPELINE = """\
pipeline: movie
stages:
  encoder: {{engine: diffusion, model: {model}, options: {{part: encode, dtype: float32, guidance_scale: 3}}}}
  denoiser:
    engine: diffusion
    model: {model}
    options:
      {{part: denoise, dtype: float32, guidance_scale: 3, height: 64, width: 96, num_frames: 9, max_frames: 9,
        num_inference_steps: 2}}
  video-decoder:
    {{engine: diffusion, model: {model}, options: {{part: decode, dtype: float32, blocks: [video_decode]}}}}
  audio-decoder:
    engine: diffusion
    model: {model}
    options: {{part: decode, dtype: float32, blocks: [audio_decode], audio_rate_hz: 24000}}
  movie: {{engine: function, function: movie.mp4, join: any}}
edges:
  - {{from: encoder, to: denoiser}}
  - {{from: denoiser, to: video-decoder}}
  - {{from: denoiser, to: audio-decoder}}
  - {{from: video-decoder, to: movie}}
  - {{from: audio-decoder, to: movie}}
outputs: {{video: movie, frames: video-decoder.frames, sound: audio-decoder.audio}}
"""
INPUTS = DiffusionInputs(
    5, "a storm", "blur", height=64, width=96, num_frames=9, num_inference_steps=2, guidance_scale=3.0
)


def _runner(folder: Path, **options: Any) -> DiffusionRunner:
    return DiffusionRunner(folder, stage_options({"dtype": "float32", **options}), torch.device("cpu"))


def test_five_services_make_the_frames_and_the_sound_of_one(tmp_path: Path) -> None:
    folder, path = write_ltx2(tmp_path / "model"), tmp_path / "movie.yaml"
    path.write_text(PIPELINE.format(model=folder))
    with deployed(path) as up, up.client() as client:
        result = client.generate("a storm", seed=5, negative_prompt="blur").result()
    whole = _runner(folder)
    for _ in range(whole.begin("r", INPUTS).total_steps):
        assert whole.step(["r"]) == [None]
    expected = whole.decode("r")
    assert expected.audio is not None
    np.testing.assert_array_equal(result.tensors["frames"][0].tensor, expected.frames)
    np.testing.assert_array_equal(result.audios["sound"].samples, expected.audio)
    file = result.media["video"]
    with av.open(io.BytesIO(file.data), "r") as container:
        assert (file.media_type, len(list(container.decode(video=0)))) == ("video/mp4", 9)
    with av.open(io.BytesIO(file.data), "r") as container:
        seconds = sum(frame.samples for frame in container.decode(audio=0)) / 48_000
        assert seconds == pytest.approx(len(expected.audio) / expected.sample_rate_hz, abs=0.05)


def test_encoders_in_parallel_give_the_image_of_one(tmp_path: Path) -> None:
    folder = write_qwen_image_edit(tmp_path)
    image = encoded_image(NOISE.resize((64, 64)))
    inputs = DiffusionInputs(
        5, "a storm", "blur", (image,), height=64, width=64, num_inference_steps=2, guidance_scale=3.0
    )
    options: dict[str, dict[str, Any]] = {
        "whole": {},
        "text": {"part": "encode", "blocks": ["text_encoder"]},
        "image": {"part": "encode", "blocks": ["vae_encoder"]},
        "denoise": {"part": "denoise"},
        "decode": {"part": "decode"},
    }
    runner = {name: _runner(folder, **each) for name, each in options.items()}
    for name in ("text", "image"):
        runner[name].begin("r", inputs)
    encoded = [runner[name].serialize("r", CONDITIONING) for name in ("text", "image")]
    for _ in range(runner["denoise"].begin("r", inputs, conditioning=encoded).total_steps):
        assert runner["denoise"].step(["r"]) == [None]
    made = runner["decode"].decode_latents(runner["denoise"].serialize("r", LATENTS))
    np.testing.assert_array_equal(made.frames, run_to_end(runner["whole"], inputs))
