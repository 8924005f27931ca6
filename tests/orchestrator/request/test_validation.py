"""Requests and their parameters: their check against the pipeline, and the parameters that each stage receives."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stagemesh.common.errors import InvalidPipelineError, InvalidRequestError, StagemeshError
from stagemesh.common.plugins.descriptors import OptionSpec
from stagemesh.common.requests.request_checks import check_options
from stagemesh.common.wire.tensors import Value, inline_tensor, to_messages
from stagemesh.orchestrator.request.parameters import check_parameters, parameters_of
from stagemesh.orchestrator.request.validation import validate
from stagemesh.pipeline import Pipeline, Stage
from stagemesh.v1 import orchestrator_pb2, request_pb2, tensor_pb2
from stagemesh.v1.request_pb2 import (
    ROLE_USER,
    Audio,
    Input,
    MediaFile,
    Message,
    Parameters,
    Part,
    Sampling,
    StageParameters,
)
from tests.orchestrator.mesh import Mesh, ask, load
from tests.rpc.call_errors import raises


def _reject(given: orchestrator_pb2.GenerateRequest | Input, pipeline: Pipeline, reason: str, problem: str) -> None:
    """Asserts that a request, or a request with this input, is rejected."""
    request = given if isinstance(given, orchestrator_pb2.GenerateRequest) else ask(input=given)
    with raises(StagemeshError, reason=reason, match=re.escape(problem)):
        validate(request, pipeline)


def _conversation(*messages: Message) -> Input:
    return Input(conversation=request_pb2.Conversation(messages=messages))


_EMPTY_INPUTS = [Input(), Input(text=" \n"), Input(token_ids=request_pb2.TokenIds())]
_EMPTY_CONVERSATIONS = [_conversation(), _conversation(Message(role=ROLE_USER, content=""))]


@pytest.mark.parametrize("given", [*_EMPTY_INPUTS, *_EMPTY_CONVERSATIONS])
def test_an_empty_prompt_is_rejected(given: Input, pipeline: Pipeline) -> None:
    with raises(StagemeshError, reason="EMPTY_PROMPT", match=r"^the prompt is empty; provide some text$"):
        validate(ask(input=given), pipeline)


_POSITION = {"name": "first", "index": 2, "position": 1}
_SPEED = {"options": to_messages({"speed": 1.5})}
_CALLS, _TWO = {"admitted_call": 3, "earlier_calls": 3}, {"parameters": {"choices": 2}}
_NOT_SERVED = "pipeline 'other' is not served here; this orchestrator serves 'chain'"
_TOO_FEW = "next_positions names choice 2, but the request has 2 choices"
_REJECTED: dict[str, tuple[dict[str, Any], str, str]] = {
    "output": ({"outputs": ["video"]}, "UNKNOWN_OUTPUT", "unknown output 'video'; pipeline 'chain' has first, last"),
    "pipeline": ({"pipeline": "other"}, "UNKNOWN_PIPELINE", _NOT_SERVED),
    "option": ({"parameters": _SPEED}, "UNKNOWN_OPTION", "unknown option 'speed'; pipeline 'chain' has none"),
    "request id": ({"request_id": "r/1"}, "INVALID_ID", "request_id is 'r/1'"),
    "earlier calls": ({"earlier_calls": 1_000_001}, "INVALID_EARLIER_CALLS", "earlier_calls is 1000001"),
    "admitted call": (_CALLS, "INVALID_EARLIER_CALLS", "admitted_call is 3; it must be lower than earlier_calls"),
    "admitted call of two choices": (_CALLS | _TWO, "INVALID_EARLIER_CALLS", "admitted_call is 3"),
    "choice": ({**_TWO, "next_positions": [_POSITION]}, "INVALID_CHOICES", _TOO_FEW),
}


@pytest.mark.parametrize(("fields", "reason", "problem"), _REJECTED.values(), ids=_REJECTED)
def test_an_invalid_request_is_rejected(fields: dict[str, Any], reason: str, problem: str, pipeline: Pipeline) -> None:
    _reject(ask(**fields), pipeline, reason, problem)


@pytest.mark.parametrize("name", ["a b", "x" * 129, "é"])
@pytest.mark.parametrize(("field", "reason"), [("request_id", "INVALID_ID"), ("caller", "INVALID_CALLER")])
def test_a_name_with_other_characters_is_rejected(field: str, reason: str, name: str, pipeline: Pipeline) -> None:
    _reject(ask(**{field: name}), pipeline, reason, field)


ROLES = "ROLE_SYSTEM, ROLE_DEVELOPER, ROLE_USER, ROLE_ASSISTANT, ROLE_TOOL"
TEXT = Part(text="a")
CALL = request_pb2.ToolCall(id="c1", name="weather", arguments="{}")


def _asked(**fields: object) -> Message:
    return Message(role=ROLE_USER, content="a", **fields)  # type: ignore[arg-type]


def _called(*calls: request_pb2.ToolCall) -> Message:
    return Message(role=request_pb2.ROLE_ASSISTANT, tool_calls=calls)


def _answered(call: str) -> Message:
    return Message(role=request_pb2.ROLE_TOOL, content="12", tool_call_id=call)


MANY_VALUES = f'{{"a": [{"{}," * 100_000}0]}}'


def _calling(**fields: str) -> Message:
    return _called(request_pb2.ToolCall(**{"id": "c1", "name": "weather", **fields}))


@pytest.mark.parametrize(
    ("conversation", "problem"),
    [
        ({"messages": [Message(content="a")]}, f"a message's role is 0; use one of {ROLES}"),
        ({"messages": [Message(content="a", role=99)]}, "a message's role is 99"),  # type: ignore[arg-type]
        ({"messages": [_asked(tool_calls=[CALL])]}, "another role than ROLE_ASSISTANT"),
        ({"messages": [_asked(tool_call_id="c1")]}, "must have a tool_call_id if its role is ROLE_TOOL"),
        ({"messages": [_called(CALL), _answered("")]}, "must have a tool_call_id if its role is ROLE_TOOL"),
        ({"messages": [_called(CALL), _answered("c2")]}, "tool_call_id is 'c2', which no earlier message"),
        ({"messages": [_answered("c1"), _called(CALL)]}, "tool_call_id is 'c1', which no earlier message"),
        ({"messages": [_called(CALL, CALL)]}, "two tool_calls of a message have the same id"),
        ({"messages": [_calling(name="")]}, "has no id or no name"),
        ({"messages": [_calling(arguments="[1]")]}, "arguments of tool call 'c1' must be a JSON object: Expected"),
        ({"messages": [_calling(arguments="{'a'}")]}, "must be a JSON object: JSON is malformed"),
        ({"messages": [_calling(arguments='{"a":' * 99_999)]}, "must be a JSON object"),
        ({"tools": [request_pb2.Tool(name="a")] * 2}, "no name, or the name of another tool"),
        ({"tools": [request_pb2.Tool()]}, "no name, or the name of another tool"),
        ({"tools": [request_pb2.Tool(name="a", parameters="true")]}, "parameters of tool 'a' must be a JSON object"),
        ({"template_arguments": "NaN"}, "template_arguments must be a JSON object"),
        ({"template_arguments": f'{{"a":[{"{}," * 300_000}0]}}'}, "have over 262144 values"),
        ({"tools": [request_pb2.Tool(name=n, parameters=MANY_VALUES) for n in "abc"]}, "have over 262144 values"),
        ({"messages": [_calling(arguments=MANY_VALUES), _calling(arguments=MANY_VALUES)]}, "have over 262144 values"),
    ],
    ids=lambda value: value[:40] if isinstance(value, str) else "",
)
def test_an_invalid_conversation_is_rejected(conversation: dict[str, Any], problem: str, pipeline: Pipeline) -> None:
    given = Input(conversation=request_pb2.Conversation(**conversation))
    _reject(given, pipeline, "INVALID_PROMPT", problem)


_IMAGE = Part(image=MediaFile(), use_audio_in_video=True)
_MEDIA = {
    "text": (Input(text="a", media=[TEXT]), "media are given without token_ids or raw_text"),
    "part of text": (Input(raw_text="a", media=[TEXT]), "media have a part of text"),
    "empty part": (Input(raw_text="a", media=[Part()]), "a part without content"),
    "image with sound": (Input(raw_text="a", media=[_IMAGE]), "a part that is not a video"),
}


@pytest.mark.parametrize(("given", "problem"), _MEDIA.values(), ids=_MEDIA)
def test_media_of_a_raw_prompt_are_checked(given: Input, problem: str, pipeline: Pipeline) -> None:
    _reject(given, pipeline, "INVALID_PROMPT", problem)


def test_a_result_may_follow_its_call_later(pipeline: Pipeline) -> None:
    given = _conversation(_asked(), _called(CALL), _asked(), _answered("c1"), _called(CALL), _answered("c1"))
    assert validate(orchestrator_pb2.GenerateRequest(input=given), pipeline).input == given


_UNTYPED = Audio(samples=tensor_pb2.Tensor(shape=[4], inline=b"1"))
_PARTS = {
    "also content": ("a", [TEXT], "INVALID_PROMPT", "content and parts"),
    "empty part": ("", [TEXT, Part()], "INVALID_PROMPT", "without content"),
    "blank text": ("", [Part(text=" ")], "EMPTY_PROMPT", "is empty"),
    "image": ("", [Part(image=MediaFile())], "UNSUPPORTED", "no stage of pipeline"),
    "untyped audio": ("", [Part(audio=_UNTYPED)], "INVALID_CHUNK", "dtype"),
}


@pytest.mark.parametrize(("content", "parts", "reason", "problem"), _PARTS.values(), ids=_PARTS)
def test_parts_without_usable_content_are_rejected(
    content: str, parts: list[Part], reason: str, problem: str, pipeline: Pipeline
) -> None:
    given = _conversation(Message(role=ROLE_USER, content=content, parts=parts))
    _reject(given, pipeline, reason, problem)


def test_a_tensor_with_too_few_bytes_is_rejected(pipeline: Pipeline) -> None:
    request = ask()
    request.input.tensors.add(name="x", dtype=tensor_pb2.DATA_TYPE_FLOAT32, shape=[2], inline=b"1234")
    _reject(request, pipeline, "INVALID_CHUNK", "needs 8 bytes but has 4")


def test_tensors_alone_are_an_input(pipeline: Pipeline) -> None:
    given = Input(tensors=[inline_tensor("x", np.zeros(3, np.float32))])
    assert validate(orchestrator_pb2.GenerateRequest(input=given), pipeline).outputs == ("first", "last")


async def test_a_rejected_request_reaches_no_stage(chain: Mesh) -> None:
    error = await chain.failure(outputs=["video"])
    assert not any(stage.requests for stage in chain.stages.values())
    assert isinstance(error, InvalidRequestError)


OMNI = """
pipeline: omni
main_stage: thinker
stages:
  thinker: {engine: fake, function: source}
  talker: {engine: fake, function: talk}
  sound: {engine: fake, function: frames}
