"""The vllm engine on a tiny random model: its inputs, outputs and errors."""

import asyncio
import json
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path

import pytest
from pydantic import JsonValue

from stagemesh.common.errors import InvalidRequestError, NotFoundError, NotReadyError, UnsupportedError
from stagemesh.services.engines.base import SamplingOptions, Task
from stagemesh.services.engines.prompts import ChatMessage, Conversation, Prompt, RawPrompt, Role, Tool, ToolCall
from stagemesh.services.engines.vllm.engine import VllmEngine
from stagemesh.services.engines.vllm.requests import prompt_tokens
from tests.engines.support import as_prompt, collect, controls_of, packets, stage_config, text_of, usage_of
from tests.engines.vllm.engines import started
from tests.engines.vllm.tiny_adapter import write_adapter
from tests.engines.vllm.tiny_model import CHAT_TEMPLATE, MAX_MODEL_LEN, OPTIONS
from tests.rpc.call_errors import raises

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(180)]

AT_ONCE = 8
HI = ChatMessage("user", "hi")
WEATHER = Tool("weather", "Tells the weather.", {"type": "object", "properties": {"city": {"type": "string"}}})
CALL = ToolCall("c1", "weather", {"city": "Bern"})


def task(
    prompt: Prompt | Sequence[int] | None = "hello", *, seed: int = 3, request_id: str = "r", **sampling: float
) -> Task:
    options = SamplingOptions(**{"max_tokens": 12, "temperature": 1.0} | sampling)  # type: ignore[arg-type]
    return Task(request_id, seed, as_prompt(prompt) if prompt is not None else None, sampling=options)


async def test_text_is_streamed_and_usage_is_last(text_engine: VllmEngine) -> None:
    events = await collect(text_engine.submit(task([10, 20, 30], max_tokens=200)))
    # vLLM joins outputs that this process has not taken yet, so their number varies.
    assert len(packets(events)) > 1
    assert usage_of(events).prompt_tokens == 3
    assert 0 < usage_of(events).output_tokens <= 200


async def test_text_goes_through_the_chat_template(text_engine: VllmEngine) -> None:
    prompts = ("hi", Conversation([HI]))
    as_text, as_chat = [usage_of(await collect(text_engine.submit(task(prompt)))) for prompt in prompts]
    assert as_text == as_chat
    assert as_text.prompt_tokens == len("hi") + 3  # user, end, assistant


