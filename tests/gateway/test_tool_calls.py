"""Reasoning and tool calls of a model, in OpenAI's form."""

import json
from typing import Any

import pytest

from stagemesh.v1.orchestrator_pb2 import GenerateResponse
from stagemesh.v1.request_pb2 import FINISH_REASON_LENGTH, Finish, Output, ToolChoice
from tests.client.scripted import admitted, called, ended, finished, message, served, text
from tests.gateway.making import ask, asking

ARGUMENTS = '{"city": "Rome"}'
TOOL = {"type": "function", "function": {"name": "find", "parameters": {"type": "object"}, "strict": True}}
ANSWER = (
    admitted(),
    message(reasoning="It is "),
    message(reasoning="far."),
    message(text="Wait. "),
    called("find", ARGUMENTS[:5]),
    called("", ARGUMENTS[5:]),
    called("stop", "{}", call=1),
    ended(),
    finished(),
)


async def test_a_message_has_reasoning_text_and_calls() -> None:
    async with served() as orchestrator, asking(orchestrator) as ai:
        orchestrator.scripts.append(ANSWER)
        choice = (await ask(ai, tools=[TOOL])).choices[0]
        made = choice.message.model_dump()
        assert choice.finish_reason == "tool_calls"
        assert (made["content"], made["reasoning_content"], made["reasoning"]) == ("Wait. ", *["It is far."] * 2)
        calls = [(each.id, each.function.name, each.function.arguments) for each in choice.message.tool_calls]
        assert calls == [("call_0", "find", ARGUMENTS), ("call_1", "stop", "{}")]
        sent = orchestrator.requests[0]
        assert sent.parsed
        assert [(tool.name, tool.strict) for tool in sent.input.conversation.tools] == [("find", True)]
        # The next request repeats the message and has the results of its calls.
        messages = [
            {"role": "user", "content": "hello"},
            choice.message.model_dump(exclude_none=True),
            *({"role": "tool", "tool_call_id": call_id, "content": "far"} for call_id, _, _ in calls),
        ]
        await ask(ai, messages=messages)
        repeated = orchestrator.requests[1].input.conversation.messages
        assert [call.name for call in repeated[1].tool_calls] == ["find", "stop"]
        assert repeated[1].reasoning == "It is far."
        assert repeated[2].tool_call_id == calls[0][0]


async def test_the_parts_of_a_message_are_streamed() -> None:
    async with served() as orchestrator, asking(orchestrator) as ai:
        orchestrator.scripts.append(ANSWER)
        chunks = [chunk.model_dump() async for chunk in await ask(ai, tools=[TOOL], stream=True)]
        deltas: list[Any] = [chunk["choices"][0]["delta"] for chunk in chunks if chunk["choices"]]
        assert "".join(each.get("reasoning_content") or "" for each in deltas) == "It is far."
        assert "".join(each.get("content") or "" for each in deltas) == "Wait. "
        calls = [call for each in deltas for call in each["tool_calls"] or ()]
        assert [(each["index"], each["id"], each["type"], each["function"]["name"]) for each in calls] == [
            (0, "call_0", "function", "find"),
            (0, None, None, None),
            (1, "call_1", "function", "stop"),
        ]
        assert "".join(each["function"]["arguments"] for each in calls) == f"{ARGUMENTS}{{}}"
        assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({}, ToolChoice()),
        ({"tool_choice": "auto", "parallel_tool_calls": None}, ToolChoice()),
        ({"parallel_tool_calls": False}, ToolChoice(single=True)),
        ({"tool_choice": "required"}, ToolChoice(required=True)),
        ({"tool_choice": {"type": "function", "function": {"name": "find"}}}, ToolChoice(required=True, name="find")),
    ],
    ids=["absent", "neutral", "single", "required", "named"],
)
async def test_the_request_says_how_tools_are_used(arguments: dict[str, object], expected: ToolChoice) -> None:
    async with served() as orchestrator, asking(orchestrator) as ai:
        orchestrator.scripts.append(ANSWER)
        await ask(ai, tools=[TOOL], **arguments)
        assert orchestrator.requests[0].input.conversation.tool_choice == expected


async def test_the_structure_of_the_text_has_no_effect_if_a_call_is_required() -> None:
    async with served() as orchestrator, asking(orchestrator) as ai:
        orchestrator.scripts.append(ANSWER)
        await ask(ai, tools=[TOOL], tool_choice="required", response_format={"type": "json_object"})
        assert not orchestrator.requests[0].parameters.sampling.json_schema


async def test_a_call_that_is_cut_off_has_the_reason_length() -> None:
    end = GenerateResponse(output=Output(name="text", finish=Finish(reason=FINISH_REASON_LENGTH)))
    async with served() as orchestrator, asking(orchestrator) as ai:
        orchestrator.scripts.append([admitted(), called("find", '{"city'), end, finished()])
        (made,) = (await ask(ai, tools=[TOOL], tool_choice="required")).choices
        assert (made.finish_reason, made.message.content) == ("length", None)
        assert made.message.tool_calls[0].function.arguments == '{"city'


async def test_text_of_a_stage_that_parses_nothing_is_text() -> None:
    call = f"<tool_call>{json.dumps({'name': 'find'})}</tool_call>"
    async with served() as orchestrator, asking(orchestrator) as ai:
        orchestrator.scripts.append([admitted(), text(call), ended(), finished()])
        cases: list[dict[str, object]] = [{}, {"tools": [TOOL], "tool_choice": "none"}, {"tools": [TOOL]}]
        for arguments in cases:
            choice = (await ask(ai, **arguments)).choices[0]
            assert (choice.message.content, choice.finish_reason) == (call, "stop")
            assert bool(orchestrator.requests[-1].input.conversation.tools) == (arguments == {"tools": [TOOL]})
