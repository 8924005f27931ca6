"""Tool calls in the text of a model: found in any cutting of the text, and reported in OpenAI's form."""

import json
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stagemesh.gateway.tool_calls import FoundCall, ToolCallSplitter
from tests.client.scripted import admitted, ended, finished, served, text
from tests.gateway.making import ask, asking

CALL = '<tool_call>\n{"name": "find", "arguments": {"city": "Rome"}}\n</tool_call>'
FOUND = FoundCall("find", '{"city": "Rome"}')
TOOL = {"type": "function", "function": {"name": "find", "parameters": {"type": "object"}}}


def split(parts: Sequence[str]) -> list[str | FoundCall]:
    """Returns what a splitter makes of the parts, with consecutive texts joined."""
    splitter = ToolCallSplitter()
    made = [piece for part in parts for piece in splitter.push(part)]
    joined: list[str | FoundCall] = []
    for piece in [*made, *splitter.finish()]:
        if isinstance(piece, str) and joined and isinstance(joined[-1], str):
            joined[-1] += piece
        else:
            joined.append(piece)
    return joined


@pytest.mark.parametrize(
    ("whole", "expected"),
    [
        ("no call", ["no call"]),
        (CALL, [FOUND]),
        (f"a < b <tool {CALL}{CALL} end", ["a < b <tool ", FOUND, FOUND, " end"]),
        ("<tool_call>not JSON</tool_call>", ["<tool_call>not JSON</tool_call>"]),
        ('<tool_call>{"arguments": {}}</tool_call>', ['<tool_call>{"arguments": {}}</tool_call>']),
        ("<tool_call>[1]</tool_call>", ["<tool_call>[1]</tool_call>"]),
        ('<tool_call>{"name": "find"}', [FoundCall("find", "{}")]),
        ("ends with <tool_", ["ends with <tool_"]),
    ],
)
@given(data=st.data())
def test_calls_are_found_in_any_cutting(data: st.DataObject, whole: str, expected: list[str | FoundCall]) -> None:
    cuts = sorted(data.draw(st.sets(st.integers(0, len(whole)))))
    assert split([whole[a:b] for a, b in zip([0, *cuts], [*cuts, len(whole)], strict=True)]) == expected


async def test_the_model_calls_a_tool() -> None:
    async with served() as orchestrator, asking(orchestrator) as ai:
        orchestrator.scripts.append([admitted(), text("Wait. "), text(CALL[:20]), text(CALL[20:]), ended(), finished()])
        choice = (await ask(ai, tools=[TOOL])).choices[0]
        assert choice.finish_reason == "tool_calls"
        assert choice.message.content == "Wait. "
        call = choice.message.tool_calls[0]
        assert (call.function.name, json.loads(call.function.arguments)) == ("find", {"city": "Rome"})
        sent = orchestrator.requests[0].input.conversation
        assert [tool.name for tool in sent.tools] == ["find"]
        chunks = [chunk async for chunk in await ask(ai, tools=[TOOL], stream=True)]
        calls = [each for chunk in chunks for each in chunk.choices[0].delta.tool_calls or ()]
        assert [(each.index, each.function.name, each.type) for each in calls] == [(0, "find", "function")]
        assert chunks[-1].choices[0].finish_reason == "tool_calls"
        # The next request repeats the call and has its result.
        messages = [
            {"role": "user", "content": "hello"},
            choice.message.model_dump(exclude_none=True),
            {"role": "tool", "tool_call_id": call.id, "content": "far"},
        ]
        await ask(ai, messages=messages)
        replayed = orchestrator.requests[2].input.conversation.messages
        assert [call.name for call in replayed[1].tool_calls] == ["find"]
        assert replayed[2].tool_call_id == call.id


@pytest.mark.parametrize(
    ("choice", "names"),
    [("required", ["find", "stop"]), ({"type": "function", "function": {"name": "find"}}, ["find"])],
    ids=["required", "named"],
)
async def test_a_forced_call_is_the_whole_answer(choice: object, names: list[str]) -> None:
    call = CALL.removeprefix("<tool_call>").removesuffix("</tool_call>")
    stop = {"type": "function", "function": {"name": "stop", "strict": True}}
    async with served() as orchestrator, asking(orchestrator) as ai:
        orchestrator.scripts.append([admitted(), text(call[:20]), text(call[20:]), ended(), finished()])
        (made,) = (await ask(ai, tools=[TOOL, stop], tool_choice=choice)).choices
        assert (made.finish_reason, made.message.content) == ("tool_calls", None)
        assert [each.function.name for each in made.message.tool_calls] == ["find"]
        schema = json.loads(orchestrator.requests[0].parameters.sampling.json_schema)
        calls = schema.get("anyOf", [schema])
        assert not schema["x-guidance"]["whitespace_flexible"]
        assert [each["properties"]["name"]["enum"] for each in calls] == [[name] for name in names]


DEEP = '{"name": "find", "arguments": ' + "[" * 100_000


@pytest.mark.parametrize("text", ["", '{"name": "find", "argu', "[1]", DEEP], ids=["empty", "half", "list", "deep"])
def test_an_incomplete_forced_call_is_text(text: str) -> None:
    call = ToolCallSplitter("required")
    assert list(call.push(text)) == []
    assert list(call.finish()) == ([text] if text else [])


async def test_without_tools_the_text_is_unchanged() -> None:
    async with served() as orchestrator, asking(orchestrator) as ai:
        orchestrator.scripts.append([admitted(), text(CALL), ended(), finished()])
        cases: list[dict[str, object]] = [{}, {"tools": [TOOL], "tool_choice": "none"}]
        for arguments in cases:
            assert (await ask(ai, **arguments)).choices[0].message.content == CALL
            assert not orchestrator.requests[-1].input.conversation.tools
