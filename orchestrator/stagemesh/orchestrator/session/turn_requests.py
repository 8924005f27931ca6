"""The requests that answer the turns of sessions, and the answers that clients have received from them."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol, TypeAlias

from stagemesh.common.errors import StagemeshError
from stagemesh.common.requests.output_position import OutputKey, length_of
from stagemesh.orchestrator.request.lifecycle import RequestLifecycle, RequestRegistry, fingerprint
from stagemesh.orchestrator.request.output_record import RequestRecord
from stagemesh.orchestrator.request.streamed_input import StreamedInput
from stagemesh.orchestrator.request.validation import ValidRequest, first_attempt, validate
from stagemesh.pipeline import Pipeline
from stagemesh.pipeline.graph import SPEECH
from stagemesh.v1 import orchestrator_pb2, request_pb2

Task: TypeAlias = "asyncio.Task[None]"
Spawn: TypeAlias = Callable[[Coroutine[object, object, None]], Task]
"""Starts a task."""


class RunningRequest(Protocol):
    """The request of a turn: a `RequestLifecycle` or an `EndedRequest`."""

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
        """Returns the text of an output as far as it was produced, or its first `length` bytes in UTF-8.

        Omits a character that is cut. Returns an empty text if `output` is empty.
        """
        outputs = (
            orchestrator_pb2.GenerateResponse.FromString(event).output for event in self.request.record.journal.items
        )
        text = "".join(each.text for each in outputs if output and each.name == output)
        return text.encode()[:length].decode(errors="ignore")


@dataclass(frozen=True)
class TurnRequest:
    """The request of a turn."""

    message: orchestrator_pb2.GenerateRequest
    stream: StreamedInput | None = None
    """The input that the client streams, or None if `message` contains it."""
    preferred: Mapping[str, str] = field(default_factory=dict[str, str])
    """The replicas of the former turn, by stage name."""
    time_left_s: float | None = None


class StartRequest(Protocol):
    """The method `Orchestrator.start`."""

    def __call__(self, request: ValidRequest, *, content: bytes, time_left_s: float | None) -> RequestLifecycle: ...


class TurnRequests:
    """Runs the requests of turns with an orchestrator's method `start`. `requests` are the requests that it knows."""

    def __init__(self, pipeline: Pipeline, requests: RequestRegistry, start: StartRequest) -> None:
        self._pipeline, self._requests, self._start = pipeline, requests, start

    def check(self, request: orchestrator_pb2.GenerateRequest) -> None:
        """Raises an error if the pipeline cannot run a request with this input."""
        validate(request, self._pipeline)

    def start(self, turn: TurnRequest) -> RunningRequest:
        """Starts the request of a turn, or returns the request with the same id and content.

        Raises an error if the request is invalid, if admission rejects it, or if the orchestrator does not run.
        """
        message = turn.message
        valid = replace(validate(message, self._pipeline, stream=turn.stream), preferred=turn.preferred)
        content = fingerprint(message)
        if turn.stream is not None:
            # The content of streamed input is not known in advance, so that requests with the same id may differ.
            self._requests.discard_ended(message.request_id, caller=message.caller)
        elif (known := self._requests.find_same(message.request_id, content)) is not None:
            return known
        return self._start(valid, content=content, time_left_s=turn.time_left_s)

    def listen(self, turn: TurnRequest, detection: orchestrator_pb2.TurnDetection) -> RunningRequest:
        """Starts a request that finds speech in streamed audio. `turn.message` has an id, a caller and a priority."""
        message, speech = turn.message, self._pipeline.speech
        assert speech is not None, "the session's settings are checked"
        parameters = request_pb2.Parameters(seed=message.parameters.seed)
        for name, value in detection.options.items():
            parameters.stages[speech.stage].options[name].CopyFrom(value)
        valid = ValidRequest(
            request_id=message.request_id,
            input=request_pb2.Input(),
            parameters=parameters,
            outputs=(SPEECH,),
            priority=message.priority,
            caller=message.caller,
            first_attempt=first_attempt(message.earlier_calls),
            stream=turn.stream,
            preferred=turn.preferred,
        )
        self._requests.discard_ended(message.request_id, caller=message.caller)
        return self._start(valid, content=b"", time_left_s=turn.time_left_s)

    def find(self, request_id: str) -> RunningRequest | None:
        """Returns the request with this id, or None if it is not known any longer."""
        return self._requests.find(request_id)
