"""The events of a session, and its turns at the client: answers as far as received, transcripts of ended turns."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeAlias

from stagemesh.client.received_events import ClientPosition
from stagemesh.client.requests import check_size
from stagemesh.client.responses import AudioChunk, Event, Text
from stagemesh.client.retries import RetryPolicy
from stagemesh.common.errors import StagemeshError
from stagemesh.common.requests.output_position import length_of, text_until
from stagemesh.common.requests.turn_content import PromptInput, shorten
from stagemesh.v1 import request_pb2
from stagemesh.v1.orchestrator_pb2 import ConverseRequest, ConverseResponse, GenerateRequest, InputAppend, TurnRestore


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
    """Whether the user's speech has interrupted the answer."""
    positions: Mapping[str, int]
    """How much of each output was sent: bytes of a text or a file, tokens, samples, images, files or rows."""


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


class Delivery(NamedTuple):
    """An event that waits for the program, and the response that contained it.

    `event` is None if the response is only a part of an event. `response` is None if an earlier delivery has it.
    """

    response: ConverseResponse | None
    event: SessionEvent | None
    turn: int = 0
    """The turn to whose answer the event belongs, or 0."""
    output: str = ""
    end: int = 0
    """The position in the output that the program has reached with this event."""


class ReceivedTurn:
    """The answer to a turn. Drops the events that arrive again."""

    def __init__(self, number: int, policy: RetryPolicy) -> None:
        self.number = number
        self.last_event = 0
        """The number of the client's event that ended the input of the turn. 0 if it is open, or was detected."""
        self.audio_end_s: float | None = None
        """The time in the audio of the session at which the turn ends, if it was detected."""
        self.is_stopped = False
        """Whether the answer was interrupted."""
        self.heard: dict[str, int] = {}
        """How much of each output the program has read, by name."""
        self.audio: tuple[str, int] | None = None
        """The name and the sample rate of the first audio output. None if none has arrived."""
        self._texts: dict[str, str] = {}
        self.position = ClientPosition(GenerateRequest(), policy)
        """The outputs that have arrived. Its request has their positions and their generation for an orchestrator."""

    @property
    def received(self) -> Mapping[str, int]:
        """How much of each output has arrived, by name."""
        return {each.name: each.position for each in self.position.request().next_positions}

    def text(self, output: str) -> str:
        """Returns the text of an output that has arrived."""
        return self._texts.get(output, "")

    def take(self, response: ConverseResponse) -> Iterator[Delivery]:
        """Yields the events of the answer in `response` that have not arrived before."""
        rest = self.position.remainder(response.generated)
        if rest is None:
            return
        events = self.position.events(rest)
        if not events and not rest.HasField("output"):
            return
        output, end = rest.output.name, rest.output.position + length_of(rest.output)
        new = response if rest is response.generated else ConverseResponse(turn=self.number, generated=rest)
        for index, event in enumerate(events or (None,)):
            yield Delivery(None if index else new, self._noted(event), self.number, output, end)

    def _noted(self, event: Event | None) -> Event | None:
        match event:
            case Text():
                self._texts[event.output] = self.text(event.output) + event.delta
            case AudioChunk() if self.audio is None:
                self.audio = event.output, event.sample_rate_hz
            case _:
                pass
        return None if event is None else replace(event, turn=self.number)


class ClientTranscript:
    """The turns that have ended: the messages of the input of each, then the answer.

    `has_prompts` is whether the pieces become messages. Streamed input does not.
    """

    def __init__(self, *, has_prompts: bool) -> None:
        self._has_prompts = has_prompts
        self._turns: list[TurnRestore] = []

    @property
    def answer(self) -> str:
        """The answer to the newest turn. Empty if no turn has ended."""
        return self._turns[-1].messages[-1].content if self._turns else ""

    @answer.setter
    def answer(self, text: str) -> None:
        self._turns[-1].messages[-1].content = text

    def add(self, turn: int, pieces: Sequence[InputAppend], *, answer: str) -> None:
        """Adds the newest turn."""
        restore = TurnRestore(turn=turn)
        if self._has_prompts:
            prompt = PromptInput()
            for piece in pieces:
                prompt.append(piece)
            restore.messages.extend(prompt.messages())
        restore.messages.add(role=request_pb2.ROLE_ASSISTANT, content=answer)
        self._turns.append(restore)

    def shortened(self, positions: Mapping[str, int], *, output: str, sent: Mapping[str, int]) -> str:
        """Returns the newest answer up to the first position in `positions`, as an orchestrator shortens it.

        `output` is the output whose text is the answer. `sent` is how much of each output was sent.
        """
        if output in positions:
            return text_until(self.answer, positions[output])
        shares = (position / sent[name] for name, position in positions.items() if sent.get(name))
        return shorten(self.answer, length=round(len(self.answer) * min(1.0, next(shares, 1.0))))

    def events(self) -> Iterator[ConverseRequest]:
        """Yields the events that restore all turns. Raises InvalidRequestError if a turn is too large for a message."""
        for turn in self._turns:
            event = ConverseRequest(restore=turn)
            check_size(event, what="turn to restore")
            yield event