edges: [{from: thinker, to: talker}, {from: talker, to: sound}]
outputs: {text: thinker, speech: talker, frames: sound}
"""
OPTIONS = {
    "speed": OptionSpec(1.0, 0.5, 2.0),
    "steps": OptionSpec(20, 1, 50),
    "echo": OptionSpec(default=False),
    "voice": OptionSpec("alto", allowed_texts=("alto", "bass")),
    "instructions": OptionSpec("", maximum=10),
}


@pytest.fixture
def omni(tmp_path: Path) -> Pipeline:
    return load(tmp_path, OMNI)


def _with_options(stage: Stage, **fields: object) -> Stage:
    signature = replace(stage.signature, options=OPTIONS, adapters=True)
    return stage.model_copy(update={"signature": signature, **fields})


def _refuse(parameters: Parameters, pipeline: Pipeline, reason: str, problem: str) -> None:
    """Asserts that parameters are rejected."""
    with raises(StagemeshError, reason=reason, match=re.escape(problem)):
        check_parameters(parameters, pipeline)


def test_plain_sampling_means_the_main_stage_alone(omni: Pipeline) -> None:
    parameters = Parameters(sampling=Sampling(max_tokens=5, stop=["."]))
    check_parameters(parameters, omni)
    assert parameters_of(omni.stages["thinker"], parameters).sampling == parameters.sampling
    assert not parameters_of(omni.stages["talker"], parameters).HasField("sampling")


def test_parameters_of_a_stage_precede_plain_ones_field_by_field(omni: Pipeline) -> None:
    plain = Sampling(max_tokens=5, stop=["."], temperature=0.5, regex="a+")
    own = StageParameters(sampling=Sampling(max_tokens=7, stop=["!"], json_schema="{}"))
    parameters = Parameters(sampling=plain, stages={"thinker": own})
    check_parameters(parameters, omni)
    sampling = parameters_of(omni.stages["thinker"], parameters).sampling
    assert sampling == Sampling(max_tokens=7, stop=["!"], temperature=0.5, json_schema="{}")


def test_options_apply_to_every_stage_that_declares_them(omni: Pipeline) -> None:
    parameters = Parameters(options=to_messages({"speed": 2}))
    parameters.stages["talker"].options["speed"].number = 0.5
    sound = parameters_of(_with_options(omni.stages["sound"]), parameters)
    talker = parameters_of(_with_options(omni.stages["talker"]), parameters)
    assert (sound.options["speed"].integer, talker.options["speed"].number) == (2, 0.5)
    assert not parameters_of(omni.stages["thinker"], parameters).options


def test_an_empty_adapter_of_a_stage_overrides_the_plain_one(omni: Pipeline) -> None:
    parameters = Parameters(adapter="warm", stages={"talker": StageParameters(adapter="")})
    thinker, talker = (_with_options(omni.stages[name], is_main=True) for name in ("thinker", "talker"))
    assert parameters_of(thinker, parameters).adapter == "warm"
    assert parameters_of(talker, parameters).adapter == ""


@pytest.mark.parametrize(
    ("stage", "own", "reason", "text"),
    [
        ("singer", {}, "UNKNOWN_STAGE", "has the stages thinker, talker, sound"),
        ("sound", {"sampling": {"max_tokens": 3}}, "UNSUPPORTED", "'sound' does not choose"),
        ("talker", {"sampling": {"max_tokens": 0}}, "INVALID_SAMPLING", "max_tokens is 0"),
        ("talker", {"adapter": "warm"}, "UNSUPPORTED", "'talker' accepts no adapters"),
        ("talker", _SPEED, "UNKNOWN_OPTION", "unknown option 'speed'; stage 'talker' has none"),
    ],
)
def test_parameters_that_a_stage_does_not_take_are_rejected(
    omni: Pipeline, stage: str, own: dict[str, Any], reason: str, text: str
) -> None:
    _refuse(Parameters(stages={stage: StageParameters(**own)}), omni, reason, text)


@pytest.fixture
def cut(tmp_path: Path) -> Pipeline:
    """The pipeline `OMNI` with an edge that is cut by frames."""
    return load(tmp_path, OMNI.replace("to: sound}", "to: sound, chunk: {frames: 25, ramp: [4, 9]}}"))


_CHUNKS = [
    ("talker", {"whole": True}, "UNSUPPORTED", "no edge to stage 'talker' is cut by frames; omit its parameter chunk"),
    ("thinker", {"initial_frames": 1}, "UNSUPPORTED", "no edge to stage 'thinker' is cut by frames"),
    ("sound", {"initial_frames": 3}, "INVALID_INITIAL_FRAMES", "would have 3 frames; use 4 to 25, the bounds"),
    ("sound", {"initial_frames": 26}, "INVALID_INITIAL_FRAMES", "edge talker->sound would have 26 frames"),
    ("sound", {"initial_frames": 0}, "INVALID_INITIAL_FRAMES", "would have 0 frames"),
]


@pytest.mark.parametrize(("stage", "chunk", "reason", "text"), _CHUNKS)
def test_a_first_chunk_outside_the_bounds_is_rejected(
    cut: Pipeline, stage: str, chunk: dict[str, Any], reason: str, text: str
) -> None:
    own = StageParameters(chunk=request_pb2.ChunkParameters(**chunk))
    _refuse(Parameters(stages={stage: own}), cut, reason, text)


def test_chunk_parameters_reach_no_stage(cut: Pipeline) -> None:
    own = StageParameters(chunk=request_pb2.ChunkParameters(initial_frames=4))
    parameters = Parameters(stages={"sound": own, "talker": StageParameters()})
    check_parameters(parameters, cut)
    assert not parameters_of(cut.stages["sound"], parameters).HasField("chunk")


def test_plain_parameters_that_no_stage_takes_are_rejected(omni: Pipeline, tmp_path: Path) -> None:
    with pytest.raises(StagemeshError, match=r"^the main stage 'thinker' works without adapters; leave adapter unset"):
        check_parameters(Parameters(adapter="warm"), omni)
    frames = load(tmp_path, OMNI.replace("main_stage: thinker\n", "").replace("talk}", "relay}"))
    stages = {
        name: stage.model_copy(update={"signature": replace(stage.signature, sampling=False)})
        for name, stage in frames.stages.items()
    }
    silent = replace(frames, stages=stages)
    problem = r"^every stage of pipeline 'omni' works without sampling parameters; omit them$"
    with pytest.raises(StagemeshError, match=problem):
        check_parameters(Parameters(sampling=Sampling(max_tokens=3)), silent)


@pytest.mark.parametrize(
    ("given", "read"), [({"speed": 2}, 2.0), ({"steps": 30.0}, 30), ({"echo": True}, True), ({"voice": "bass"}, "bass")]
)
def test_a_value_gets_the_type_of_its_option(given: dict[str, Value], read: Value) -> None:
    (value,) = check_options(given, OPTIONS, owner="stage 'x'").values()
    assert (value, type(value)) == (read, type(read))


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("speed", "fast", "'speed' is 'fast'; it must be a number from 0.5 to 2"),
        ("speed", True, "'speed' is True; it must be a number from 0.5 to 2"),
        ("speed", float("nan"), "'speed' is nan; it must be a number from 0.5 to 2"),
        ("steps", 2.5, "'steps' is 2.5; it must be a whole number from 1 to 50"),
        ("steps", float("inf"), "'steps' is inf; it must be a whole number from 1 to 50"),
        ("echo", 1, "'echo' is 1; it must be true or false"),
        ("voice", "tenor", "'voice' is 'tenor'; it must be one of 'alto', 'bass'"),
        ("instructions", "x" * 11, "it must be text of at most 10 characters"),
    ],
)
def test_a_value_of_another_type_or_outside_the_bounds_is_rejected(name: str, value: Value, text: str) -> None:
    with raises(InvalidRequestError, reason="INVALID_OPTION", match=re.escape(text)) as caught:
        check_options({name: value}, OPTIONS, owner="stage 'x'")
    assert caught.value.metadata["option"] == name


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("", "stages thinker and talker choose tokens; name the one that requests mean by default: add `main_stage:"),
        ("main_stage: thinkre\n", "unknown stage 'thinkre'; did you mean 'thinker'?"),
        ("main_stage: sound\n", "stage 'sound' does not choose tokens; name thinker or talker, or remove main_stage"),
    ],
)
def test_several_stages_that_choose_tokens_need_a_main_stage(tmp_path: Path, line: str, text: str) -> None:
    with pytest.raises(InvalidPipelineError, match=re.escape(text)):
        load(tmp_path, OMNI.replace("main_stage: thinker\n", line))


def test_plain_parameters_that_contradict_those_of_a_stage_are_rejected(omni: Pipeline) -> None:
    own = StageParameters(sampling=Sampling(min_tokens=10))
    parameters = Parameters(sampling=Sampling(max_tokens=5), stages={"thinker": own})
    _refuse(parameters, omni, "INVALID_SAMPLING", "min_tokens is 10 but max_tokens is 5")
