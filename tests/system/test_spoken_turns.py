"""A client speaks to the tiny Qwen3-Omni of the examples, which detects the ends of its turns."""

from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import pytest

from stagemesh.client import (
    AudioSamples,
    Message,
    Session,
    SpeechDetected,
    StageArguments,
    Text,
    TurnCommitted,
    TurnDetection,
    TurnEnded,
    TurnInterrupted,
)
from tests.deployment import Deployment, deployed
from tests.models.qwen3_omni.deployment import with_torchvision
from tests.models.spoken import speak

pytestmark = pytest.mark.timeout(400)

EXAMPLE = Path("examples/qwen3-omni/tiny.yaml")
RATE_HZ = 16_000
PIECE = RATE_HZ // 10
T = TypeVar("T")

GREEDY: StageArguments = {"temperature": 0.0, "max_tokens": 12}


@pytest.fixture(scope="module")
def omni(tiny_qwen3_omni: Path) -> Iterator[Deployment]:
    with with_torchvision(), pytest.MonkeyPatch.context() as patch:
        patch.setenv("STAGEMESH_OMNI", str(tiny_qwen3_omni))
        with deployed(EXAMPLE) as deployment:
            yield deployment


@pytest.fixture(scope="module")
def speech() -> npt.NDArray[np.float32]:
    """Returns a question with a second of silence before it and after it, at 16 kHz."""
    spoken = speak("What time is it in Tokyo?", pause_s=1.0)
    times_s = np.arange(0, len(spoken) / 24_000, 1 / RATE_HZ)
    samples: npt.NDArray[np.float32] = np.interp(times_s, np.arange(len(spoken)) / 24_000, spoken).astype(np.float32)
    return samples


def _append(session: Session, audio: npt.NDArray[np.float32]) -> None:
    for start in range(0, len(audio), PIECE):
        session.append(AudioSamples(audio[start : start + PIECE], RATE_HZ))


class Heard:
    """The events of a session that a test has received."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self.speech: list[SpeechDetected] = []
        self.text = ""

    def until(self, kind: type[T]) -> T:
        """Returns the next event of a kind."""
        for event in self._session:
            if isinstance(event, SpeechDetected):
                self.speech.append(event)
            if isinstance(event, Text):
                self.text += event.delta
            if isinstance(event, kind):
                return event
        raise AssertionError(f"the session ended before {kind}")


def test_a_turn_ends_with_its_speech(omni: Deployment, speech: npt.NDArray[np.float32]) -> None:
    with (
        omni.client() as client,
        client.converse(outputs=["text"], turn_detection={}, stages={"thinker": GREEDY}, seed=1) as session,
    ):
        _append(session, speech)
        heard = Heard(session)
        committed = heard.until(TurnCommitted)
        heard.until(TurnEnded)
        begin, end = heard.speech
        assert (begin.begins, end.begins) == (True, False)
        assert committed == TurnCommitted(turn=1, detected=True, audio_end_s=end.at_s)
        spoken = AudioSamples(speech[round(begin.at_s * RATE_HZ) : round(end.at_s * RATE_HZ)], RATE_HZ)
        messages = [Message("user", [spoken])]
        expected = client.generate(messages=messages, outputs=["text"], stages={"thinker": GREEDY}, seed=1).result()
    assert heard.text == expected.text


def test_speech_interrupts_an_answer(omni: Deployment, speech: npt.NDArray[np.float32]) -> None:
    endless: StageArguments = {"max_tokens": 1500, "ignore_eos": True}
    detection: TurnDetection = {"interrupts": True, "options": {"silence_ms": 300}}
    with (
        omni.client() as client,
        client.converse(outputs=["text"], turn_detection=detection, stages={"thinker": endless}) as session,
    ):
        _append(session, speech)
        heard = Heard(session)
        heard.until(Text)
        _append(session, speech)
        assert heard.until(TurnInterrupted).detected
        assert heard.until(TurnEnded).turn == 1
        assert heard.until(TurnCommitted).turn == 2
    assert [event.begins for event in heard.speech] == [True, False, True, False]
