"""The events of `audio.turns` in synthetic noise, and in speech that hibari has spoken."""

from collections.abc import Callable, Mapping

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stagemesh.common.errors import InvalidChunkError, InvalidRequestError
from stagemesh.common.wire.tensors import Value
from stagemesh.connectors.packets import Packet
from stagemesh.services.engines.function.base import Call
from stagemesh.services.engines.options import request_options
from stagemesh.services.models.speech_detection import TURNS, SpeechEvent, SpeechStream, Turns
from tests.models.spoken import speak
from tests.models.vocoding import parts
from tests.rpc.call_errors import raises

Audio = npt.NDArray[np.float32]

RATE_HZ = 24_000
QUIET = np.zeros(2 * RATE_HZ, np.float32)


def _packet(audio: Audio, rate_hz: int = RATE_HZ) -> Packet:
    return Packet({"audio": audio.astype(np.float32)}, {"sample_rate_hz": rate_hz})


def _events(
    audio: Audio, *, rate_hz: int = RATE_HZ, cuts: list[int] | None = None, **options: Value
) -> list[SpeechEvent]:
    turns = Turns(None, {})
    state = turns.open(seed=0, options=_options(options))
    packets = [_packet(audio[part], rate_hz) for part in parts(len(audio), cuts or [])]
    made = [out for packet in [*packets, None] for out in turns([Call(state, packet)])[0]]
    return [SpeechEvent(bool(row[0]), row[1]) for out in made for row in out.tensors["speech"]]


def _options(options: Mapping[str, Value]) -> Mapping[str, Value]:
    return request_options(options, TURNS.signature.options, stage="turns")


def _noise(seconds: float, amplitude: float, rate_hz: int = RATE_HZ) -> Audio:
    return np.random.default_rng(3).normal(0, amplitude, int(seconds * rate_hz)).astype(np.float32)


def _hum(seconds: float, frequency_hz: float, rate_hz: int = RATE_HZ) -> Audio:
    times = np.arange(int(seconds * rate_hz)) / rate_hz
    return sum((0.4 / k * np.sin(2 * np.pi * frequency_hz * k * times + k) for k in (1, 2, 3)), 0 * times).astype(
        np.float32
    )


@pytest.fixture(scope="module")
def speech() -> Audio:
    return speak("Where have you been all this time?", "Yes.", pause_s=len(QUIET) / RATE_HZ)


@given(cuts=st.lists(st.integers(0, 250_000), max_size=60), rate_hz=st.sampled_from([8_000, 11_025, 24_000, 44_100]))
@settings(max_examples=25, deadline=None)
def test_the_division_of_the_audio_does_not_change_the_events(speech: Audio, cuts: list[int], rate_hz: int) -> None:
    noisy = speech + _noise(len(speech) / RATE_HZ, 0.003)[: len(speech)]
    assert _events(noisy, rate_hz=rate_hz, cuts=cuts) == _events(noisy, rate_hz=rate_hz)


@pytest.mark.parametrize("amplitude", [0.0, 0.001, 0.004])
def test_each_sentence_begins_and_ends_once(speech: Audio, amplitude: float) -> None:
    events = _events(speech + _noise(len(speech) / RATE_HZ, amplitude)[: len(speech)])
    assert [event.begins for event in events] == [True, False, True, False]
    loud = np.flatnonzero(np.abs(speech) > 0.02) / RATE_HZ
    gap = int(np.argmax(np.diff(loud)))
    times = [event.at_s for event in events]
    # 0.3 s of padding surround the speech.
    expected = [loud[0] - 0.3, loud[gap] + 0.3, loud[gap + 1] - 0.3, loud[-1] + 0.3]
    np.testing.assert_allclose(times, expected, atol=0.2)


