"""Streams of code2wav that resume from a checkpoint: their samples equal those of an uninterrupted stream."""

from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stagemesh.common.errors import InvalidRequestError
from stagemesh.common.wire.tensors import Tensors
from stagemesh.connectors.packets import Packet
from stagemesh.services.engines.base import Checkpoint, EngineEvent, Task
from stagemesh.services.engines.function.engine import FunctionEngine
from stagemesh.services.models.codec_speech.vocoder import CodecVocoder, VocoderState
from stagemesh.services.models.qwen3_omni.code2wav import make_code2wav
from tests.engines.support import collect, packets, stage_config
from tests.models.tiny_code2wav import CODEBOOK_SIZE, GROUPS, make_reference, random_codes, write_checkpoint
from tests.models.vocoding import Codes, Samples, joined, push

FRAMES = 120
CODES = random_codes(FRAMES)
TOLERANCE = 2e-6


@pytest.fixture(scope="module")
def vocoder(code2wav_folder: Path) -> CodecVocoder:
    return load(code2wav_folder)


def load(folder: Path) -> CodecVocoder:
    return make_code2wav(folder, {"device": "cpu"})


def opened(vocoder: CodecVocoder) -> VocoderState:
    return vocoder.open(seed=0, options={})


def restored(vocoder: CodecVocoder, tensors: Tensors) -> VocoderState:
    return vocoder.restore(tensors, seed=0, options={})


def reach(vocoder: CodecVocoder) -> int:
    return vocoder._decoder.reach


