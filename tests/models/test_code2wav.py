"""Qwen3-Omni's code2wav as a streaming stage, compared with transformers' decode of the whole stream."""

from collections.abc import AsyncIterator, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import JsonValue
from torch import Tensor
from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import Qwen3OmniMoeCode2Wav

from stagemesh.common.errors import InvalidRequestError
from stagemesh.common.wire.tensors import Tensors
from stagemesh.connectors.packets import Packet
from stagemesh.services.engines.base import Checkpoint, Task
from stagemesh.services.engines.function.engine import FunctionEngine
from stagemesh.services.models.codec_speech.streaming import BatchState
from stagemesh.services.models.codec_speech.vocoder import CodecVocoder, VocoderState
from stagemesh.services.models.qwen3_omni.code2wav import make_code2wav
from tests.engines.support import collect, flow, packets, stage_config, started
from tests.models.tiny_code2wav import (
    CODEBOOK_SIZE,
    GROUPS,
    decode_whole,
    make_reference,
    random_codes,
    write_checkpoint,
)
from tests.models.vocoding import Codes, Samples, decode, decode_together, joined, pieces, push
from tests.rpc.call_errors import raises

FRAMES = 120
CODES = random_codes(FRAMES)
TOLERANCE = 1e-5
RESTORED_TOLERANCE = 4e-6
"""A restored stream is computed in other shapes, which sum in another order: with AVX2 on AMD's EPYC, by 2.1e-6."""
GPU_TOLERANCE = 1e-4
"""A GPU sums in another order."""
CUTS = range(25, FRAMES, 25)


@pytest.fixture(scope="module")
def whole(code2wav_reference: Qwen3OmniMoeCode2Wav) -> Samples:
    samples = decode_whole(code2wav_reference, CODES)
    assert 0.1 < samples.std() < 0.3
    return samples


@pytest.fixture(scope="module")
def vocoder(code2wav_folder: Path) -> CodecVocoder:
    return load(code2wav_folder)


@pytest.fixture
async def engine(code2wav_folder: Path) -> AsyncIterator[FunctionEngine]:
    options: dict[str, JsonValue] = {"checkpoint_rows": 32}
    config = stage_config("function", function="qwen3_omni.code2wav", model=str(code2wav_folder), options=options)
    async with started(FunctionEngine(config)) as engine:
        yield engine


def load(folder: Path, **options: JsonValue) -> CodecVocoder:
    return make_code2wav(folder, {"device": "cpu", **options})


def task(parts: Iterable[Codes], checkpoint: Checkpoint | None = None) -> Task:
    return Task("r", 0, inlets={"in": flow(Packet({"codes": part}) for part in parts)}, resume_from=checkpoint)


async def emitted(engine: FunctionEngine, parts: Iterable[Codes], checkpoint: Checkpoint | None = None) -> Samples:
    return joined(packets(await collect(engine.submit(task(parts, checkpoint)))))


def assert_equal(samples: Samples, expected: Samples, *, tolerance: float = TOLERANCE) -> None:
    np.testing.assert_allclose(samples, expected, atol=tolerance, rtol=0)


@pytest.mark.parametrize(
    "changes",
    [
        {"sliding_window": 2},
        {"sliding_window": FRAMES - 1},
        {"sliding_window": 2 * FRAMES},
        {"num_key_value_heads": 1, "attention_bias": True},
        {"upsample_rates": [3], "upsampling_ratios": [2, 3]},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 50.0}},
    ],
    ids=str,
)
def test_other_configs_give_the_samples_of_a_whole_decode(tmp_path: Path, changes: dict[str, Any]) -> None:
    reference = make_reference(**changes)
    vocoder = load(write_checkpoint(tmp_path, reference))
    assert_equal(decode(vocoder, CODES, CUTS), decode_whole(reference, CODES))


def test_older_configs_name_the_base_of_the_embedding_otherwise(tmp_path: Path) -> None:
    reference = make_reference(rope_parameters={"rope_type": "default", "rope_theta": 50.0})
    config = reference.config.to_dict() | {"rope_theta": 50.0}
    del config["rope_parameters"]
    vocoder = load(write_checkpoint(tmp_path, reference, code2wav_config=config))
    assert_equal(decode(vocoder, CODES, []), decode_whole(reference, CODES))


def test_a_filled_batch_sounds_as_an_exact_one(vocoder: CodecVocoder, whole: Samples) -> None:
    filled = CodecVocoder(vocoder._decoder)
    filled._batches = (1, 4)
    for samples in decode_together(filled, [pieces(CODES, CUTS)] * 7):
        assert_equal(samples, whole)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_gpu_gives_the_samples_of_the_cpu(code2wav_folder: Path, whole: Samples) -> None:
    vocoder = load(code2wav_folder, device="cuda", dtype="float32")
    for samples in decode_together(vocoder, [pieces(CODES, CUTS)] * 5):
        assert_equal(samples, whole, tolerance=GPU_TOLERANCE)


def test_long_packets_are_decoded_in_pieces(vocoder: CodecVocoder, monkeypatch: pytest.MonkeyPatch) -> None:
    codes, frames, kind = random_codes(2000), list[int](), type(vocoder._decoder)
    decode_frames = kind.__call__

    def noted(self: Any, codes: Tensor, batch: BatchState) -> Tensor:
        frames.append(codes.shape[0] * codes.shape[1])
        return decode_frames(self, codes, batch)

    monkeypatch.setattr(kind, "__call__", noted)
    long = decode_together(vocoder, [[codes], [codes]])
    assert max(frames) <= vocoder._max_frames
    short = decode(vocoder, codes, range(25, 2000, 25))
    for samples in long:
        assert_equal(samples, short)


