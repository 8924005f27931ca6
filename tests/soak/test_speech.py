"""The real speech pipeline with two replicas of each stage, whose processes are killed and partitioned under load."""

from collections.abc import Callable
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import pytest

from stagemesh.client.responses import Admitted, AudioChunk, Finished, Text, Timings
from stagemesh.services.models.hibari import SAMPLE_RATE_HZ
from tests.deployment import deployed
from tests.soak.delivery import Delivery, Flaws
from tests.soak.faults import FaultKind
from tests.soak.footprint import shared_memory
from tests.soak.soak import Plan, soak_deployment
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


KINDS = tuple(kind for kind in FaultKind if not kind.is_of_orchestrator)
HITS = 20
"""The number of requests that each kind of fault interrupts while they are spoken."""
LOAD_S = 400.0


REQUEST = Request("hello", seed=1, steps=4)
SAID = "the river runs from the hills to the sea"


def _delivery(text: str, *, sound: float = 0.5) -> Delivery:
    delivery = Delivery(REQUEST, {"text": (), "audio": ()})
    delivery.add(Admitted("r", 1, ({},)))
    delivery.add(Text("text", text))
    delivery.add(AudioChunk("audio", np.full(8, sound, np.float32), 24_000))
    delivery.add(Finished(({},), Timings(0.0, None, 0.0)))
    return delivery


def _judge(words: dict[float, str]) -> SpeechJudge:
    """A fake speech recognizer that returns given words."""

    def recognize(samples: npt.NDArray[np.float32], sample_rate_hz: int) -> str:
        return words[round(float(samples[0]), 3)]

    return SpeechJudge(recognize)


def test_unchanged_audio_needs_no_speech_recognition() -> None:
    judge = _judge({0.5: SAID})
    assert [judge.judge(_delivery(SAID)) for _ in range(3)] == [Flaws()] * 3
    assert (judge.same, judge.recognized) == (2, 1)


def test_changed_audio_is_right_if_it_says_the_changed_text() -> None:
    judge = _judge({0.5: SAID, 0.25: "a river is water"})
    judge.judge(_delivery(SAID))
    assert judge.judge(_delivery("A river is water.", sound=0.25)) == Flaws()


@pytest.mark.parametrize("recognized", [f"{SAID} to the sea", "the river runs from", "a river is water that runs"])
def test_repeated_missing_or_wrong_words_are_found(recognized: str) -> None:
    judge = _judge({0.5: SAID, 0.25: recognized})
    judge.judge(_delivery(SAID))
    assert judge.judge(_delivery(SAID, sound=0.25)) == Flaws(altered=1)


@pytest.mark.soak
@pytest.mark.speech
@pytest.mark.timeout(4000)
async def test_nothing_is_spoken_twice_or_left_out() -> None:
    before, judge = shared_memory(), SpeechJudge()
    with deployed("speech", "--set", "stages.*.replicas=2", ready_s=LOAD_S) as up:
        # Some of the requests that are hit end before their client receives more.
        plan = Plan(kinds=KINDS, seed=3, hits=HITS + 5, faults_s=3000, clients=2, load_s=LOAD_S, most_at_once=3)
        report = await soak_deployment(up, plan, work=speech_work(judge))
    print(report.summary())
    print(f"{judge.same} as without a fault, {judge.recognized} by speech recognition")
    print(*report.timelines.values(), sep="\n")
    assert report.problems() == []
    hits = {kind.value: len(report.pause_s.get(kind.value, ())) for kind in KINDS}
    assert min(hits.values()) >= HITS, hits
    # vLLM kills an engine core that does not end in time, which leaves a semaphore of 32 bytes.
    left = {name for name in shared_memory() - before if not name.startswith("sem.loky-")}
    assert not left
