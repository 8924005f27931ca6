"""Text that a client appends to a session of the real speech pipeline is spoken sentence by sentence."""

import re
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from stagemesh.client import AudioChunk, Session, TurnEnded
from stagemesh.services.models.hibari import SAMPLE_RATE_HZ
from tests.deployment import Deployment, eventually

pytestmark = [pytest.mark.speech, pytest.mark.timeout(300)]

TEXT = (
    "The sea was calm this morning. Dr. Smith saw three boats, etc. and a gull on the pier. Nobody spoke! "
    "Was it the light? At noon the wind rose."
)
TOKENS = re.findall(r"\s*\S+", TEXT)
TOKEN_S = 0.05


class Spoken:
    """The audio of a turn that a client heard, and the times of its first audio and of the commit."""

    def __init__(self) -> None:
        self.audio = np.zeros(0, np.float32)
        self.first_audio_s = self.committed_s = 0.0

    def hear(self, session: Session) -> None:
        for event in session:
            if isinstance(event, AudioChunk):
                self.first_audio_s = self.first_audio_s or time.monotonic()
                self.audio = np.concatenate([self.audio, event.samples])
            elif isinstance(event, TurnEnded):
                assert event.error is None
                return


def _speak(up: Deployment, pieces: Sequence[str], *, interval_s: float = 0.0) -> Spoken:
    spoken = Spoken()
    with (
        up.client() as client,
        client.converse(outputs=["audio"], input_mode="stream", seed=7) as session,
        ThreadPoolExecutor(1) as pool,
    ):
        hearing = pool.submit(spoken.hear, session)
        for piece in pieces:
            session.append(piece)
            time.sleep(interval_s)
        spoken.committed_s = time.monotonic()
        session.commit()
        hearing.result(timeout=30)
    return spoken


def test_audio_begins_before_the_turn_is_committed(speech_up: Deployment) -> None:
    spoken = _speak(speech_up, TOKENS, interval_s=TOKEN_S)
    assert spoken.first_audio_s < spoken.committed_s
    assert len(spoken.audio) > 5 * SAMPLE_RATE_HZ


def test_the_audio_does_not_depend_on_the_pieces_of_the_text(speech_up: Deployment) -> None:
    whole = _speak(speech_up, [TEXT]).audio
    np.testing.assert_array_equal(_speak(speech_up, TOKENS, interval_s=TOKEN_S).audio, whole)
    np.testing.assert_array_equal(_speak(speech_up, list(TEXT)).audio, whole)


def test_a_stage_that_restarts_speaks_the_text_again_from_its_begin(speech_up: Deployment) -> None:
    whole = _speak(speech_up, [TEXT]).audio
    with ThreadPoolExecutor(1) as pool:
        speaking = pool.submit(_speak, speech_up, TOKENS, interval_s=2 * TOKEN_S)
        eventually(lambda: bool(speech_up.load("acoustic-0").running), timeout_s=10)
        speech_up.kill("acoustic-0")
        np.testing.assert_array_equal(speaking.result(timeout=60).audio, whole)
