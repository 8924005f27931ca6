"""The events of a client that the session has neither confirmed nor rejected, and the methods that wait for them."""

from typing import TypeAlias

from stagemesh.client.sessions.events import TurnCommitted, TurnInterrupted, TurnTruncated
from stagemesh.common.errors import StagemeshError
from stagemesh.v1.orchestrator_pb2 import ConverseRequest

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