@pytest.mark.parametrize(
    ("options", "problem"),
    [({"dtype": "float8"}, "option dtype is 'float8'"), ({"precision": 1}, "unknown option 'precision'")],
)
def test_options_are_checked(code2wav_folder: Path, options: dict[str, JsonValue], problem: str) -> None:
    with pytest.raises(InvalidRequestError, match=problem):
        make_code2wav(code2wav_folder, options)


# -- streams that resume from a checkpoint


def after(vocoder: CodecVocoder, frames: int) -> VocoderState:
    state = vocoder.open(seed=0, options={})
    push(vocoder, state, CODES[:frames])
    return state


def restored(vocoder: CodecVocoder, state: VocoderState, **changed: Any) -> VocoderState:
    """Restores a saved state of which some tensors are changed."""
    return vocoder.restore({**vocoder.save(state), **changed}, seed=0, options={})


@pytest.mark.parametrize(
    ("changes", "tolerance"),
    [
        ({}, RESTORED_TOLERANCE),
        ({"sliding_window": 2}, RESTORED_TOLERANCE),
        ({"sliding_window": 2 * FRAMES}, RESTORED_TOLERANCE),
        ({"num_key_value_heads": 1, "attention_bias": True}, RESTORED_TOLERANCE),
        ({"upsample_rates": [3], "upsampling_ratios": [2, 3]}, RESTORED_TOLERANCE),
        # The samples of this model differ by 1e-5 between any two divisions into chunks.
        ({"upsample_rates": [8, 5, 4, 3], "decoder_dim": 64}, 1.2e-5),
    ],
    ids=str,
)
def test_a_restored_stream_continues_unchanged(tmp_path: Path, changes: Mapping[str, Any], tolerance: float) -> None:
    vocoder = load(write_checkpoint(tmp_path, make_reference(**changes)))
    state = after(vocoder, 0)
    for start in range(0, FRAMES, 10):
        assert start == state.frames
        resumed = restored(vocoder, state)
        expected = push(vocoder, state, CODES[start : start + 10])
        assert_equal(push(vocoder, resumed, CODES[start : start + 10]), expected, tolerance=tolerance)


def test_a_stream_restored_again_and_again_does_not_drift(vocoder: CodecVocoder) -> None:
    state, whole = after(vocoder, 0), decode(vocoder, CODES)
    parts = list[Samples]()
    for start in range(0, FRAMES, 5):
        parts.append(push(vocoder, state, CODES[start : start + 5]))
        state = restored(vocoder, state)
    assert_equal(np.concatenate(parts), whole, tolerance=RESTORED_TOLERANCE)


def test_a_saved_state_has_the_last_frames_on_which_later_samples_depend(vocoder: CodecVocoder) -> None:
    """Frames before them have no effect at all. Half of them would not suffice."""

    def later_samples(changed_frame: int) -> Samples:
        codes = CODES.copy()
        codes[changed_frame] = (codes[changed_frame] + 1) % CODEBOOK_SIZE
        state = after(vocoder, 0)
        push(vocoder, state, codes[:100])
        return push(vocoder, state, codes[100:])

    reach = vocoder._decoder.reach
    last = 100 - reach
    assert len(vocoder.save(after(vocoder, 100))["codes"]) == reach < 40
    assert not (later_samples(last - 1) - later_samples(last - 2)).any()
    assert np.abs(later_samples(100 - reach // 2) - later_samples(last - 1)).max() > 10 * RESTORED_TOLERANCE


@pytest.mark.parametrize("part", ["_transformer", "_waves"])
def test_a_shorter_reach_gives_other_samples(code2wav_folder: Path, part: str) -> None:
    """The reach of both parts of the model is needed."""
    vocoder = load(code2wav_folder)
    code2wav: Any = vocoder._decoder
    expected = push(vocoder, after(vocoder, 100), CODES[100:])
    getattr(code2wav, part).reach //= 2
    code2wav.reach = code2wav._transformer.reach + code2wav._waves.reach
    samples = push(vocoder, restored(vocoder, after(vocoder, 100)), CODES[100:])
    assert np.abs(samples - expected).max() > 10 * RESTORED_TOLERANCE


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
    with pytest.raises((TypeError, ValueError)):
        restored(vocoder, after(vocoder, 30), **change)


async def test_a_killed_stream_resumes_from_each_checkpoint_without_its_frames(engine: FunctionEngine) -> None:
    codes = random_codes(200)
    whole = await collect(engine.submit(task(pieces(codes, range(8, 200, 8)))))
    samples = joined(packets(whole))
    found = [(event, whole[:number]) for number, event in enumerate(whole) if isinstance(event, Checkpoint)]
    assert len(found) == 6
    for checkpoint, before in found:
        # Only the frames after the checkpoint are decoded to samples.
        rest = await emitted(engine, pieces(codes, range(25, 200, 25)), checkpoint)
        assert_equal(rest, samples[len(joined(packets(before))) :], tolerance=RESTORED_TOLERANCE)
        assert sum(tensor.nbytes for tensor in checkpoint.tensors.values()) < 1000


async def test_a_checkpoint_with_a_damaged_state_is_rejected(engine: FunctionEngine) -> None:
    events = await collect(engine.submit(task(pieces(CODES, range(8, FRAMES, 8)))))
    checkpoint = next(event for event in events if isinstance(event, Checkpoint))
    wrong = replace(checkpoint, tensors={**checkpoint.tensors, "state.codes": CODES[:5]})
    with raises(InvalidRequestError, reason="INVALID_CHECKPOINT", match="are not the last ones of 32 frames"):
        await emitted(engine, pieces(CODES, range(8, FRAMES, 8)), wrong)