def assert_equal(samples: Samples, expected: Samples) -> None:
    np.testing.assert_allclose(samples, expected, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize(
    ("changes", "tolerance"),
    [
        ({}, TOLERANCE),
        ({"sliding_window": 2}, TOLERANCE),
        ({"sliding_window": 2 * FRAMES}, TOLERANCE),
        ({"num_key_value_heads": 1, "attention_bias": True}, TOLERANCE),
        ({"upsample_rates": [3], "upsampling_ratios": [2, 3]}, TOLERANCE),
        # The samples of this model differ by 1e-5 between any two divisions into chunks.
        ({"upsample_rates": [8, 5, 4, 3], "decoder_dim": 64}, 1.2e-5),
    ],
    ids=str,
)
def test_a_restored_stream_continues_with_the_same_samples(
    tmp_path: Path, changes: Mapping[str, Any], tolerance: float
) -> None:
    vocoder = load(write_checkpoint(tmp_path, make_reference(**changes)))
    state = opened(vocoder)
    for start in range(0, FRAMES, 10):
        assert start == state.frames
        resumed = restored(vocoder, vocoder.save(state))
        expected = push(vocoder, state, CODES[start : start + 10])
        np.testing.assert_allclose(push(vocoder, resumed, CODES[start : start + 10]), expected, atol=tolerance, rtol=0)


def test_a_stream_restored_again_and_again_does_not_drift(vocoder: CodecVocoder) -> None:
    state, whole = opened(vocoder), push(vocoder, opened(vocoder), CODES)
    parts = list[Samples]()
    for start in range(0, FRAMES, 5):
        parts.append(push(vocoder, state, CODES[start : start + 5]))
        state = restored(vocoder, vocoder.save(state))
    assert_equal(np.concatenate(parts), whole)


def test_a_saved_state_has_the_last_frames_on_which_later_samples_depend(vocoder: CodecVocoder) -> None:
    """Frames before them have no effect at all. Half of them would not suffice."""

    def later_samples(changed_frame: int) -> Samples:
        codes = CODES.copy()
        codes[changed_frame] = (codes[changed_frame] + 1) % CODEBOOK_SIZE
        state = opened(vocoder)
        push(vocoder, state, codes[:100])
        return push(vocoder, state, codes[100:])

    last = 100 - reach(vocoder)
    assert len(vocoder.save(_after(vocoder, 100))["codes"]) == reach(vocoder) < 40
    assert not (later_samples(last - 1) - later_samples(last - 2)).any()
    assert np.abs(later_samples(100 - reach(vocoder) // 2) - later_samples(last - 1)).max() > 10 * TOLERANCE


def _after(vocoder: CodecVocoder, frames: int) -> VocoderState:
    state = opened(vocoder)
    push(vocoder, state, CODES[:frames])
    return state


@pytest.mark.parametrize("part", ["_transformer", "_decoder"])
def test_a_shorter_reach_gives_other_samples(code2wav_folder: Path, part: str) -> None:
    """The reach of both parts of the model is needed."""
    vocoder = load(code2wav_folder)
    code2wav: Any = vocoder._decoder
    expected = push(vocoder, _after(vocoder, 100), CODES[100:])
    getattr(code2wav, part).reach //= 2
    code2wav.reach = code2wav._transformer.reach + code2wav._decoder.reach
    samples = push(vocoder, restored(vocoder, vocoder.save(_after(vocoder, 100))), CODES[100:])
    assert np.abs(samples - expected).max() > 10 * TOLERANCE


@pytest.mark.parametrize(
    "change",
    [
        {"codes": CODES[:5]},
        {"codes": np.full((30, GROUPS), CODEBOOK_SIZE, np.int32)},
        {"codes": CODES[:30, :3]},
        {"frames": np.array(-1)},
        {"frames": np.array([1, 2])},
        {"frames": np.array(3)},
    ],
    ids=["short", "range", "groups", "negative", "shape", "early"],
)
def test_damaged_states_are_rejected(vocoder: CodecVocoder, change: Tensors) -> None:
    saved = vocoder.save(_after(vocoder, 30))
    with pytest.raises((TypeError, ValueError)):
        restored(vocoder, {**saved, **change})


def task(codes: Codes, *, packet_frames: int, checkpoint: Checkpoint | None = None) -> Task:
    async def inlet() -> AsyncIterator[Packet]:
        for start in range(0, len(codes), packet_frames):
            yield Packet({"codes": codes[start : start + packet_frames]})

    return Task("r", 0, inlets={"in": inlet()}, resume_from=checkpoint)


async def test_a_killed_stream_resumes_from_each_checkpoint_without_its_frames(code2wav_folder: Path) -> None:
    codes = random_codes(200)
    config = stage_config(
        "function", function="qwen3_omni.code2wav", model=str(code2wav_folder), options={"checkpoint_rows": 32}
    )
    engine = FunctionEngine(config)
    await engine.start(lambda _line: None)
    whole = await collect(engine.submit(task(codes, packet_frames=8)))
    samples, per_frame = joined(packets(whole)), len(joined(packets(whole))) / len(codes)
    found = [number for number, event in enumerate(whole) if isinstance(event, Checkpoint)]
    assert len(found) == 6
    for number in found:
        checkpoint, before = _checkpoint(whole[number]), len(joined(packets(whole[:number])))
        rest = joined(packets(await collect(engine.submit(task(codes, packet_frames=25, checkpoint=checkpoint)))))
        assert_equal(rest, samples[before:])
        # Only the frames after the checkpoint are decoded to samples.
        assert len(rest) == round(per_frame * len(codes)) - before
        assert sum(tensor.nbytes for tensor in checkpoint.tensors.values()) < 1000
    wrong = _checkpoint(whole[found[0]])
    wrong = replace(wrong, tensors={**wrong.tensors, "state.codes": CODES[:5]})
    with pytest.raises(InvalidRequestError, match="are not the last ones of 32 frames") as caught:
        await collect(engine.submit(task(codes, packet_frames=8, checkpoint=wrong)))
    assert caught.value.reason == "INVALID_CHECKPOINT"
    await engine.close()


def _checkpoint(event: EngineEvent) -> Checkpoint:
    assert isinstance(event, Checkpoint)
    return event
