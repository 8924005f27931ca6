"""Responses of scripted sessions."""

from collections.abc import Mapping
from typing import Any

from stagemesh.common.errors import StagemeshError
from stagemesh.rpc.error_mapping import error_to_wire
from stagemesh.v1 import orchestrator_pb2
from stagemesh.v1.orchestrator_pb2 import ConverseRequest, ConverseResponse, GenerateResponse
from stagemesh.v1.request_pb2 import Output

MIB = 1 << 20


def opened(*, known: bool = False, accepted: int = 0, turn: int = 1, limit: int = MIB) -> ConverseResponse:
    """Returns the first response of a call."""
    message = orchestrator_pb2.SessionOpened(
        session_id="s",
        is_known=known,
        accepted_seq=accepted,
        turn=turn,
        input_limit_bytes=limit,
        outputs=["text", "audio"],
        seed=7,
        transcript_output="text",
    )
    return ConverseResponse(opened=message)


def granted(limit: int = MIB, *, accepted: int = 0) -> ConverseResponse:
    """Returns a grant of credit."""
    return ConverseResponse(grant=orchestrator_pb2.InputGrant(input_limit_bytes=limit, accepted_seq=accepted))


def rejected(seq: int, error: StagemeshError) -> ConverseResponse:
    """Returns the rejection of an event."""
    return ConverseResponse(rejected=orchestrator_pb2.EventRejected(seq=seq, error=error_to_wire(error)))


def committed(turn: int, *, audio_end_s: float | None = None) -> ConverseResponse:
    """Returns the confirmation of a commit, or of a turn that was detected."""
    message = orchestrator_pb2.TurnCommitted(detected=audio_end_s is not None, audio_end_s=audio_end_s or 0.0)
    return ConverseResponse(turn=turn, committed=message)


def speech(turn: int, *, begins: bool, at_s: float) -> ConverseResponse:
    """Returns a begin or an end of speech."""
    return ConverseResponse(turn=turn, speech=orchestrator_pb2.SpeechDetected(begins=begins, at_s=at_s))


def detected(turn: int, begin_s: float, end_s: float) -> list[ConverseResponse]:
    """Returns the responses to a turn that is detected in this time of the input, and has no answer."""
    bounds = [speech(turn, begins=True, at_s=begin_s), speech(turn, begins=False, at_s=end_s)]
    return [*bounds, committed(turn, audio_end_s=end_s), turn_ended(turn)]


def generated(turn: int, event: GenerateResponse) -> ConverseResponse:
    """Returns an event of the request of a turn."""
    return ConverseResponse(turn=turn, generated=event)


def text(turn: int, delta: str, *, position: int = 0) -> ConverseResponse:
    """Returns a part of the text output of a turn."""
    return generated(turn, GenerateResponse(output=Output(name="text", text=delta, position=position)))


def interrupted(turn: int, *, detected: bool = False, **positions: int) -> ConverseResponse:
    """Returns the confirmation of an interruption."""
    message = orchestrator_pb2.TurnInterrupted(detected=detected)
    for name, position in positions.items():
        message.positions.add(name=name, position=position)
    return ConverseResponse(turn=turn, interrupted=message)


def turn_ended(turn: int, answer: str = "", error: StagemeshError | None = None) -> ConverseResponse:
    """Returns the end of a turn."""
    message = orchestrator_pb2.TurnEnded(answer=answer, error=None if error is None else error_to_wire(error))
    return ConverseResponse(turn=turn, ended=message)


def truncated(turn: int, answer: str) -> ConverseResponse:
    """Returns the confirmation of a truncation."""
    return ConverseResponse(turn=turn, truncated=orchestrator_pb2.TurnTruncated(answer=answer))


def kinds(events: list[ConverseRequest]) -> list[str | None]:
    """Returns the kinds of the events of a call."""
    return [event.WhichOneof("event") for event in events]


def numbered(events: list[ConverseRequest]) -> Mapping[int, str | None]:
    """Returns the kinds of the numbered events of a call, by number."""
    return {event.seq: event.WhichOneof("event") for event in events if event.seq}


def texts(events: list[ConverseRequest]) -> list[str]:
    """Returns the texts of the pieces of a call."""
    return [event.append.part.text for event in events if event.HasField("append")]


def positions(event: ConverseRequest) -> dict[str, Any]:
    """Returns the positions with which a call attaches."""
    return {each.name: each.position for each in event.open.next_positions}
