from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stagemesh.common.errors import InvalidRequestError, StagemeshError
from stagemesh.common.wire.tensors import inline_tensor, to_messages
from stagemesh.orchestrator.request.validation import validate
from stagemesh.pipeline import Pipeline
from stagemesh.v1 import orchestrator_pb2, request_pb2, tensor_pb2
from tests.orchestrator.mesh import ask, mesh


def _rejection(request: orchestrator_pb2.GenerateRequest, pipeline: Pipeline) -> StagemeshError:
    with pytest.raises(StagemeshError) as caught:
        validate(request, pipeline)
    return caught.value


@pytest.mark.parametrize(
    "given",
    [
        request_pb2.Input(),
        request_pb2.Input(text=" \n"),
        request_pb2.Input(token_ids=request_pb2.TokenIds()),
        request_pb2.Input(conversation=request_pb2.Conversation()),
        request_pb2.Input(
            conversation=request_pb2.Conversation(
                messages=[request_pb2.Message(role=request_pb2.ROLE_USER, content="")]
            )
        ),
    ],
)
def test_an_empty_prompt_is_rejected(given: request_pb2.Input, pipeline: Pipeline) -> None:
    error = _rejection(orchestrator_pb2.GenerateRequest(input=given), pipeline)
    assert (error.reason, error.message) == ("EMPTY_PROMPT", "the prompt is empty; provide some text")


def test_the_error_for_an_unknown_output_names_the_known_ones(pipeline: Pipeline) -> None:
    error = _rejection(ask(outputs=["video"]), pipeline)
    assert error.reason == "UNKNOWN_OUTPUT"
    assert error.message == "unknown output 'video'; pipeline 'chain' has first, last"


def test_the_error_for_an_unknown_pipeline_names_the_served_one(pipeline: Pipeline) -> None:
    error = _rejection(ask(pipeline="other"), pipeline)
    assert error.reason == "UNKNOWN_PIPELINE"
    assert error.message == "pipeline 'other' is not served here; this orchestrator serves 'chain'"


def test_an_unknown_option_is_rejected(pipeline: Pipeline) -> None:
    error = _rejection(ask(parameters=request_pb2.Parameters(options=to_messages({"speed": 1.5}))), pipeline)
    assert (error.reason, error.message) == ("UNKNOWN_OPTION", "unknown option 'speed'; pipeline 'chain' has none")


@pytest.mark.parametrize("request_id", ["a b", "x" * 129, "r/1", "é"])
def test_a_request_id_with_other_characters_is_rejected(request_id: str, pipeline: Pipeline) -> None:
    assert _rejection(ask(request_id=request_id), pipeline).reason == "INVALID_ID"


ROLES = "ROLE_SYSTEM, ROLE_DEVELOPER, ROLE_USER, ROLE_ASSISTANT, ROLE_TOOL"
TEXT = request_pb2.Part(text="a")
CALL = request_pb2.ToolCall(id="c1", name="weather", arguments="{}")


def _asked(**fields: object) -> request_pb2.Message:
    return request_pb2.Message(role=request_pb2.ROLE_USER, content="a", **fields)  # type: ignore[arg-type]


def _called(*calls: request_pb2.ToolCall) -> request_pb2.Message:
    return request_pb2.Message(role=request_pb2.ROLE_ASSISTANT, tool_calls=calls)


def _answered(call: str) -> request_pb2.Message:
    return request_pb2.Message(role=request_pb2.ROLE_TOOL, content="12", tool_call_id=call)


def _call(**fields: str) -> request_pb2.ToolCall:
    return request_pb2.ToolCall(**{"id": "c1", "name": "weather", **fields})


