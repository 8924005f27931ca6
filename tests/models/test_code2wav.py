"""Qwen3-Omni's code2wav as a streaming stage, compared with transformers' decode of the whole stream."""

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import JsonValue
from torch import Tensor
from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import Qwen3OmniMoeCode2Wav

from stagemesh.common.errors import InvalidChunkError, InvalidRequestError, NotReadyError
from stagemesh.connectors.packets import Packet
from stagemesh.services.engines.base import Task, Usage
from stagemesh.services.engines.function.base import Call
from stagemesh.services.engines.function.engine import FunctionEngine
from stagemesh.services.models.codec_speech.streaming import BatchState
from stagemesh.services.models.codec_speech.vocoder import CodecVocoder
from stagemesh.services.models.qwen3_omni.code2wav import make_code2wav
from tests.engines.support import collect, packets, stage_config
from tests.models.tiny_code2wav import (
    CODEBOOK_SIZE,
    decode_whole,
    make_reference,
    random_codes,
    write_checkpoint,
)
from tests.models.vocoding import Codes, Samples, decode, joined, pieces, push, push_all

FRAMES = 120
CODES = random_codes(FRAMES)
TOLERANCE = 1e-5
GPU_TOLERANCE = 1e-4
"""A GPU sums in another order."""
CUTTINGS = {
    "whole": [],
    "1": list(range(1, FRAMES)),
    "4": list(range(4, FRAMES, 4)),
    "25": list(range(25, FRAMES, 25)),
    "ramp": [1, 3, 7, 15, 31, 63],
}


@pytest.fixture(scope="module")
def whole(code2wav_reference: Qwen3OmniMoeCode2Wav) -> Samples:
    return decode_whole(code2wav_reference, CODES)


@pytest.fixture(scope="module")
def vocoder(code2wav_folder: Path) -> CodecVocoder:
    return load(code2wav_folder)


@pytest.fixture
async def engine(code2wav_folder: Path) -> AsyncIterator[FunctionEngine]:
    engine = FunctionEngine(stage_config("function", function="qwen3_omni.code2wav", model=str(code2wav_folder)))
    await engine.start(lambda _line: None)
    yield engine
    await engine.close()


def load(folder: Path, **options: JsonValue) -> CodecVocoder:
    return make_code2wav(folder, {"device": "cpu", **options})


def task(codes: Codes, cuts: Sequence[int]) -> Task:
    async def inlet() -> AsyncIterator[Packet]:
        for piece in pieces(codes, cuts):
            yield Packet({"codes": piece})

    return Task(f"of {len(codes)} frames", 0, inlets={"in": inlet()})