async def test_max_tokens_defaults_to_the_space_left(text_engine: VllmEngine) -> None:
    events = await collect(text_engine.submit(Task("r", 1, RawPrompt([10] * (MAX_MODEL_LEN - 5)))))
    assert usage_of(events).output_tokens <= 5


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (task(""), "the prompt is empty"),
        (task(None), "the prompt is empty"),
        (task([10**6]), "token id 1000000 is outside the model's vocabulary"),
        (task("a" * 300), r"context length is 256 tokens, but the prompt has 303 .* shorten the prompt"),
        (task(top_p=3.0), "top_p"),
        (task(temperature=-1.0), "temperature"),
        (task(max_tokens=0), "max_tokens"),
    ],
)
async def test_invalid_task_is_rejected(text_engine: VllmEngine, wrong: Task, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        await collect(text_engine.submit(wrong))


async def test_a_template_reads_the_name_of_an_author(text_engine: VllmEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    template = "{% for message in messages %}{{ message.name }}{% endfor %}"
    monkeypatch.setattr(text_engine.control.llm.get_tokenizer(), "chat_template", template)
    named = Conversation([ChatMessage("user", "hi", name="ada")])
    events = await collect(text_engine.submit(task(named, prompt_logprobs=0, max_tokens=1)))
    assert "".join(each.sampled.text for each in usage_of(events).prompt_logprobs) == "ada"


async def test_tools_need_a_template_that_has_them(text_engine: VllmEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_engine.control.llm.get_tokenizer(), "chat_template", CHAT_TEMPLATE)
    with pytest.raises(UnsupportedError, match="the model's chat template accepts no tools") as caught:
        await collect(text_engine.submit(task(Conversation([HI], [WEATHER]))))
    assert caught.value.metadata["ability"] == "tools"


async def test_pausing_is_rejected(text_engine: VllmEngine) -> None:
    with pytest.raises(UnsupportedError):
        await collect(text_engine.submit(Task("r", 1, "hi", max_steps=1)))


async def test_closing_a_task_ends_it(text_engine: VllmEngine) -> None:
    async with aclosing(text_engine.submit(task(max_tokens=200))) as events:
        await anext(events)
        assert text_engine.load().running == 1
    assert text_engine.load().running == 0
    assert not text_engine.control.llm.output_processor.has_unfinished_requests()


async def test_waiting_requests_start_by_priority(text_engine: VllmEngine) -> None:
    order, full = list[str](), asyncio.Event()

    async def run(name: str, priority: int, max_tokens: int) -> None:
        wanted = task(max_tokens=max_tokens, request_id=name, ignore_eos=True)
        async with aclosing(text_engine.submit(replace(wanted, priority=priority))) as events:
            await anext(events)
            order.append(name)
            if len(order) == AT_ONCE:
                full.set()
            await collect(events)

    async with asyncio.TaskGroup() as group:
        for number in range(AT_ONCE):
            group.create_task(run(str(number), 0, 240))
        await full.wait()
        for name, priority in (("one", 0), ("two", 0), ("urgent", 5)):
            group.create_task(run(name, priority, 12))
    assert order[AT_ONCE] == "urgent"
    assert sorted(order[AT_ONCE:]) == ["one", "two", "urgent"]


async def test_one_request_id_may_run_twice(text_engine: VllmEngine) -> None:
    first, second = await asyncio.gather(*(collect(text_engine.submit(task(max_tokens=30))) for _ in range(2)))
    assert text_of(first) == text_of(second)
    assert text_engine.load().running == 0


async def test_error_names_the_missing_option(text_engine: VllmEngine, tmp_path: Path) -> None:
    controls = controls_of(text_engine)
    with pytest.raises(NotReadyError, match="option enable_lora"):
        await controls.adapters.load("a", str(write_adapter(tmp_path)))
    with pytest.raises(NotFoundError, match="without the option enable_lora"):
        await collect(text_engine.submit(replace(task(), adapter="a")))
    with pytest.raises(NotReadyError, match="option profile_dir"):
        await controls.profiles.start("here", max_steps=None)
    assert controls.adapters.list_adapters() == []


async def test_unknown_option_error_names_similar_options(text_model: Path) -> None:
    with pytest.raises(InvalidRequestError, match=r"unknown option 'max_modl_len'.*max_model_len"):
        async with started(text_model, max_modl_len=5):
            pass


async def test_model_is_required() -> None:
    with pytest.raises(InvalidRequestError, match="needs a model"):
        VllmEngine(stage_config("vllm"))


async def test_error_names_a_folder_without_a_model(tmp_path: Path) -> None:
    with pytest.raises(NotReadyError, match=f"vLLM cannot load {tmp_path}"):
        async with started(tmp_path, **OPTIONS):
            pass


# -- conversations, and prompts without a template


def rendered(engine: VllmEngine, prompt: Prompt) -> str:
    llm = engine.control.llm
    return str(llm.get_tokenizer().decode(prompt_tokens(prompt, llm)))


async def test_template_receives_tools_their_calls_and_results(text_engine: VllmEngine) -> None:
    called = ChatMessage("assistant", tool_calls=[CALL, ToolCall("c2", "weather", {"city": "Rom"})])
    messages = [HI, called, ChatMessage("tool", "12 degrees", result_of=CALL)]
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
async def test_template_has_its_arguments(text_engine: VllmEngine, arguments: dict[str, JsonValue], end: str) -> None:
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
    with raises(InvalidRequestError, reason="INVALID_PROMPT", match=message):
        await collect(text_engine.submit(task(Conversation([HI], template_arguments=arguments))))


async def test_raw_text_goes_past_the_template(text_engine: VllmEngine) -> None:
    raw = "<|user|>hi<|end|><|assistant|>"
    assert rendered(text_engine, RawPrompt(raw)) == raw == rendered(text_engine, "hi")
    assert prompt_tokens(RawPrompt(raw), text_engine.control.llm) == prompt_tokens("hi", text_engine.control.llm)


async def test_conversation_with_tools_is_answered(text_engine: VllmEngine) -> None:
    conversation = Conversation([HI], [WEATHER])
    events = await collect(text_engine.submit(task(conversation, max_tokens=4)))
    assert usage_of(events).prompt_tokens == len(prompt_tokens(conversation, text_engine.control.llm))
