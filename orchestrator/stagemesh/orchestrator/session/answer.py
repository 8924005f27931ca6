"""The answer to one turn of a session: its request, and the part of it that the client has received."""

import asyncio
from collections.abc import AsyncGenerator, Mapping
from typing import Protocol

from stagemesh.common.errors import StagemeshError
from stagemesh.common.output_position import OutputKey, length_of
from stagemesh.orchestrator.request.output_record import RequestRecord
from stagemesh.v1 import orchestrator_pb2


class RunningRequest(Protocol):
    """The request of a turn. `RequestLifecycle` implements this protocol."""

    record: RequestRecord
    ended: asyncio.Future[None]
    """A future that is done when every stage has released the request. Wait for it with `asyncio.wait`."""

    def stop(self, error: StagemeshError) -> None:
        """Stops the request. The request then fails with `error`. Does nothing if it has ended."""
        ...


class EndedRequest:
    """The request of a turn that was not started: it has no output, and `error` as its result."""

    def __init__(self, error: StagemeshError | None = None) -> None:
        self.record = RequestRecord()
        self.record.timeline.end(error)
        self.record.close(error)
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.ended.set_result(None)

    def stop(self, error: StagemeshError) -> None:
        """Does nothing, because the request has ended."""


class Answer:
    """The answer to a turn.

    `turn` is the number of the turn. `messages` are the messages of its input, as a serialized Conversation.
    """

    __slots__ = ("_positions", "_sent", "error", "is_committed", "is_over", "messages", "request", "turn")

    def __init__(self, turn: int, request: RunningRequest, *, messages: bytes = b"") -> None:
        self.turn, self.request, self.messages = turn, request, messages
        self.is_committed = False
        """Whether the turn's input is complete."""
        self.is_over = False
        """Whether the request has ended, and the attached client has been sent everything.

        The turn then ends when it is committed.
        """
        self.error: StagemeshError | None = None
        """The error of the request, if it is over and has failed."""
        self._positions: Mapping[OutputKey, int] = {}
        self._sent: list[bytes] = []
        """The events that were sent to the client after `_positions`. The record contains the same objects."""

    @property
    def replicas(self) -> Mapping[str, str]:
        """The name of the replica that each stage used last, by stage name."""
        return {notes.stage: notes.replica for notes in self.request.record.timeline.steps}

    def follow(self, positions: Mapping[OutputKey, int], *, linger_s: int) -> AsyncGenerator[bytes]:
        """Returns an iterator over the events of the request, each as a serialized GenerateResponse.

        Omits outputs before `positions`. Start to iterate immediately, and iterate within `aclosing`. The request is
        stopped `linger_s` seconds after the iteration has stopped, unless it is followed again. The iterator raises the
        error of a failed request.
        """
        self._positions, self._sent = positions, []
        self.request.record.expect(linger_s=linger_s)
        return self.request.record.follow(next_positions=positions)

    def note_sent(self, event: bytes) -> None:
        """Records that an event of the request was sent to the client."""
        self._sent.append(event)

    def sent_positions(self) -> dict[str, int]:
        """Returns how much of each output was sent to the client, by name, in the unit of Output.position."""
        sent = {name: position for (name, _), position in self._positions.items()}
        for event in self._sent:
            output = orchestrator_pb2.GenerateResponse.FromString(event).output
            if output.name:
                sent[output.name] = max(sent.get(output.name, 0), output.position + length_of(output))
        return sent

    def made_positions(self) -> dict[str, int]:
        """Returns how much of each output the request has produced, by name."""
        return {name: position for (name, _), position in self.request.record.position.counts.items()}

    def text(self, output: str, *, length: int | None = None) -> str:
        """Returns the text of an output as far as it was produced, or its first `length` characters.

        Returns an empty text if `output` is empty.
        """
        outputs = (
            orchestrator_pb2.GenerateResponse.FromString(event).output for event in self.request.record.journal.items
        )
        return "".join(each.text for each in outputs if output and each.name == output)[:length]
