"""The events of a session, in addition to those of the requests that answer its turns."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from stagemesh.client.responses import Event
from stagemesh.common.errors import StagemeshError


@dataclass(frozen=True)
class SessionOpened:
    """The first event: the session is open. `outputs` are the outputs of every turn."""

    session_id: str
    seed: int
    """The seed of the first turn. Each further turn has the next seed."""
    outputs: Sequence[str]
    transcript_output: str
    """The output whose text is the answer in the transcript. Empty if the pipeline has none."""


@dataclass(frozen=True)
class SpeechDetected:
    """An event: the detection of turns has found speech, or its end."""

    turn: int
    begins: bool
    """Whether speech begins. If it is False, speech ends."""
    at_s: float
    """The time in the audio of the session, in seconds."""


@dataclass(frozen=True)
class TurnCommitted:
    """An event: the input of a turn is complete."""

    turn: int
    detected: bool
    """Whether the detection of turns has committed the turn."""
    audio_end_s: float
    """The time in the audio of the session at which a detected turn ends. Later audio belongs to the next turn."""


@dataclass(frozen=True)
class TurnInterrupted:
    """An event: the answer to a turn was stopped. No output of the turn follows."""

    turn: int
    detected: bool
    """Whether speech of the user has interrupted the answer."""
    positions: Mapping[str, int]
    """How much of each output was sent: code points, tokens, samples, images, bytes, files or rows."""


@dataclass(frozen=True)
class TurnEnded:
    """An event: a turn has ended. An interrupted turn ends without an error."""

    turn: int
    answer: str
    """The answer in the transcript. Empty if the pipeline has no text output."""
    error: StagemeshError | None
    """The error of the turn's request, or None if it succeeded or was interrupted."""


@dataclass(frozen=True)
class TurnTruncated:
    """An event: the answer to a turn was shortened in the transcript to what the user has heard."""

    turn: int
    answer: str
    """The answer in the transcript from now on."""


SessionEvent: TypeAlias = (
    Event | SessionOpened | SpeechDetected | TurnCommitted | TurnInterrupted | TurnEnded | TurnTruncated
)