def assert_equal(samples: Samples, expected: Samples) -> None:
    np.testing.assert_allclose(samples, expected, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("cutting", CUTTINGS)
def test_any_chunks_give_the_samples_of_a_whole_decode(vocoder: CodecVocoder, whole: Samples, cutting: str) -> None:
    assert 0.1 < whole.std() < 0.3
    assert_equal(decode(vocoder, CODES, CUTTINGS[cutting]), whole)


@given(cuts=st.lists(st.integers(0, FRAMES), max_size=20))
@settings(max_examples=15, deadline=None)
def test_random_chunks_give_the_samples_of_a_whole_decode(
    vocoder: CodecVocoder, whole: Samples, cuts: list[int]
) -> None:
    assert_equal(decode(vocoder, CODES, cuts), whole)


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
    assert_equal(decode(vocoder, CODES, CUTTINGS["25"]), decode_whole(reference, CODES))


def test_older_configs_name_the_base_of_the_embedding_otherwise(tmp_path: Path) -> None:
    reference = make_reference(rope_parameters={"rope_type": "default", "rope_theta": 50.0})
    config = reference.config.to_dict() | {"rope_theta": 50.0}
    del config["rope_parameters"]
    vocoder = load(write_checkpoint(tmp_path, reference, code2wav_config=config))
    assert_equal(decode(vocoder, CODES, []), decode_whole(reference, CODES))


def test_streams_at_different_progress_share_batches(vocoder: CodecVocoder, whole: Samples) -> None:
    states = [vocoder.open(seed=0, options={}) for _ in range(8)]
    heard = [push(vocoder, state, CODES[: 3 * row]) for row, state in enumerate(states)]
    for start in range(0, 90, 9):
        made = push_all(vocoder, states, [CODES[3 * row + start : 3 * row + start + 9] for row in range(8)])
        heard = [np.concatenate(each) for each in zip(heard, made, strict=True)]
    for samples in heard:
        assert_equal(samples, whole[: len(samples)])


def test_a_filled_batch_sounds_as_an_exact_one(vocoder: CodecVocoder, whole: Samples) -> None:
    filled = CodecVocoder(vocoder._decoder, batches=(1, 4))
    states = [filled.open(seed=0, options={}) for _ in range(7)]
    heard = [np.zeros(0, np.float32) for _ in states]
    for piece in pieces(CODES, CUTTINGS["25"]):
        made = push_all(filled, states, [piece] * len(states))
        heard = [np.concatenate(each) for each in zip(heard, made, strict=True)]
    for state, samples in zip(states, heard, strict=True):
        assert_equal(samples, whole)
        assert state.frames == FRAMES


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_gpu_gives_the_samples_of_the_cpu(code2wav_folder: Path, whole: Samples) -> None:
    vocoder = load(code2wav_folder, device="cuda", dtype="float32")
    states = [vocoder.open(seed=0, options={}) for _ in range(5)]
    heard = [np.zeros(0, np.float32) for _ in states]
    for piece in pieces(CODES, CUTTINGS["25"]):
        made = push_all(vocoder, states, [piece] * len(states))
        heard = [np.concatenate(each) for each in zip(heard, made, strict=True)]
    for samples in heard:
        np.testing.assert_allclose(samples, whole, atol=GPU_TOLERANCE, rtol=0)


async def test_eight_requests_in_one_engine_sound_as_alone(engine: FunctionEngine, whole: Samples) -> None:
    lengths = range(40, 120, 10)
    runs = await asyncio.gather(
        *(collect(engine.submit(task(CODES[:length], range(4, length, 4)))) for length in lengths)
    )
    for run in runs:
        samples = joined(packets(run))
        assert_equal(samples, whole[: len(samples)])
    assert len({len(joined(packets(run))) for run in runs}) == 8


class _MostFrames:
    """Records the largest number of frames that are decoded together."""

    def __init__(self, vocoder: CodecVocoder, monkeypatch: pytest.MonkeyPatch) -> None:
        self._decoder, self.frames = vocoder._decoder, 0
        self.groups, self.codebook_size = self._decoder.groups, self._decoder.codebook_size
        self.device, self.reach = self._decoder.device, self._decoder.reach
        monkeypatch.setattr(vocoder, "_decoder", self)

    def __call__(self, codes: Tensor, batch: BatchState) -> Tensor:
        self.frames = max(self.frames, codes.shape[0] * codes.shape[1])
        return self._decoder(codes, batch)


def test_long_packets_are_decoded_in_pieces(vocoder: CodecVocoder, monkeypatch: pytest.MonkeyPatch) -> None:
    codes, most = random_codes(2000), _MostFrames(vocoder, monkeypatch)
    first, second = (vocoder.open(seed=0, options={}) for _ in range(2))
    long = push_all(vocoder, [first, second], [codes, codes])
    assert most.frames <= vocoder._max_frames
    short = decode(vocoder, codes, range(25, 2000, 25))
    for samples in long:
        assert_equal(samples, short)


def test_the_memory_of_a_stream_is_constant(vocoder: CodecVocoder) -> None:
    state, other = (vocoder.open(seed=0, options={}) for _ in range(2))
    sizes = set[int]()
    for piece in pieces(random_codes(2000), range(40, 2000, 40)):
        push_all(vocoder, [state, other], [piece, piece])
        assert state.memory is not None
        assert state.memory.nbytes == state.memory.untyped_storage().nbytes()
        sizes.add(state.memory.nbytes)
    assert len(sizes) == 1
    assert state.frames == 2000


async def test_an_empty_stream_has_no_audio(engine: FunctionEngine) -> None:
    async def nothing() -> AsyncIterator[Packet]:
        for packet in list[Packet]():
            yield packet

    assert await collect(engine.submit(Task("r", 0, inlets={"in": nothing()}))) == [Usage(steps=0)]


def test_a_packet_without_frames_has_no_audio(vocoder: CodecVocoder) -> None:
    assert not len(decode(vocoder, CODES[:0], []))


async def test_a_wrong_code_fails_only_its_request_and_names_the_frame(engine: FunctionEngine, whole: Samples) -> None:
    wrong = CODES[:30].copy()
    wrong[17, 2] = CODEBOOK_SIZE
    tasks = [task(codes, range(5, 30, 5)) for codes in (CODES[:30], wrong, CODES[:30])]
    first, failed, last = await asyncio.gather(
        *(collect(engine.submit(each)) for each in tasks), return_exceptions=True
    )
    assert isinstance(failed, InvalidChunkError)
    assert "codec frame 17 has the code 64 in group 2" in failed.message
    for run in (first, last):
        assert not isinstance(run, BaseException)
        samples = joined(packets(run))
        assert_equal(samples, whole[: len(samples)])


def test_a_batch_that_fails_changes_no_state(vocoder: CodecVocoder, whole: Samples) -> None:
    state, wrong = (vocoder.open(seed=0, options={}) for _ in range(2))
    heard = push(vocoder, state, CODES[:10])
    bad = Call(wrong, Packet({"codes": np.full((3, 4), -1, np.int32)}))
    with pytest.raises(InvalidChunkError, match="codec frame 0 has the code -1"):
        vocoder([Call(state, Packet({"codes": CODES[10:20]})), bad])
    assert_equal(np.concatenate([heard, push(vocoder, state, CODES[10:])]), whole)


def test_a_wrong_number_of_groups_is_an_error(vocoder: CodecVocoder) -> None:
    with pytest.raises(InvalidChunkError, match="have 3 codes each, but the vocoder's model has 4 groups"):
        decode(vocoder, CODES[:, :3], [])


def test_bfloat16_is_close(code2wav_folder: Path, whole: Samples) -> None:
    samples = decode(load(code2wav_folder, dtype="bfloat16"), CODES, CUTTINGS["25"])
    error = samples - whole
    assert samples.dtype == np.float32
    assert 0 < error.std() < 0.1 * whole.std()


@pytest.mark.parametrize(
    ("options", "problem"),
    [({"dtype": "float8"}, "option dtype is 'float8'"), ({"precision": 1}, "unknown option 'precision'")],
)
def test_options_are_checked(code2wav_folder: Path, options: dict[str, JsonValue], problem: str) -> None:
    with pytest.raises(InvalidRequestError, match=problem):
        make_code2wav(code2wav_folder, options)


def test_the_function_needs_a_model() -> None:
    with pytest.raises(InvalidRequestError, match="set the stage's `model`"):
        make_code2wav(None, {})


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        ({"model_type": "qwen3_tts"}, "the model_type 'qwen3_tts', but the stage needs 'qwen3_omni_moe'"),
        ({"code2wav_config": None}, "code2wav_config is None"),
        ({"code2wav_config": {"hidden_size": "big"}}, "code2wav_config.hidden_size is 'big'"),
        ({"code2wav_config": {"upsampling_ratios": []}}, "no sample for the first frame"),
    ],
    ids=["type", "none", "field", "rates"],
)
def test_a_wrong_config_is_named(
    tmp_path: Path, code2wav_reference: Qwen3OmniMoeCode2Wav, config: dict[str, Any], problem: str
) -> None:
    with pytest.raises(NotReadyError, match=problem):
        load(write_checkpoint(tmp_path, code2wav_reference, **config))


def test_descriptors_do_not_load_torch() -> None:
    code = "import stagemesh.services.models.qwen3_omni, sys; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