@pytest.mark.parametrize(
    ("conversation", "problem"),
    [
        ({"messages": [request_pb2.Message(content="a")]}, f"a message's role is 0; use one of {ROLES}"),
        ({"messages": [request_pb2.Message(content="a", role=99)]}, "a message's role is 99"),  # type: ignore[arg-type]
        ({"messages": [_asked(tool_calls=[CALL])]}, "another role than ROLE_ASSISTANT"),
        ({"messages": [_asked(tool_call_id="c1")]}, "must have a tool_call_id if its role is ROLE_TOOL"),
        ({"messages": [_called(CALL), _answered("")]}, "must have a tool_call_id if its role is ROLE_TOOL"),
        ({"messages": [_called(CALL), _answered("c2")]}, "tool_call_id is 'c2', which no earlier message"),
        ({"messages": [_answered("c1"), _called(CALL)]}, "tool_call_id is 'c1', which no earlier message"),
        ({"messages": [_called(CALL, CALL)]}, "two tool_calls of a message have the same id"),
        ({"messages": [_called(_call(name=""))]}, "has no id or no name"),
        (
            {"messages": [_called(_call(arguments="[1]"))]},
            "arguments of tool call 'c1' must be a JSON object: Expected",
        ),
        ({"messages": [_called(_call(arguments="{'a'}"))]}, "must be a JSON object: JSON is malformed"),
        ({"messages": [_called(_call(arguments='{"a":' * 99_999))]}, "must be a JSON object"),
        ({"tools": [request_pb2.Tool(name="a")] * 2}, "no name, or the name of another tool"),
        ({"tools": [request_pb2.Tool()]}, "no name, or the name of another tool"),
        ({"tools": [request_pb2.Tool(name="a", parameters="true")]}, "parameters of tool 'a' must be a JSON object"),
        ({"template_arguments": "NaN"}, "template_arguments must be a JSON object"),
    ],
    ids=lambda value: value[:40] if isinstance(value, str) else "",
)
def test_an_invalid_conversation_is_rejected(conversation: dict[str, Any], problem: str, pipeline: Pipeline) -> None:
    given = request_pb2.Input(conversation=request_pb2.Conversation(**conversation))
    error = _rejection(orchestrator_pb2.GenerateRequest(input=given), pipeline)
    assert error.reason == "INVALID_PROMPT"
    assert problem in error.message


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        (request_pb2.Input(text="a", media=[TEXT]), "media are given without token_ids or raw_text"),
        (request_pb2.Input(raw_text="a", media=[TEXT]), "media have a part of text"),
        (request_pb2.Input(raw_text="a", media=[request_pb2.Part()]), "a part without content"),
        (
            request_pb2.Input(
                raw_text="a", media=[request_pb2.Part(image=request_pb2.MediaFile(), use_audio_in_video=True)]
            ),
            "a part that is not a video",
        ),
    ],
    ids=["text", "part of text", "empty part", "image with sound"],
)
def test_media_of_a_raw_prompt_are_checked(given: request_pb2.Input, problem: str, pipeline: Pipeline) -> None:
    error = _rejection(orchestrator_pb2.GenerateRequest(input=given), pipeline)
    assert error.reason == "INVALID_PROMPT"
    assert problem in error.message


def test_a_result_may_follow_its_call_later(pipeline: Pipeline) -> None:
    messages = [_asked(), _called(CALL), _asked(), _answered("c1"), _called(CALL), _answered("c1")]
    given = request_pb2.Input(conversation=request_pb2.Conversation(messages=messages))
    assert validate(orchestrator_pb2.GenerateRequest(input=given), pipeline).input == given


@pytest.mark.parametrize(
    ("message", "reason", "problem"),
    [
        (request_pb2.Message(content="a", parts=[request_pb2.Part(text="b")]), "INVALID_PROMPT", "content and parts"),
        (
            request_pb2.Message(parts=[request_pb2.Part(text="a"), request_pb2.Part()]),
            "INVALID_PROMPT",
            "without content",
        ),
        (request_pb2.Message(parts=[request_pb2.Part(text=" ")]), "EMPTY_PROMPT", "is empty"),
        (
            request_pb2.Message(parts=[request_pb2.Part(image=request_pb2.MediaFile())]),
            "UNSUPPORTED",
            "no stage of pipeline",
        ),
        (
            request_pb2.Message(
                parts=[request_pb2.Part(audio=request_pb2.Audio(samples=tensor_pb2.Tensor(shape=[4], inline=b"1")))]
            ),
            "INVALID_CHUNK",
            "",
        ),
    ],
)
def test_parts_without_usable_content_are_rejected(
    message: request_pb2.Message, reason: str, problem: str, pipeline: Pipeline
) -> None:
    message.role = request_pb2.ROLE_USER
    given = request_pb2.Input(conversation=request_pb2.Conversation(messages=[message]))
    error = _rejection(orchestrator_pb2.GenerateRequest(input=given), pipeline)
    assert error.reason == reason
    assert problem in error.message


def test_a_tensor_with_too_few_bytes_is_rejected(pipeline: Pipeline) -> None:
    request = ask()
    request.input.tensors.add(name="x", dtype=tensor_pb2.DATA_TYPE_FLOAT32, shape=[2], inline=b"1234")
    assert _rejection(request, pipeline).reason == "INVALID_CHUNK"


def test_tensors_alone_are_an_input(pipeline: Pipeline) -> None:
    given = request_pb2.Input(tensors=[inline_tensor("x", np.zeros(3, np.float32))])
    assert validate(orchestrator_pb2.GenerateRequest(input=given), pipeline).outputs == ("first", "last")


async def test_a_rejected_request_reaches_no_stage(tmp_path: Path) -> None:
    async with mesh(tmp_path) as chain:
        error = await chain.failure(outputs=["video"])
        assert not any(stage.requests for stage in chain.stages.values())
    assert isinstance(error, InvalidRequestError)
