"""Conversations with tools, and prompts without a template, through the vllm engine on a tiny random model."""

import json

import pytest
from pydantic import JsonValue

from stagemesh.common.errors import InvalidRequestError
from stagemesh.services.engines.base import SamplingOptions, Task, Usage
from stagemesh.services.engines.prompts import ChatMessage, Conversation, Prompt, RawPrompt, Role, Tool, ToolCall
from stagemesh.services.engines.vllm.engine import VllmEngine
from stagemesh.services.engines.vllm.requests import prompt_tokens
from tests.engines.support import collect

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(180)]

HI = ChatMessage("user", "hi")
WEATHER = Tool("weather", "Tells the weather.", {"type": "object", "properties": {"city": {"type": "string"}}})
CALL = ToolCall("c1", "weather", {"city": "Bern"})


def rendered(engine: VllmEngine, prompt: Prompt) -> str:
    llm = engine.control.llm
    return str(llm.get_tokenizer().decode(prompt_tokens(prompt, llm)))


async def test_template_receives_tools_their_calls_and_results(text_engine: VllmEngine) -> None:
    messages = [
        HI,
        ChatMessage("assistant", tool_calls=[CALL, ToolCall("c2", "weather", {"city": "Rom"})]),
        ChatMessage("tool", "12 degrees", result_of=CALL),
    ]
    text = rendered(text_engine, Conversation(messages, [WEATHER, Tool("now", "", {})]))
    *tools, conversation = text.split("|", 2)
    kinds, functions = zip(*(tool.split(":", 1) for tool in tools), strict=True)
    assert kinds == ("function", "function")
    assert [json.loads(function) for function in functions] == [
        {"name": "weather", "description": "Tells the weather.", "parameters": WEATHER.parameters},
        {"name": "now", "description": "", "parameters": {"type": "object", "properties": {}}},
    ]
    assert conversation == (
        "<|user|>hi<|end|><|assistant|>[c1 weather Bern][c2 weather Rom]<|end|>"
        "<|tool|>12 degrees(c1 weather)<|end|><|assistant|>"
    )


@pytest.mark.parametrize(
    ("arguments", "end"),
    [
        ({}, "<|assistant|>"),
        ({"thinking": False, "unused": [1]}, "<|assistant|>no thoughts"),
        ({"add_generation_prompt": False}, ""),
    ],
    ids=str,
)
async def test_template_receives_its_arguments(
    text_engine: VllmEngine, arguments: dict[str, JsonValue], end: str
) -> None:
    assert rendered(text_engine, Conversation([HI], template_arguments=arguments)) == f"<|user|>hi<|end|>{end}"


async def test_assistants_message_can_be_continued(text_engine: VllmEngine) -> None:
    arguments: dict[str, JsonValue] = {"add_generation_prompt": False, "continue_final_message": True}
    asked = Conversation([HI, ChatMessage("assistant", "Well,")], template_arguments=arguments)
    assert rendered(text_engine, asked) == "<|user|>hi<|end|><|assistant|>Well,"


@pytest.mark.parametrize(("role", "name"), [("developer", "system"), ("system", "system"), ("tool", "tool")])
async def test_template_receives_each_role(text_engine: VllmEngine, role: Role, name: str) -> None:
    assert rendered(text_engine, Conversation([ChatMessage(role, "x"), HI])).startswith(f"<|{name}|>x<|end|>")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"tools": []}, "contain tools, which the request or the stage sets itself"),
        ({"chat_template": "{{ 1 }}"}, "contain chat_template, which"),
        ({"tokenize": True}, "contain tokenize, which"),
        ({"refuse": "no"}, "the model's chat template rejects the conversation: refused: no"),
        ({"continue_final_message": True}, "the model's chat template rejects the conversation"),
    ],
    ids=str,
)
async def test_wrong_template_arguments_are_rejected(
    text_engine: VllmEngine, arguments: dict[str, JsonValue], message: str
) -> None:
    with pytest.raises(InvalidRequestError, match=message) as caught:
        await collect(text_engine.submit(Task("r", 1, Conversation([HI], template_arguments=arguments))))
    assert caught.value.reason == "INVALID_PROMPT"


async def test_raw_text_goes_past_the_template(text_engine: VllmEngine) -> None:
    raw = "<|user|>hi<|end|><|assistant|>"
    assert rendered(text_engine, RawPrompt(raw)) == raw == rendered(text_engine, "hi")
    assert prompt_tokens(RawPrompt(raw), text_engine.control.llm) == prompt_tokens("hi", text_engine.control.llm)


async def test_conversation_with_tools_is_answered(text_engine: VllmEngine) -> None:
    conversation = Conversation([HI], [WEATHER])
    events = await collect(text_engine.submit(Task("r", 1, conversation, sampling=SamplingOptions(max_tokens=4))))
    assert isinstance(events[-1], Usage)
    assert events[-1].prompt_tokens == len(prompt_tokens(conversation, text_engine.control.llm))