SOUNDS: Mapping[str, Callable[[int], Audio]] = {
    "noise": lambda rate_hz: _noise(10, 0.1, rate_hz),
    "quiet noise": lambda rate_hz: _noise(10, 0.001, rate_hz),
    "hum at 50 Hz": lambda rate_hz: _hum(10, 50, rate_hz),
    "hum at 60 Hz": lambda rate_hz: _hum(10, 60, rate_hz),
    "noise after silence": lambda rate_hz: np.concatenate([_noise(1, 0, rate_hz), _noise(5, 0.003, rate_hz)]),
    "click": lambda rate_hz: np.concatenate([_noise(1, 0, rate_hz), _noise(0.04, 0.5, rate_hz), _noise(1, 0, rate_hz)]),
}


@pytest.mark.parametrize("rate_hz", [8_000, 16_000, 22_050, 48_000])
@pytest.mark.parametrize("sound", SOUNDS)
def test_other_sounds_are_not_speech(sound: str, rate_hz: int) -> None:
    assert _events(SOUNDS[sound](rate_hz), rate_hz=rate_hz) == []


def test_speech_is_found_in_loud_hum(speech: Audio) -> None:
    assert len(_events(speech + _hum(len(speech) / RATE_HZ, 50)[: len(speech)])) == 4


def test_louder_noise_counts_as_speech_for_a_few_seconds_only() -> None:
    begin, end = _events(np.concatenate([_noise(5, 0.001), _noise(10, 0.1)]))
    assert (begin.begins, end.begins) == (True, False)
    assert end.at_s - begin.at_s < 5


def test_speech_ends_with_the_audio(speech: Audio) -> None:
    cut = speech[: len(QUIET) + RATE_HZ]
    assert [event.begins for event in _events(cut)] == [True, False]
    assert _events(cut)[1].at_s == pytest.approx(len(cut) / RATE_HZ, abs=0.2)


def test_an_end_is_emitted_once_the_silence_lasts(speech: Audio) -> None:
    stream = SpeechStream(_options({"silence_ms": 1_000}))
    loud = np.flatnonzero(np.abs(speech[: -len(QUIET) - RATE_HZ]) > 0.02)[-1]
    early, late = int(loud + 0.8 * RATE_HZ), int(loud + 1.2 * RATE_HZ)
    assert [event.begins for event in stream.push(_packet(speech[:early]))] == [True]
    assert [event.begins for event in stream.push(_packet(speech[early:late]))] == [False]


def test_options_move_the_events(speech: Audio) -> None:
    plain, padded = _events(speech, padding_ms=0), _events(speech, padding_ms=500)
    assert padded[0].at_s == pytest.approx(plain[0].at_s - 0.5)
    assert len(_events(speech, silence_ms=3_000)) == 2
    assert _events(speech, speech_ms=2_000) == []
    assert _events(0.03 * speech, threshold_db=20.0) == []


@pytest.mark.parametrize("rate_hz", [7_999, 48_001, "fast"])
def test_other_sample_rates_are_rejected(rate_hz: int) -> None:
    with raises(InvalidRequestError, reason="INVALID_MEDIA", match="8000 to 48000 Hz"):
        _events(QUIET, rate_hz=rate_hz)


def test_a_change_of_the_sample_rate_is_rejected() -> None:
    turns = Turns(None, {})
    state = turns.open(seed=0, options=_options({}))
    turns([Call(state, _packet(QUIET))])
    with pytest.raises(InvalidRequestError, match="16000 Hz after audio at 24000 Hz"):
        turns([Call(state, _packet(QUIET, 16_000))])


def test_a_bad_packet_changes_no_state_of_its_batch(speech: Audio) -> None:
    turns = Turns(None, {})
    good, bad = (turns.open(seed=0, options=_options({})) for _ in range(2))
    with pytest.raises(InvalidRequestError, match="not finite"):
        turns([Call(good, _packet(speech)), Call(bad, _packet(QUIET * np.nan))])
    assert len([*good.push(_packet(speech))]) == 4


def test_audio_without_a_sample_rate_is_rejected() -> None:
    with pytest.raises(InvalidChunkError, match="sample_rate_hz"):
        Turns(None, {})([Call(SpeechStream(_options({})), Packet({"audio": QUIET}))])
