"""The settings of a session, which its first event determines."""

import math
import re
import uuid
from collections.abc import Collection
from dataclasses import dataclass

from stagemesh.common.errors import InvalidRequestError, OverloadedError, UnsupportedError
from stagemesh.common.requests.request_checks import check_options, read_options
from stagemesh.common.wire.encoding import digest_of, without_fields
from stagemesh.orchestrator.request.streamed_input import StreamedInput
from stagemesh.orchestrator.request.validation import ValidRequest, check_pipeline, validate
from stagemesh.pipeline import Pipeline
from stagemesh.v1 import orchestrator_pb2, request_pb2

_SESSION_ID = re.compile(r"[A-Za-z0-9._:-]{1,96}")
# The fields that may differ between the calls of a session. A client that attaches again may set the seed that was
# chosen for its first call.
_CHANGING = ("linger_s", "earlier_calls", "turn", "next_positions", "generation", "parameters.seed")


@dataclass(frozen=True, slots=True)
class SessionSettings:
    """The settings that all turns of a session have in common."""

    session_id: str
    fingerprint: bytes
    """A digest of the content of SessionOpen. All calls of the session must have the same."""
    request: orchestrator_pb2.GenerateRequest
    """The request of a turn without id and input. Its seed is that of the first turn."""
    streams: bool
    """Whether each piece of the input goes to the stages at once (STREAM). Otherwise it becomes a prompt (PROMPT)."""
    input_tensors: frozenset[str]
    """The kinds of input that the client may stream, as names of tensors. Empty in the mode PROMPT."""
    conversation: bytes
    """The conversation before the first turn, serialized."""
    turn_timeout_s: float | None
    """The time limit of a turn's request in seconds. None for the orchestrator's own limit."""
    transcript_output: str
    """The output whose text is the answer in the transcript. Empty if there is none."""
    detection: orchestrator_pb2.TurnDetection | None
    """How the ends of turns are detected. None if only the client ends turns."""

    @property
    def seed(self) -> int:
        """The seed of the first turn."""
        return self.request.parameters.seed

    @property
    def has_transcript(self) -> bool:
        """Whether the prompt of a turn contains the turns before it."""
        return not (self.streams or (self.detection is not None and self.detection.detects_only))


def read_settings(opening: orchestrator_pb2.SessionOpen, pipeline: Pipeline) -> SessionSettings:
    """Checks the first event of a call, and returns the session's settings with default values added.

    Raises an error if the pipeline cannot run the session's turns, as `validate` does for a request.
    """
    check_pipeline(opening.pipeline, pipeline)
    streams = _streams(opening)
    _check_limits(opening, pipeline)
    valid = _valid_turn(opening, pipeline, streams=streams)
    detection = opening.turn_detection if opening.HasField("turn_detection") else None
    if detection is not None:
        _check_detection(detection, pipeline, streams=streams)
    output = _transcript_output(valid, pipeline)
    outputs = valid.outputs if streams or not output else dict.fromkeys((*valid.outputs, output))
    return SessionSettings(
        session_id=opening.session_id or uuid.uuid4().hex,
        fingerprint=digest_of(without_fields(opening, *_CHANGING)),
        request=orchestrator_pb2.GenerateRequest(
            parameters=valid.parameters, outputs=outputs, priority=opening.priority, caller=opening.caller
        ),
        streams=streams,
        input_tensors=pipeline.route(valid.outputs, valid.facts).input_tensors,
        conversation=opening.conversation.SerializeToString(),
        turn_timeout_s=opening.turn_timeout_s or None,
        transcript_output=output if output in outputs else "",
        detection=detection,
    )


def _streams(opening: orchestrator_pb2.SessionOpen) -> bool:
    match opening.input_mode:
        case orchestrator_pb2.INPUT_MODE_UNSPECIFIED | orchestrator_pb2.INPUT_MODE_PROMPT:
            return False
        case orchestrator_pb2.INPUT_MODE_STREAM if opening.HasField("conversation"):
            raise UnsupportedError(
                "streamed input has no prompt to which a conversation belongs; omit it, or use the input mode PROMPT"
            )
        case orchestrator_pb2.INPUT_MODE_STREAM:
            return True
        case mode:
            raise UnsupportedError(f"input mode {mode} is unknown; use PROMPT or STREAM, or upgrade the orchestrator")


def _check_limits(opening: orchestrator_pb2.SessionOpen, pipeline: Pipeline) -> None:
    if opening.session_id and not _SESSION_ID.fullmatch(opening.session_id):
        raise InvalidRequestError(
            f"session_id is {opening.session_id[:100]!r}; use 1 to 96 letters, digits, '.', '_', ':' and '-'",
            reason="INVALID_ID",
        )
    if opening.parameters.choices > 1:
        raise InvalidRequestError(
            f"choices is {opening.parameters.choices}; a turn has one answer, so omit it, or use Generate",
            reason="INVALID_CHOICES",
            metadata={"max_choices": "1"},
        )
    if not (math.isfinite(opening.turn_timeout_s) and opening.turn_timeout_s >= 0):
        raise InvalidRequestError(f"turn_timeout_s is {opening.turn_timeout_s}; use seconds, or 0 for the longest time")
    if (size_bytes := opening.conversation.ByteSize()) > pipeline.limits.max_session_bytes:
        raise OverloadedError(
            f"the conversation has {size_bytes:,} bytes; a session may have {pipeline.limits.max_session_bytes:,} "
            "(limits.max_session_bytes)",
            reason="SESSION_TOO_LARGE",
        )


def _valid_turn(opening: orchestrator_pb2.SessionOpen, pipeline: Pipeline, *, streams: bool) -> ValidRequest:
    """Validates the session's settings by a turn with a short text."""
    request = orchestrator_pb2.GenerateRequest(
        parameters=opening.parameters,
        outputs=opening.outputs,
        priority=opening.priority,
        caller=opening.caller,
        next_positions=opening.next_positions,
        earlier_calls=opening.earlier_calls,
    )
    if streams:
        return validate(request, pipeline, stream=StreamedInput())
    request.input.conversation.CopyFrom(opening.conversation)
    request.input.conversation.messages.add(role=request_pb2.ROLE_USER, content="text")
    return validate(request, pipeline)


def _check_detection(detection: orchestrator_pb2.TurnDetection, pipeline: Pipeline, *, streams: bool) -> None:
    if detection.detects_only and streams:
        raise UnsupportedError("turn_detection.detects_only answers no turn; use the input mode PROMPT with it")
    if pipeline.speech is None:
        raise UnsupportedError(
            f"pipeline {pipeline.name!r} has no stage that detects turns; omit turn_detection, or name one in the "
            "pipeline file (sessions.turn_detection)"
        )
    stage = pipeline.stages[pipeline.speech.stage]
    check_options(read_options(detection.options), stage.signature.options, owner=f"stage {stage.name!r}")


def _transcript_output(turn: ValidRequest, pipeline: Pipeline) -> str:
    """Returns the name of the text output that is the answer, or an empty string if there is none.

    Considers only outputs of stages that the turn runs. Prefers those that the client wants, then those of the main
    stage.
    """
    running: Collection[str] = {stage.name for stage in pipeline.route(turn.outputs, turn.facts).stages}
    texts = [
        output
        for output in pipeline.outputs.values()
        if output.kind == "text" and not output.file_type and output.stage in running
    ]
    texts.sort(key=lambda output: (output.name not in turn.outputs, not pipeline.stages[output.stage].is_main))
    return texts[0].name if texts else ""
