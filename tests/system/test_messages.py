"""Messages of a language model through a whole pipeline: separated in the stage, exact after its death."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import openai
import pytest

from stagemesh.client import Reasoning, Result, Text, Tool, ToolChoice
from stagemesh.client.responses import ResultBuilder
from tests.deployment import Deployment, deployed_for_module
from tests.engines.vllm.tiny_model import write_real_model
from tests.gateway.making import serving
from tests.system.pipelines import pipeline_file

pytestmark = pytest.mark.timeout(300)

TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool | tojson }} <tool_call>{% endfor %}"
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}<|end|>{% endfor %}"
    "<|assistant|>{% if think %}<think>{% endif %}"
)
PIPELINE = """\
pipeline: p
stages:
  thinker:
    engine: vllm
    model: {model}
    options: {{dtype: float32, kv_cache_memory_bytes: 33554432, checkpoint_tokens: 16}}
outputs:
  text: thinker
"""
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}
FIND, STOP = Tool("find", "Finds.", SCHEMA, strict=True), Tool("stop")
CALL = '<tool_call>\n{"name": "find", "arguments": {"city": "Rome"}}\n</tool_call>'


def write_pipeline(folder: Path) -> Path:
    model = write_real_model(folder / "model", positions=1024, deviation=0.2)
    settings = json.loads((model / "tokenizer_config.json").read_text())
    (model / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": TEMPLATE}))
    return pipeline_file(folder, PIPELINE.format(model=model))


up = deployed_for_module(write_pipeline)


def generate(up: Deployment, *, killed_after: int = -1, think: bool, tools: Sequence[Tool] = ()) -> Result:
    """Runs a request. Kills the stage when a number of parts of the message have arrived."""
    builder, count = ResultBuilder(), 0
    with up.client() as client:
        running = client.generate(
            messages=[("user", "Hi")],
            tools=tools,
            template_arguments={"think": think},
            parsed=True,
            temperature=1.0,
            max_tokens=300,
            ignore_eos=True,
            logprobs=0,
            seed=5,
        )
        for event in running:
            builder.add(event)
            count += isinstance(event, Text | Reasoning)
            if count == killed_after:
                up.kill("thinker-0")
                killed_after = -1
    assert killed_after == -1
    return builder.build()


@pytest.mark.parametrize("think", [True, False], ids=["reasoning", "text"])
def test_a_message_is_exact_if_the_stage_is_killed(up: Deployment, think: bool) -> None:
    asked: Any = {"think": think, "tools": [] if think else [STOP]}
    expected = generate(up, **asked)
    assert (len(expected.reasonings.get("text", "")) > 100, len(expected.text) > 100) == (think, not think)
    found = generate(up, killed_after=120, **asked)
    up.wait(Deployment.all_ready)
    assert (found.reasonings, found.texts) == (expected.reasonings, expected.texts)
    tokens = [[each.sampled.id for each in result.logprobs["text"]] for result in (expected, found)]
    assert tokens[0] == tokens[1]


@pytest.mark.asyncio
async def test_clients_of_the_gateway_receive_reasoning_and_calls(up: Deployment) -> None:
    text = f"<think>No {CALL}</think>Hm. {CALL}"
    tools = [{"type": "function", "function": {"name": "find", "parameters": SCHEMA, "strict": True}}]
    async with serving(up.endpoint) as address, openai.AsyncOpenAI(base_url=f"http://{address}/v1", api_key="x") as ai:
        create: Any = ai.chat.completions.create
        common: Any = {"model": "p", "messages": [{"role": "user", "content": "Hi"}], "tools": tools}
        stream = await create(**common, stream=True, extra_body={"structured_outputs": {"choice": [text]}})
        choices = [chunk.choices[0].model_dump() async for chunk in stream if chunk.choices]
        deltas = [choice["delta"] for choice in choices]
        assert "".join(each.get("reasoning_content") or "" for each in deltas) == f"No {CALL}"
        assert "".join(each["content"] or "" for each in deltas).strip() == "Hm."
        (call,) = (call["function"] for each in deltas for call in each["tool_calls"] or ())
        assert (call["name"], json.loads(call["arguments"])) == ("find", {"city": "Rome"})
        assert choices[-1]["finish_reason"] == "tool_calls"
        # A required call is made of the schema.
        choice = (await create(**common, tool_choice="required", max_tokens=100)).choices[0]
        made = choice.message.tool_calls[0].function
        assert (choice.finish_reason, made.name, made.arguments) == ("tool_calls", "find", '{"city": "Rome"}')
        choice = (
            await create(**common, tool_choice="required", max_tokens=len('{"name": "find", "arguments": {"ci'))
        ).choices[0]
        assert (choice.finish_reason, choice.message.tool_calls[0].function.arguments) == ("length", '{"ci')
        # The random text of the model contains no call.
        choice = (await create(**common, max_tokens=40, temperature=1.0, seed=1)).choices[0]
        assert (choice.message.tool_calls, len(choice.message.content or "") > 10) == (None, True)


def test_a_required_call_arrives_as_a_call(up: Deployment) -> None:
    with up.client() as client:
        result = client.generate(
            "Hi", tools=[FIND, STOP], tool_choice=ToolChoice(required=True, name="find"), parsed=True, max_tokens=100
        ).result()
    (call,) = result.tool_calls["text"]
    assert (call.name, call.arguments, result.text) == ("find", '{"city": "Rome"}', "")
