"""A killed vocoder that resumes in another process: the same audio, without a second decode of earlier frames."""

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from stagemesh.client import AudioChunk, Client
from tests.deployment import Deployment, deployed
from tests.models.tiny_code2wav import make_reference, write_checkpoint
from tests.system.added_transforms import add_transform
from tests.system.pipelines import pipeline_file
from tests.system.reading import steps_of

pytestmark = pytest.mark.timeout(300)

CHECKPOINT_ROWS, STEP_FRAMES, STEPS = 16, 4, 60
FRAMES = STEP_FRAMES * STEPS
KILLED_AFTER = 0.7
"""The share of the audio after which the vocoder is killed."""
CODES = """\
import numpy as np
from stagemesh.connectors.packets import Packet
from stagemesh.common.wire.tensors import TensorSpec
from stagemesh.common.plugins.descriptors import TransformDescriptor

DESCRIPTOR = TransformDescriptor(
    {"text": TensorSpec("uint8", ("bytes",))}, {"codes": TensorSpec("int32", ("frames", "groups"))}, "added_codes:Codes"
)


class Codes:
    def __init__(self, model):
        self._rest = b""

    def push(self, packet):
        text = self._rest + packet.tensors["text"].tobytes()
        whole = len(text) // 4 * 4
        self._rest = text[whole:]
        codes = np.frombuffer(text[:whole], np.uint8).astype(np.int32) % 64
        return [Packet({"codes": codes.reshape(-1, 4)})]

    def finish(self):
        return []
"""
"""Makes a codec frame of every four bytes of a text."""
PIPELINE = """\
pipeline: voice
stages:
  source: {{engine: fake, function: source, options: {{steps: {steps}, step_s: 0.03, size_bytes: {size_bytes}}}}}
  vocoder:
    engine: function
    function: qwen3_omni.code2wav
    model: {model}
    replicas: 2
    options: {{device: cpu, checkpoint_rows: {checkpoint_rows}}}
edges:
  - {{from: source, to: vocoder, transform: codes}}
outputs: {{audio: vocoder}}
"""


@pytest.fixture
def voice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Deployment]:
    add_transform(tmp_path, monkeypatch, name="codes", source=CODES)
    model = write_checkpoint(tmp_path / "model", make_reference())
    text = PIPELINE.format(steps=STEPS, size_bytes=4 * STEP_FRAMES, model=model, checkpoint_rows=CHECKPOINT_ROWS)
    with deployed(pipeline_file(tmp_path, text)) as deployment:
        yield deployment


def test_a_killed_vocoder_decodes_only_the_frames_after_its_checkpoint(voice: Deployment) -> None:
    def kill_vocoder() -> None:
        vocoders = (name for name in voice.replicas() if name.startswith("vocoder"))
        voice.kill(next(name for name in vocoders if voice.load(name).running))

    with voice.client() as client:
        undisturbed, _ = _speak(client)
        disturbed, request_id = _speak(client, at=KILLED_AFTER * len(undisturbed), act=kill_vocoder)
    assert disturbed.shape == undisturbed.shape
    assert np.abs(disturbed - undisturbed).max() < 2e-6
    first, second = (step for step in steps_of(voice, request_id) if step.stage == "vocoder")
    # The restarted process may answer before the orchestrator finds the port closed.
    assert first.error.reason in {"REPLICA_LOST", "REPLICA_RESTARTED"}
    assert second.resumed_engine_steps
    decoded_s, audio_s = second.finished.usage.audio_s, len(undisturbed) / 24_000
    print(f"{audio_s:.3f} s of audio, of which the second attempt decoded {decoded_s:.3f} s")
    # The newest checkpoint may be on its way when the vocoder is killed. The one before has arrived.
    most_frames = (1 - KILLED_AFTER) * FRAMES + 2 * CHECKPOINT_ROWS + STEP_FRAMES
    assert 0 < decoded_s < most_frames / FRAMES * audio_s


def _speak(
    client: Client, *, at: float | None = None, act: Callable[[], None] | None = None
) -> tuple[npt.NDArray[np.float32], str]:
    """Returns the audio and the id of a request. Calls `act` once, when `at` samples have arrived."""
    parts, generation = list[npt.NDArray[np.float32]](), client.generate("speak", seed=3)
    for event in generation:
        if isinstance(event, AudioChunk):
            parts.append(event.samples)
        if act is not None and at is not None and sum(map(len, parts)) >= at:
            act()
            act = None
    assert act is None, "the request ended before the kill"
    return np.concatenate(parts), generation.request_id
