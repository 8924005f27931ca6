"""The streaming vocoders: the samples of a stream do not depend on its packets, nor on other streams."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import JsonValue
from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import Qwen3OmniMoeCode2Wav

from stagemesh.common.errors import InvalidChunkError
from stagemesh.connectors.packets import Packet
from stagemesh.services.engines.function.base import Call, Function
from stagemesh.services.models.qwen2_5_omni.factory import make_token2wav
from stagemesh.services.models.qwen3_omni.code2wav import make_code2wav
from stagemesh.services.models.qwen3_tts.codec_decoder import make_codec_decoder
from stagemesh.tiny_models import qwen2_5_omni, qwen3_tts
from tests.models.qwen3_tts.golden import arrays
from tests.models.tiny_code2wav import CODEBOOK_SIZE, decode_whole, random_codes
from tests.models.tiny_token2wav import STEPS, DecodeReference
from tests.models.vocoding import SEED, Codes, Samples, decode, decode_together, pieces, push

MOST_FRAMES = 120
CUTTINGS = {
    "whole": [],
    "1": range(1, MOST_FRAMES),
    "4": range(4, MOST_FRAMES, 4),
    "25": range(25, MOST_FRAMES, 25),
    "ramp": [1, 3, 7, 15, 31, 63],
}


@dataclass(frozen=True)
class Vocoder:
    """A vocoder, and the samples that it makes of a stream."""

    make: Callable[[Mapping[str, JsonValue]], Function[Any]]
    options: Mapping[str, JsonValue]
    codes: Codes
    whole: Samples
    tolerance: float
    special: int
    """A code that cannot be converted to audio."""

    def load(self, **options: JsonValue) -> Function[Any]:
        return self.make({"device": "cpu", **self.options, **options})

    @cached_property
    def function(self) -> Function[Any]:
        return self.load()

    def check(self, samples: Samples) -> None:
        np.testing.assert_allclose(samples, self.whole, atol=self.tolerance, rtol=0)


@pytest.fixture(scope="module")
def code2wav(code2wav_reference: Qwen3OmniMoeCode2Wav, code2wav_folder: Path) -> Vocoder:
    load, codes = partial(make_code2wav, code2wav_folder), random_codes(MOST_FRAMES)
    return Vocoder(load, {}, codes, decode_whole(code2wav_reference, codes), 1e-5, CODEBOOK_SIZE)


@pytest.fixture(scope="module")
def codec_decoder(tiny_qwen3_tts: Path) -> Vocoder:
    load, codes = partial(make_codec_decoder, tiny_qwen3_tts), arrays()["codes"][:50].astype(np.int32)
    return Vocoder(load, {}, codes, decode(load({"device": "cpu"}), codes), 3e-6, qwen3_tts.CODEC_EOS)


@pytest.fixture(scope="module")
def token2wav(tiny_qwen2_5_omni: Path) -> Vocoder:
    """With this look-ahead, the samples do not depend on the packets."""
    load, codes = partial(make_token2wav, tiny_qwen2_5_omni), random_codes(42, groups=1)
    options: dict[str, JsonValue] = {"steps": STEPS, "look_ahead_blocks": 4}
    whole = DecodeReference(tiny_qwen2_5_omni).decode(codes)
    return Vocoder(load, options, codes, whole, 1e-5, qwen2_5_omni.CODEC_EOS)


@pytest.fixture(scope="module", params=["code2wav", "codec_decoder", "token2wav"])
def vocoder(request: pytest.FixtureRequest) -> Vocoder:
    vocoder: Vocoder = request.getfixturevalue(request.param)
    return vocoder


@pytest.mark.parametrize("cuts", CUTTINGS.values(), ids=CUTTINGS)
def test_any_packets_give_the_same_samples(vocoder: Vocoder, cuts: Sequence[int]) -> None:
    assert 0.03 < vocoder.whole.std() < 0.3
    assert np.abs(vocoder.whole).max() < 1
    vocoder.check(decode(vocoder.function, vocoder.codes, cuts))


@given(cuts=st.lists(st.integers(0, MOST_FRAMES), max_size=20))
@settings(max_examples=15, deadline=None)
def test_random_packets_give_the_same_samples(vocoder: Vocoder, cuts: list[int]) -> None:
    vocoder.check(decode(vocoder.function, vocoder.codes, cuts))


def test_streams_at_different_progress_share_batches(vocoder: Vocoder) -> None:
    streams = [pieces(vocoder.codes, [start, start + 9, start + 18]) for start in range(1, 25, 3)]
    for samples in decode_together(vocoder.function, [pieces(vocoder.codes, [10, 19, 28]), *streams]):
        vocoder.check(samples)


def test_the_memory_of_a_stream_is_constant(vocoder: Vocoder) -> None:
    state, sizes = vocoder.function.open(seed=SEED, options={}), set[int]()
    for _ in range(12):
        push(vocoder.function, state, vocoder.codes[:40])
        sizes.add(sum(map(_retained_bytes, vars(state).values())))
    assert len(sizes) == 1
    assert sizes != {0}


def _retained_bytes(part: object) -> int:
    if isinstance(part, torch.Tensor):
        return part.untyped_storage().nbytes()
    return part.nbytes if isinstance(part, np.ndarray) else 0


def test_a_stream_without_frames_has_no_audio(vocoder: Vocoder) -> None:
    assert not len(decode(vocoder.function, vocoder.codes[:0]))


@pytest.mark.parametrize("kind", ["negative", "special"])
def test_a_batch_that_fails_names_the_frame_and_changes_no_state(vocoder: Vocoder, kind: str) -> None:
    wrong, bad = vocoder.codes[:20].copy(), {"negative": -1, "special": vocoder.special}[kind]
    wrong[17, -1] = bad
    group = wrong.shape[1] - 1
    state, other = (vocoder.function.open(seed=SEED, options={}) for _ in range(2))
    heard = push(vocoder.function, state, vocoder.codes[:22])
    rest = vocoder.codes[22:]
    with pytest.raises(InvalidChunkError, match=f"codec frame 17 has the code {bad} in group {group}"):
        vocoder.function([Call(state, Packet({"codes": rest})), Call(other, Packet({"codes": wrong}))])
    vocoder.check(np.concatenate([heard, *(push(vocoder.function, state, each) for each in (rest, None))]))


def test_a_wrong_number_of_groups_is_an_error(vocoder: Vocoder) -> None:
    groups = vocoder.codes.shape[1]
    with pytest.raises(InvalidChunkError, match=f"have {groups + 1} codes each, but the vocoder's model has {groups}"):
        decode(vocoder.function, np.repeat(vocoder.codes[:, :1], groups + 1, axis=1))


@pytest.mark.parametrize(("vocoder", "limit"), [("code2wav", 0.1), ("codec_decoder", 0.05)], indirect=["vocoder"])
def test_bfloat16_is_close(vocoder: Vocoder, limit: float) -> None:
    samples = decode(vocoder.load(dtype="bfloat16"), vocoder.codes, CUTTINGS["25"])
    assert samples.dtype == np.float32
    assert 0 < (samples - vocoder.whole).std() < limit * vocoder.whole.std()
