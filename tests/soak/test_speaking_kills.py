"""A tiny Qwen3-Omni whose thinker, talker and vocoder are killed at random moments of a speaking stream."""

import random
import time
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from stagemesh.client import AudioChunk, Client, StageArguments, Tokens
from tests.deployment import Deployment, deployed
from tests.models.qwen3_omni.deployment import PIPELINE, with_torchvision

pytestmark = [pytest.mark.soak, pytest.mark.timeout(3600)]

KILLS = 30
STAGES = ("thinker", "talker", "code2wav")
"""Each stage is killed ten times."""
TEXT_TOKENS, FRAMES = 400, 480


def test_a_killed_stage_costs_a_pause_but_no_sample(tiny_qwen3_omni: Path, tmp_path: Path) -> None:
    file = tmp_path / "omni.yaml"
    # With two replicas of each stage, the other one takes over while the killed one starts again.
    text = PIPELINE.format(model=tiny_qwen3_omni).replace("    engine:", "    replicas: 2\n    engine:")
    file.write_text(text.replace("dtype: float32\n", "dtype: float32\n      checkpoint_tokens: 16\n"))
    moments, pauses_s = random.Random(0), dict[str, list[float]]()
    with with_torchvision(), deployed(file, ready_s=400) as omni, omni.client() as client:
        undisturbed, _, _ = speak(omni, client)
        for number in range(KILLS):
            omni.wait(Deployment.all_ready, timeout_s=400)
            stage = STAGES[number % len(STAGES)]
            was_killed = False
            while not was_killed:
                # The stage may end between the moment and the kill.
                audio, pause_s, was_killed = speak(omni, client, victim=stage, after=0.8 * moments.random())
                assert audio.shape == undisturbed.shape
                assert np.abs(audio - undisturbed).max() < 1e-4
            pauses_s.setdefault(stage, []).append(pause_s)
    for stage, each in pauses_s.items():
        print(f"{stage}: {len(each)} kills, median pause {np.median(each):.2f} s, longest {max(each):.2f} s")


def speak(
    omni: Deployment, client: Client, *, victim: str | None = None, after: float = 0.0
) -> tuple[npt.NDArray[np.float32], float, bool]:
    """Returns the audio of one request, the longest pause between two chunks in seconds, and whether it was killed.

    `victim` is the stage of which the replica that runs the request is killed. `after` is the moment, as a share of the
    request's text for the thinker, and of its audio for the other stages.
    """
    talker: StageArguments = {"max_tokens": FRAMES, "min_tokens": FRAMES}
    thinker: StageArguments = {"temperature": 0.9, "max_tokens": TEXT_TOKENS, "min_tokens": TEXT_TOKENS}
    parts, tokens, pause_s, last_s, killed = list[npt.NDArray[np.float32]](), 0, 0.0, 0.0, False
    for event in client.generate("Speak", seed=3, stages={"thinker": thinker, "talker": talker}):
        if isinstance(event, AudioChunk):
            now_s = time.monotonic()
            pause_s, last_s = max(pause_s, now_s - last_s if parts else 0.0), now_s
            parts.append(event.samples)
        elif isinstance(event, Tokens):
            tokens += len(event.ids)
        progress = tokens / TEXT_TOKENS if victim == "thinker" else len(parts) * 8 / FRAMES
        if victim is not None and not killed and progress >= after:
            running = [name for name in omni.replicas() if name.startswith(victim) and omni.load(name).running]
            if running:
                omni.kill(running[0])
                killed = True
    return np.concatenate(parts), pause_s, killed
