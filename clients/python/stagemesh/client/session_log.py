"""The client's events in a session: the log of unhandled events, and the unanswered ones."""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeAlias

from stagemesh.client.session_turns import TurnCommitted, TurnInterrupted, TurnTruncated
from stagemesh.common.errors import StagemeshError
from stagemesh.common.requests.turn_content import PromptInput, duration_s, size_of
from stagemesh.v1.orchestrator_pb2 import ConverseRequest, InputAppend

Confirmation: TypeAlias = TurnCommitted | TurnInterrupted | TurnTruncated | None
"""The confirmation of an event. None confirms an event that has no confirmation of its own."""


class PendingEvents:
    """The unanswered events, by number, and the answers for which a method waits."""

    def __init__(self) -> None:
        self._events: dict[int, ConverseRequest] = {}
        self._answers: dict[int, Confirmation | StagemeshError] = {}
        self._awaited = set[int]()
        """The events for whose answers a method waits."""

    def add(self, event: ConverseRequest) -> None:
        """Adds an event that was numbered. Its answer is kept until `take_answer`."""
        self._events[event.seq] = event
        self._awaited.add(event.seq)

    def of_kind(self, kind: str) -> list[ConverseRequest]:
        """Returns the unanswered events of a kind, oldest first. `kind` is the name of a field of ConverseRequest."""
        return [event for event in self._events.values() if event.WhichOneof("event") == kind]

    def resolve(self, number: int, answer: Confirmation | StagemeshError) -> None:
        """Records the answer to an event. Does nothing if the event is answered already."""
        if self._events.pop(number, None) is not None and number in self._awaited:
            self._answers[number] = answer

    def is_answered(self, number: int) -> bool:
        """Returns whether an event is answered."""
        return number in self._answers

    def take_answer(self, number: int) -> Confirmation | StagemeshError:
        """Returns the answer to an event, or None if it has none. No method awaits the event any longer."""
        self._awaited.discard(number)
        return self._answers.pop(number, None)


@dataclass
class _Kept:
    event: ConverseRequest
    size_bytes: int
    """The number of bytes for which the event counts at the current orchestrator."""
    duration_s: float
    """The duration of the event's audio at the current orchestrator."""

    @property
    def piece(self) -> InputAppend | None:
        """The piece that the event appends, or None if it appends none or was withdrawn."""
        return self.event.append if self.event.HasField("append") else None

    def withdraw(self) -> None:
        self.event = ConverseRequest(seq=self.event.seq)


