"""The events of a session for its client, as serialized ConverseResponse messages."""

from typing import Any

from stagemesh.v1 import orchestrator_pb2

_LENGTH_DELIMITED = 2
_GENERATED_TAG = orchestrator_pb2.ConverseResponse.GENERATED_FIELD_NUMBER << 3 | _LENGTH_DELIMITED


def response(turn: int = 0, **event: Any) -> bytes:
    """Returns a serialized event. `turn` is the turn to which it belongs, or 0 if it belongs to none."""
    return orchestrator_pb2.ConverseResponse(turn=turn, **event).SerializeToString()


def generated_response(turn: int, event: bytes) -> bytes:
    """Returns a serialized event that contains `event`, a serialized GenerateResponse of the request of a turn.

    Does not parse `event`, because an answer consists of many of them.
    """
    return b"".join((response(turn), _varint(_GENERATED_TAG), _varint(len(event)), event))


def _varint(value: int) -> bytes:
    """Encodes a number as protobuf does: seven bits in each byte, lowest first, and a bit that marks further bytes."""
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)
