"""The bytes of an answer's event are those that protobuf would write."""

import pytest

from stagemesh.orchestrator.session.session_call import generated_response
from stagemesh.v1 import orchestrator_pb2, request_pb2


@pytest.mark.parametrize("size", [0, 1, 100, 127, 128, 20_000, 3_000_000])
@pytest.mark.parametrize("turn", [1, 300, 2**40])
def test_an_event_is_contained_without_being_parsed(size: int, turn: int) -> None:
    event = orchestrator_pb2.GenerateResponse(output=request_pb2.Output(name="text", text="x" * size))
    parsed = orchestrator_pb2.ConverseResponse.FromString(generated_response(turn, event.SerializeToString()))
    assert parsed == orchestrator_pb2.ConverseResponse(turn=turn, generated=event)