class EventLog:
    """The events of a session after the turns that have ended, numbered without gaps.

    An event that must not have an effect again is withdrawn: it keeps its number and loses its content. The session
    rejects such an event.
    """

    def __init__(self) -> None:
        self._kept: deque[_Kept] = deque()
        self.last = 0
        """The number of the last event."""
        self.accepted = 0
        """The number of the last event that a session has handled, as far as it was reported."""
        self.is_attached = False
        """Whether the current call can send events."""
        self.audio_s = 0.0
        """The duration of the audio that was appended in the session, in seconds."""
        self.restored_at_s = 0.0
        """The time in the audio of the session at which the audio begins that the current orchestrator has received."""
        self._kept_from_s = 0.0
        """The time in the audio of the session at which the kept events begin."""
        self.sent = 0
        """The number of the last event that was sent in the current call."""
        self._sent_bytes = 0
        """The number of bytes of the events up to `sent` that count against the limit."""
        self._limit_bytes = 0

    @property
    def has_unsent(self) -> bool:
        """Whether an event waits to be sent."""
        return self.sent < self.last

    def has_credit(self, piece: InputAppend) -> bool:
        """Returns whether a further piece could be sent now."""
        waiting = sum(each.size_bytes for each in self._after(self.sent))
        return self.is_attached and self._sent_bytes + waiting + size_of(piece) <= self._limit_bytes

    def add(self, event: ConverseRequest) -> int:
        """Numbers an event, adds it, and returns its number."""
        self.last += 1
        event.seq = self.last
        self._kept.append(_Kept(event, size_of(event.append), duration_s(event.append)))
        self.audio_s += self._kept[-1].duration_s
        return self.last

    def next(self) -> ConverseRequest | None:
        """Returns the next event to send, or None if there is none, or if it must wait for credit."""
        if not self.is_attached or not self.has_unsent:
            return None
        kept = self._kept[self.sent + 1 - self._first]
        if kept.size_bytes and self._sent_bytes + kept.size_bytes > self._limit_bytes:
            return None
        self.sent += 1
        self._sent_bytes += kept.size_bytes
        return kept.event

    def grant(self, *, limit_bytes: int, accepted: int) -> None:
        """Records how many bytes the session accepts in total, and which event it has handled last."""
        self._limit_bytes = max(self._limit_bytes, limit_bytes)
        self.accepted = max(self.accepted, accepted)

    def attach(self, *, limit_bytes: int, accepted: int) -> None:
        """Continues after the event `accepted` at an orchestrator that knows the session."""
        self._sent_bytes -= sum(each.size_bytes for each in self._after(accepted) if each.event.seq <= self.sent)
        self.sent, self._limit_bytes, self.is_attached = accepted, limit_bytes, True
        self.accepted = max(self.accepted, accepted)

    def restart(self, *, limit_bytes: int) -> None:
        """Begins with the first kept event at an orchestrator that does not know the session."""
        self.sent, self._sent_bytes, self._limit_bytes = self._first - 1, 0, limit_bytes
        self.restored_at_s, self.is_attached = self._kept_from_s, True
        for each in self._kept:
            if each.piece is None:
                each.size_bytes, each.duration_s = 0, 0.0

    def has_content(self, number: int) -> bool:
        """Returns whether an event is kept and was not withdrawn."""
        is_kept = self._first <= number <= self.last
        return is_kept and self._kept[number - self._first].event.WhichOneof("event") is not None

    def reject(self, number: int) -> InputAppend | None:
        """Withdraws an event that the session has rejected. Returns the piece that it appended, or None."""
        if not self._first <= number <= self.last:
            return None
        kept = self._kept[number - self._first]
        if number <= self.sent:
            self._sent_bytes -= kept.size_bytes
        piece, kept.size_bytes, kept.duration_s = kept.piece, 0, 0.0
        kept.withdraw()
        return piece

    def withdraw(self, number: int) -> None:
        """Withdraws an event that has had its effect. Does nothing if it is not kept."""
        if self._first <= number <= self.last:
            self._kept[number - self._first].withdraw()

    def clear(self, *, after: int, before: int) -> None:
        """Withdraws the pieces whose numbers are between two numbers."""
        for each in self._after(after):
            if each.piece is not None and each.event.seq < before:
                each.withdraw()

    @property
    def kept_s(self) -> float:
        """The duration of the kept audio in seconds."""
        return self.audio_s - self._kept_from_s

    def forget_audio(self, *, before_s: float) -> None:
        """Drops audio that the session has handled and that ends before a time in the audio of the session."""
        at_s = self._kept_from_s
        for kept in self._kept:
            at_s += kept.duration_s
            if at_s > before_s or kept.event.seq > self.accepted:
                break
            if kept.duration_s:
                kept.withdraw()
        while self._kept and self._kept[0].piece is None and self._first <= self.accepted:
            self._pop()

    def end_turn(self, last: int) -> list[InputAppend]:
        """Drops the events up to the number `last`. Returns the pieces among them."""
        pieces = list[InputAppend]()
        while self._kept and self._first <= last:
            pieces += self._pop()
        return pieces

    def end_detected_turn(self, audio_end_s: float) -> list[InputAppend]:
        """Drops the pieces before a time in the audio of the session, and returns them.

        A piece that contains this time is divided. Its rest keeps its number.
        """
        pieces = list[InputAppend]()
        while self._kept and self._kept_from_s + self._kept[0].duration_s <= audio_end_s:
            pieces += self._pop()
        first = self._kept[0] if self._kept else None
        if first is not None and first.piece is not None and self._kept_from_s < audio_end_s:
            head = PromptInput(self._kept_from_s)
            head.append(first.piece)
            rest = head.split(audio_end_s)
            pieces += head.pieces
            first.event = ConverseRequest(seq=first.event.seq, append=rest.pieces[0])
            first.duration_s = rest.ends_s - rest.begins_s
            self._kept_from_s = rest.begins_s
        return pieces

    @property
    def _first(self) -> int:
        return self.last + 1 - len(self._kept)

    def _after(self, number: int) -> Iterator[_Kept]:
        return (self._kept[index] for index in range(max(0, number + 1 - self._first), len(self._kept)))

    def _pop(self) -> list[InputAppend]:
        kept = self._kept.popleft()
        self._kept_from_s += kept.duration_s
        return [] if kept.piece is None else [kept.piece]
