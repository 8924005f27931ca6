"""The codec decoder of Qwen3-TTS with a reference voice, whose frames are decoded but not heard."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from stagemesh.common.errors import InvalidChunkError
from stagemesh.common.plugins.entry_points import import_factory, load_function_descriptor
from stagemesh.connectors.packets import Packet
from stagemesh.services.engines.function.base import Call
from stagemesh.services.models.qwen3_tts.codec_decoder import CloneState, CloneVocoder
from tests.models.qwen3_tts.golden import arrays
from tests.models.vocoding import Samples, joined

SAMPLES_PER_FRAME = 1920
REFERENCE, SPEECH = 12, 20
ROUNDING = 3e-6


@pytest.fixture(scope="module")
def vocoder(tiny_qwen3_tts: Path) -> CloneVocoder:
    vocoder = import_factory(load_function_descriptor("qwen3_tts.codec_decoder").factory)(tiny_qwen3_tts, {})
    assert isinstance(vocoder, CloneVocoder)
    return vocoder


def codes(start: int, end: int) -> Packet:
    return Packet({"codes": arrays()["codes"][start:end].astype(np.int32)})


def reference(end: int) -> Packet:
    return Packet({"reference_codes": arrays()["codes"][:end].astype(np.int32)})


def decode(vocoder: CloneVocoder, packets: Sequence[Packet | None], state: CloneState | None = None) -> Samples:
    state = state or vocoder.open(seed=0, options={})
    made = [packet for given in packets for packet in vocoder([Call(state, given)])[0]]
    return joined(made)


@pytest.mark.parametrize("early", [0, 1, 2, 3])
def test_only_the_speech_after_the_reference_is_heard(vocoder: CloneVocoder, early: int) -> None:
    end = REFERENCE + SPEECH
    whole = decode(vocoder, [reference(0), codes(0, end)])
    speech = [codes(REFERENCE, 13), codes(13, 20), codes(20, end)]
    heard = decode(vocoder, [*speech[:early], reference(REFERENCE), *speech[early:], None])
    assert len(heard) == SPEECH * SAMPLES_PER_FRAME
    np.testing.assert_allclose(heard, whole[REFERENCE * SAMPLES_PER_FRAME :], atol=ROUNDING, rtol=0)
    assert np.abs(heard - decode(vocoder, [reference(0), codes(REFERENCE, end)])).max() > 1e-3


def test_a_request_without_an_edge_for_a_reference_does_not_wait(vocoder: CloneVocoder) -> None:
    state = vocoder.open_without(frozenset({"reference_codes"}), seed=0, options={})
    assert len(decode(vocoder, [codes(0, 3)], state)) == 3 * SAMPLES_PER_FRAME


def test_streams_with_and_without_a_reference_share_batches(vocoder: CloneVocoder) -> None:
    states = [vocoder.open(seed=0, options={}) for _ in range(3)]
    first = [reference(REFERENCE), reference(0), codes(0, 4)]
    (none, nothing, waiting) = vocoder([Call(*each) for each in zip(states, first, strict=True)])
    assert [none, nothing, waiting] == [[], [], []]
    second = [codes(REFERENCE, 16), codes(0, 4), reference(0)]
    made = vocoder([Call(*each) for each in zip(states, second, strict=True)])
    whole = decode(vocoder, [reference(0), codes(0, 16)])
    parts = [whole[REFERENCE * SAMPLES_PER_FRAME :], *[whole[: 4 * SAMPLES_PER_FRAME]] * 2]
    for (packet,), expected in zip(made, parts, strict=True):
        np.testing.assert_allclose(packet.tensors["audio"].astype(np.float32), expected, atol=ROUNDING, rtol=0)


def test_invalid_codes_leave_a_stream_as_it_was(vocoder: CloneVocoder) -> None:
    state = vocoder.open(seed=0, options={})
    with pytest.raises(InvalidChunkError, match="codec frame 0 has the code 99"):
        vocoder([Call(state, Packet({"reference_codes": np.full((1, 4), 99, np.int32)}))])
    assert len(decode(vocoder, [reference(2), codes(2, 4)], state)) == 2 * SAMPLES_PER_FRAME


def test_a_stream_that_ends_without_its_reference_is_an_error(vocoder: CloneVocoder) -> None:
    with pytest.raises(InvalidChunkError, match="the edges ended without reference_codes"):
        decode(vocoder, [codes(0, 1), None])


@pytest.mark.parametrize("saved_after", range(4))
def test_a_restored_stream_continues_with_the_same_samples(vocoder: CloneVocoder, saved_after: int) -> None:
    packets = [codes(25, 30), reference(25), codes(30, 60), codes(60, 90)]
    whole = decode(vocoder, packets)
    state = vocoder.open(seed=0, options={})
    before = decode(vocoder, packets[:saved_after], state)
    restored = vocoder.restore(vocoder.save(state), seed=0, options={})
    after = decode(vocoder, packets[saved_after:], restored)
    np.testing.assert_allclose(np.concatenate([before, after]), whole, atol=ROUNDING, rtol=0)
