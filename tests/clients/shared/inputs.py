"""The inputs of clients in Python: a question, a tool, a schema of the answer, and a sound."""

import io
import wave

from pydantic import BaseModel

QUESTION = "What time is it?"


class Clock(BaseModel):
    """The time in a zone."""

    zone: str


def read_clock(zone: str) -> str:
    """Returns the time in a zone."""
    return f"12:00 in {zone}"


def silence() -> bytes:
    """Returns a second of silence as a WAV file."""
    file = io.BytesIO()
    with wave.open(file, "wb") as sound:
        sound.setparams((1, 2, 16_000, 0, "NONE", ""))
        sound.writeframes(bytes(32_000))
    return file.getvalue()
