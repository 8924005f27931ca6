"""The real speech pipeline as a soak's work. Its audio is compared with that of a run without faults, and by speech
recognition.
"""

from collections.abc import Callable
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from stagemesh.services.models.hibari import SAMPLE_RATE_HZ
from tests.soak.delivery import Delivery, Flaws
from tests.soak.work import Work
from tests.soak.workload import Request
from tests.speech.whisper import transcribe, word_error_rate

Recognizer: TypeAlias = Callable[[npt.NDArray[np.float32], int], str]
"""Returns the words that are spoken in audio samples, given the samples and their rate in Hz."""

TOPICS = ("river", "castle", "garden", "mountain", "kitchen", "library")
_SEED, _MAX_TOKENS = 7, 120
_TIMEOUT_S = 240.0
_EXTRA_WORD_ERRORS = 0.15
"""The word error rate that is allowed to Whisper in excess of its rate for the same request without a fault."""
_SAMPLE_TOLERANCE = 1e-3
"""The allowed difference of samples as a fraction of full scale: rounding depends on the batch."""


class SpeechJudge:
    """Judges deliveries. The first delivery of each request is without a fault, and later ones must equal it. If the
    language model wrote another text because of another batch, the audio must say exactly that text, without
    repetitions or omissions.
    """

    def __init__(self, recognize: Recognizer = transcribe) -> None:
        self._recognize = recognize
        self._first: dict[Request, Delivery] = {}
        self._usual: dict[Request, float] = {}
        self.same = self.recognized = 0
        """The number of deliveries by the way in which they were judged."""

    def judge(self, delivery: Delivery) -> Flaws:
        """Returns the flaws of a delivery. For a failed one, only that it failed."""
        if delivery.error:
            return Flaws()
        first = self._first.setdefault(delivery.request, delivery)
        if first is not delivery and _is_same(first, delivery):
            self.same += 1
            return Flaws()
        self.recognized += 1
        rate = self._word_error_rate(delivery)
        usual = self._usual.setdefault(delivery.request, rate)
        return Flaws(altered=1) if rate > usual + _EXTRA_WORD_ERRORS else Flaws()

    def _word_error_rate(self, delivery: Delivery) -> float:
        text = delivery.received("text").decode()
        return word_error_rate(text, self._recognize(_samples(delivery), SAMPLE_RATE_HZ))


def speech_work(judge: SpeechJudge) -> Work:
    """Requests for answers of about a hundred words, which are spoken."""
    return Work(
        [Request(f"Describe a {topic} in a few sentences.", _SEED, _MAX_TOKENS) for topic in TOPICS],
        {"thinker": "text", "acoustic": "audio", "vocoder": "audio"},
        lambda _: {"text": (), "audio": ()},
        judge=judge.judge,
        timeout_s=_TIMEOUT_S,
    )


def _samples(delivery: Delivery) -> npt.NDArray[np.float32]:
    return np.frombuffer(delivery.received("audio"), np.float32)


def _is_same(one: Delivery, other: Delivery) -> bool:
    if one.received("text") != other.received("text"):
        return False
    ours, theirs = _samples(one), _samples(other)
    return ours.shape == theirs.shape and bool(np.allclose(ours, theirs, atol=_SAMPLE_TOLERANCE))
