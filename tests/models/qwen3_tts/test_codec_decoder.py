"""Qwen3-TTS's codec decoder as a streaming stage, compared with the waveforms of the reference implementation."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from stagemesh.common.errors import InvalidChunkError
from stagemesh.common.plugins.descriptors import FunctionDescriptor
from stagemesh.common.plugins.entry_points import import_factory, load_descriptor
from stagemesh.connectors.packets import Packet
from stagemesh.services.engines.function.base import Call
from stagemesh.services.models.codec_speech.vocoder import CodecVocoder
from stagemesh.services.models.qwen3_tts.codec_decoder import CloneState, CloneVocoder, make_codec_decoder
from tests.models.qwen3_tts.golden import STRIDE, arrays
from tests.models.vocoding import Codes, Samples, decode, joined, push

SAMPLES_PER_FRAME = 1920
ROUNDING = 3e-6
REFERENCE, SPEECH = 12, 20


@pytest.fixture(scope="module")
def vocoder(tiny_qwen3_tts: Path) -> CodecVocoder:
    return load(tiny_qwen3_tts)


def load(folder: Path) -> CodecVocoder:
    return make_codec_decoder(folder, {"device": "cpu"})


def codes(frames: int = 0) -> Codes:
    given: Codes = arrays()["codes"].astype(np.int32)
    return given[: frames or len(given)]


def assert_equal(samples: Samples, expected: Samples) -> None:
    np.testing.assert_allclose(samples, expected, atol=ROUNDING, rtol=0)


def test_a_stream_gives_the_waveform_of_the_reference(vocoder: CodecVocoder) -> None:
    # The reference decodes 300 frames, and then the others with 25 frames before them.
    samples, start = decode(vocoder, codes()), arrays()["waveform_start"]
    assert len(samples) == len(codes()) * SAMPLES_PER_FRAME
    assert 0.05 < start.std() < 0.3
    assert np.abs(samples).max() < 1
    assert_equal(samples[: len(start)], start)
    assert_equal(samples[::STRIDE], arrays()["waveform"])


def test_both_kinds_of_checkpoint_have_the_same_codec(vocoder: CodecVocoder, tiny_qwen3_tts_base: Path) -> None:
    assert_equal(decode(load(tiny_qwen3_tts_base), codes(50)), decode(vocoder, codes(50)))


def test_each_chunk_has_all_samples_of_its_frames(vocoder: CodecVocoder) -> None:
    state = vocoder.open(seed=0, options={})
    lengths = [len(push(vocoder, state, codes(frames))) for frames in (1, 2, 5)]
    assert lengths == [SAMPLES_PER_FRAME, 2 * SAMPLES_PER_FRAME, 5 * SAMPLES_PER_FRAME]


# -- a reference voice, whose frames are decoded but not heard


@pytest.fixture(scope="module")
def clone(tiny_qwen3_tts: Path) -> CloneVocoder:
    vocoder = import_factory(load_descriptor(FunctionDescriptor, "qwen3_tts.codec_decoder").factory)(tiny_qwen3_tts, {})
    assert isinstance(vocoder, CloneVocoder)
    return vocoder


def frames(start: int, end: int) -> Packet:
    return Packet({"codes": codes(end)[start:]})


def reference(end: int) -> Packet:
    return Packet({"reference_codes": codes()[:end]})


def speak(clone: CloneVocoder, packets: Sequence[Packet | None], state: CloneState | None = None) -> Samples:
    state = state or clone.open(seed=0, options={})
    return joined([packet for given in packets for packet in clone([Call(state, given)])[0]])


@pytest.mark.parametrize("early", [0, 1, 2, 3])
def test_only_the_speech_after_the_reference_is_heard(clone: CloneVocoder, early: int) -> None:
    end = REFERENCE + SPEECH
    whole = speak(clone, [reference(0), frames(0, end)])
    speech = [frames(REFERENCE, 13), frames(13, 20), frames(20, end)]
    heard = speak(clone, [*speech[:early], reference(REFERENCE), *speech[early:], None])
    assert len(heard) == SPEECH * SAMPLES_PER_FRAME
    np.testing.assert_allclose(heard, whole[REFERENCE * SAMPLES_PER_FRAME :], atol=ROUNDING, rtol=0)
    assert np.abs(heard - speak(clone, [reference(0), frames(REFERENCE, end)])).max() > 1e-3


def test_a_request_without_an_edge_for_a_reference_does_not_wait(clone: CloneVocoder) -> None:
    state = clone.open_without(frozenset({"reference_codes"}), seed=0, options={})
    assert len(speak(clone, [frames(0, 3)], state)) == 3 * SAMPLES_PER_FRAME


def test_streams_with_and_without_a_reference_share_batches(clone: CloneVocoder) -> None:
    states = [clone.open(seed=0, options={}) for _ in range(3)]
    first = [reference(REFERENCE), reference(0), frames(0, 4)]
    (none, nothing, waiting) = clone([Call(*each) for each in zip(states, first, strict=True)])
    assert [none, nothing, waiting] == [[], [], []]
    second = [frames(REFERENCE, 16), frames(0, 4), reference(0)]
    made = clone([Call(*each) for each in zip(states, second, strict=True)])
    whole = speak(clone, [reference(0), frames(0, 16)])
    parts = [whole[REFERENCE * SAMPLES_PER_FRAME :], *[whole[: 4 * SAMPLES_PER_FRAME]] * 2]
    for (packet,), expected in zip(made, parts, strict=True):
        np.testing.assert_allclose(packet.tensors["audio"].astype(np.float32), expected, atol=ROUNDING, rtol=0)


def test_invalid_codes_leave_a_stream_as_it_was(clone: CloneVocoder) -> None:
    state = clone.open(seed=0, options={})
    with pytest.raises(InvalidChunkError, match="codec frame 0 has the code 99"):
        clone([Call(state, Packet({"reference_codes": np.full((1, 4), 99, np.int32)}))])
    assert len(speak(clone, [reference(2), frames(2, 4)], state)) == 2 * SAMPLES_PER_FRAME


def test_a_stream_that_ends_without_its_reference_is_an_error(clone: CloneVocoder) -> None:
    with pytest.raises(InvalidChunkError, match="the edges ended without reference_codes"):
        speak(clone, [frames(0, 1), None])


@pytest.mark.parametrize("saved_after", range(4))
def test_a_restored_stream_continues_with_the_same_samples(clone: CloneVocoder, saved_after: int) -> None:
    packets = [frames(25, 30), reference(25), frames(30, 60), frames(60, 90)]
    whole = speak(clone, packets)
    state = clone.open(seed=0, options={})
    before = speak(clone, packets[:saved_after], state)
    restored = clone.restore(clone.save(state), seed=0, options={})
    after = speak(clone, packets[saved_after:], restored)
    np.testing.assert_allclose(np.concatenate([before, after]), whole, atol=ROUNDING, rtol=0)
