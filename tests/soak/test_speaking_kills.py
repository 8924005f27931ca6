"""A tiny Qwen3-Omni whose thinker, talker and vocoder are killed at random moments of a speaking stream."""

import random
import time
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from stagemesh.client import AudioChunk, Client, StageArguments
from tests.deployment import Deployment, deployed
from tests.models.qwen3_omni.deployment import PIPELINE, with_torchvision

pytestmark = [pytest.mark.soak, pytest.mark.timeout(3600)]

KILLS = 30
STAGES = ("thinker", "talker", "code2wav")
"""Each stage is killed ten times."""
TEXT_TOKENS, FRAMES = 120, 240


def test_a_killed_stage_costs_a_pause_but_no_sample(tiny_qwen3_omni: Path, tmp_path: Path) -> None:
    file = tmp_path / "omni.yaml"
    # With two replicas of each stage, the other one takes over while the killed one starts again.
    text = PIPELINE.format(model=tiny_qwen3_omni).replace("    engine:", "    replicas: 2\n    engine:")
    file.write_text(text.replace("dtype: float32\n", "dtype: float32\n      checkpoint_tokens: 16\n"))
    moments, pauses_s = random.Random(0), dict[str, list[float]]()
    with with_torchvision(), deployed(file, ready_s=400) as omni, omni.client() as client:
        undisturbed, _ = speak(omni, client)
        for number in range(KILLS):
            omni.wait(Deployment.all_ready, timeout_s=400)
            stage = STAGES[number % len(STAGES)]
            audio, pause_s = speak(omni, client, killed=stage, after=moments.random())
            pauses_s.setdefault(stage, []).append(pause_s)
            assert audio.shape == undisturbed.shape
            assert np.abs(audio - undisturbed).max() < 1e-4
    for stage, each in pauses_s.items():
        print(f"{stage}: {len(each)} kills, median pause {np.median(each):.2f} s, longest {max(each):.2f} s")


def speak(
    omni: Deployment, client: Client, *, killed: str | None = None, after: float = 0.0
) -> tuple[npt.NDArray[np.float32], float]:
    """Returns the audio of one request, and the longest pause between two chunks of it in seconds.

    `killed` is the stage of which the replica that runs the request is killed. `after` is the moment, as a share of the
    request's text for the thinker, and of its audio for the other stages.
    """
    talker: StageArguments = {"max_tokens": FRAMES, "min_tokens": FRAMES}
    thinker: StageArguments = {"temperature": 0.9, "max_tokens": TEXT_TOKENS, "min_tokens": TEXT_TOKENS}
    parts, tokens, pause_s, last_s = list[npt.NDArray[np.float32]](), 0, 0.0, 0.0
    for event in client.generate("Speak", seed=3, stages={"thinker": thinker, "talker": talker}):
        if isinstance(event, AudioChunk):
            now_s = time.monotonic()
            pause_s, last_s = max(pause_s, now_s - last_s if parts else 0.0), now_s
            parts.append(event.samples)
        else:
            tokens += 1
        progress = tokens / TEXT_TOKENS if killed == "thinker" else len(parts) * 8 / FRAMES
        if killed is not None and progress >= after * 0.9:
            running = [name for name in omni.replicas() if name.startswith(killed) and omni.load(name).running]
            if running:
                omni.kill(running[0])
                killed = None
    assert killed is None, f"{killed} was never seen running"
    return np.concatenate(parts), pause_s
