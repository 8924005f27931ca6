"""Runs the turns of sessions as requests of the orchestrator."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol

from stagemesh.orchestrator.request.lifecycle import RequestLifecycle, RequestRegistry, fingerprint
from stagemesh.orchestrator.request.streamed_input import StreamedInput
from stagemesh.orchestrator.request.validation import ValidRequest, first_attempt, validate
from stagemesh.orchestrator.session.answer import RunningRequest
from stagemesh.orchestrator.spec import Pipeline
from stagemesh.orchestrator.spec.model import SPEECH
from stagemesh.v1 import orchestrator_pb2, request_pb2


@dataclass(frozen=True)
class TurnRequest:
    """The request of a turn."""

    message: orchestrator_pb2.GenerateRequest
    stream: StreamedInput | None = None
    """The input that the client streams, or None if `message` contains it."""
    preferred: Mapping[str, str] = field(default_factory=dict[str, str])
    """The replicas of the former turn, by stage name."""
    time_left_s: float | None = None


class Runner(Protocol):
    """Runs the requests of turns. `TurnRequests` implements this protocol."""

    def check(self, request: orchestrator_pb2.GenerateRequest) -> None:
        """Raises an error if the pipeline cannot run a request with this input."""
        ...

    def start(self, turn: TurnRequest) -> RunningRequest:
        """Starts the request of a turn, or returns the request with the same id and content.

        Raises an error if the request is invalid, if admission rejects it, or if the orchestrator does not run.
        """
        ...

    def listen(self, turn: TurnRequest, detection: orchestrator_pb2.TurnDetection) -> RunningRequest:
        """Starts a request that finds speech in streamed audio. `turn.message` has an id, a caller and a priority."""
        ...

    def find(self, request_id: str) -> RunningRequest | None:
        """Returns the request with this id, or None if it is not known any longer."""
        ...


class StartRequest(Protocol):
    """The method `Orchestrator.start`."""

    def __call__(self, request: ValidRequest, *, content: bytes, time_left_s: float | None) -> RequestLifecycle: ...


class TurnRequests:
    """A `Runner` that starts requests by an orchestrator's method `start`. `requests` are the requests it knows."""

    def __init__(self, pipeline: Pipeline, requests: RequestRegistry, start: StartRequest) -> None:
        self._pipeline, self._requests, self._start = pipeline, requests, start

    def check(self, request: orchestrator_pb2.GenerateRequest) -> None:
        validate(request, self._pipeline)

    def start(self, turn: TurnRequest) -> RunningRequest:
        message = turn.message
        valid = replace(validate(message, self._pipeline, stream=turn.stream), preferred=turn.preferred)
        content = fingerprint(message)
        if turn.stream is not None:
            # The content of streamed input is not known in advance, so that requests with the same id may differ.
            self._requests.discard_ended(message.request_id)
        elif (known := self._requests.find_same(message.request_id, content)) is not None:
            return known
        return self._start(valid, content=content, time_left_s=turn.time_left_s)

    def listen(self, turn: TurnRequest, detection: orchestrator_pb2.TurnDetection) -> RunningRequest:
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
        self._requests.discard_ended(message.request_id)
        return self._start(valid, content=b"", time_left_s=turn.time_left_s)

    def find(self, request_id: str) -> RunningRequest | None:
        return self._requests.find(request_id)
