"""The real speech pipeline as a soak's work: what is said is judged by the run without a fault, and by ear."""

from collections.abc import Callable
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from stagemesh.services.models.hibari import SAMPLE_RATE_HZ
from tests.soak.delivery import Delivery, Flaws
from tests.soak.work import Work
from tests.soak.workload import Request
from tests.speech.whisper import transcribe, word_error_rate

Hearing: TypeAlias = Callable[[npt.NDArray[np.float32], int], str]
"""The words in samples of a rate."""

TOPICS = ("river", "castle", "garden", "mountain", "kitchen", "library")
_SEED, _MAX_TOKENS = 7, 40
_TIMEOUT_S = 240.0
_HEARING = 0.15
"""A word error rate by which Whisper may mishear, over what it makes of the same request without a fault."""
_NEXT_TO_NOTHING = 1e-3
"""Of full scale: rounding, where batches differ."""


class Ears:
    """Judges deliveries: the first of each request is without a fault, and the later ones are to be as that one.

    Where another batch had the language model write something else, what is heard must be what it wrote: nothing of it
    twice, nothing missing, and nothing that was written before a fault and not after it.
    """

    def __init__(self, hear: Hearing = transcribe) -> None:
        self._hear = hear
        self._first: dict[Request, Delivery] = {}
        self._usual: dict[Request, float] = {}
        self.same = self.by_ear = 0
        """How many were judged by which."""

    def judge(self, delivery: Delivery) -> Flaws:
        """What is wrong with a delivery; of one that failed only that it did."""
        if delivery.error:
            return Flaws()
        first = self._first.setdefault(delivery.request, delivery)
        if first is not delivery and _is_same(first, delivery):
            self.same += 1
            return Flaws()
        self.by_ear += 1
        rate = self._misheard(delivery)
        usual = self._usual.setdefault(delivery.request, rate)
        return Flaws(altered=1) if rate > usual + _HEARING else Flaws()

    def _misheard(self, delivery: Delivery) -> float:
        said = delivery.received("text").decode()
        return word_error_rate(said, self._hear(_samples(delivery), SAMPLE_RATE_HZ))


def speech_work(ears: Ears) -> Work:
    """Short answers, read aloud."""
    return Work(
        [Request(f"Describe a {topic} in one sentence.", _SEED, _MAX_TOKENS) for topic in TOPICS],
        {"thinker": "text", "acoustic": "audio", "vocoder": "audio"},
        lambda _: {"text": (), "audio": ()},
        judge=ears.judge,
        timeout_s=_TIMEOUT_S,
    )


def _samples(delivery: Delivery) -> npt.NDArray[np.float32]:
    return np.frombuffer(delivery.received("audio"), np.float32)


def _is_same(one: Delivery, other: Delivery) -> bool:
    if one.received("text") != other.received("text"):
        return False
    ours, theirs = _samples(one), _samples(other)
    return ours.shape == theirs.shape and bool(np.allclose(ours, theirs, atol=_NEXT_TO_NOTHING))
