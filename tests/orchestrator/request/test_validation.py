from pathlib import Path

import numpy as np
import pytest

from stagemesh.common.errors import InvalidRequestError, StagemeshError
from stagemesh.common.tensors import inline_tensor
from stagemesh.common.typed_values import to_messages
from stagemesh.orchestrator.request.validation import validate
from stagemesh.orchestrator.spec import Pipeline, load_pipeline
from stagemesh.v1 import orchestrator_pb2, request_pb2, tensor_pb2
from tests.orchestrator.mesh import CHAIN, ask, mesh


@pytest.fixture
def pipeline(tmp_path: Path) -> Pipeline:
    (tmp_path / "chain.yaml").write_text(CHAIN)
    return load_pipeline(str(tmp_path / "chain.yaml"))


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
            conversation=request_pb2.Conversation(messages=[request_pb2.Message(role="user", content="")])
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


def test_an_unknown_role_is_rejected(pipeline: Pipeline) -> None:
    message = request_pb2.Message(role="robot", content="hello")
    given = request_pb2.Input(conversation=request_pb2.Conversation(messages=[message]))
    error = _rejection(orchestrator_pb2.GenerateRequest(input=given), pipeline)
    assert error.message == "a message's role is 'robot'; use one of system, user, assistant"


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
            request_pb2.Message(parts=[request_pb2.Part(image=request_pb2.Image())]),
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
    message.role = "user"
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
