"""Requests to a gateway in this process, whose orchestrator follows a script."""

from functools import partial
from typing import Any

import openai
import pytest

from stagemesh.v1.orchestrator_pb2 import GenerateResponse
from stagemesh.v1.request_pb2 import Output, TokenLogprob, TokenLogprobs
from tests.client.scripted import admitted, ended, finished, served, text
from tests.gateway.making import ask, asking


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
async def test_zero_tokens_are_not_the_default(name: str) -> None:
    async with served() as orchestrator, asking(orchestrator) as ai:
        orchestrator.scripts.append([admitted(), ended(), finished()])
        await ask(ai, **{name: 0})
        sampling = orchestrator.requests[0].parameters.sampling
        assert sampling.HasField("max_tokens")
        assert sampling.max_tokens == 0


@pytest.mark.parametrize(
    "stages",
    [{"talker": {"options": 5}}, {"talker": {"temperature": "hot"}}, {"talker": {"heat": 1}}, {"talker": {"stop": 3}}],
)
async def test_wrong_parameters_of_stages_are_rejected(stages: object) -> None:
    async with served() as orchestrator, asking(orchestrator) as ai:
        with pytest.raises(openai.BadRequestError):
            await ask(ai, extra_body={"stages": stages})
        assert not orchestrator.requests


@pytest.mark.parametrize("stream", [True, False])
async def test_an_impossible_token_has_the_least_logprob(stream: bool) -> None:
    impossible = TokenLogprob(id=1, text="x", logprob=float("-inf"))
    output = Output(name="text", text="x", logprobs=[TokenLogprobs(sampled=impossible, top=[impossible])])
    async with served() as orchestrator, asking(orchestrator) as ai:
        orchestrator.scripts.append([admitted(), GenerateResponse(output=output), ended(), finished()])
        answer = await ask(ai, logprobs=True, top_logprobs=1, stream=stream)
        choices = [choice async for chunk in answer for choice in chunk.choices] if stream else answer.choices
        tokens = [each for choice in choices if choice.logprobs for each in choice.logprobs.content]
        assert [(each.logprob, each.top_logprobs[0].logprob) for each in tokens] == [(-9999.0, -9999.0)]


@pytest.mark.parametrize("stream", [True, False])
async def test_text_offsets_count_characters(stream: bool) -> None:
    # The tokens are "a", "é", the first half of the emoji, the rest of it, "e", and an accent that joins the "e".
    parts = {"aé": [0, 1], "🙂": [3, 3], "e": [7], "\u0301": [8]}
    outputs = [
        Output(name="text", text=part, logprobs=[TokenLogprobs(position=position) for position in positions])
        for part, positions in parts.items()
    ]
    async with served() as orchestrator, asking(orchestrator) as ai:
        orchestrator.scripts.append(
            [admitted(), *(GenerateResponse(output=each) for each in outputs), ended(), finished()]
        )
        answer: Any = await ai.completions.create(model="p", prompt="hello", logprobs=0, stream=stream)
        choices = [choice async for chunk in answer for choice in chunk.choices] if stream else answer.choices
        offsets = [offset for choice in choices if choice.logprobs for offset in choice.logprobs.text_offset]
    assert "".join(choice.text for choice in choices) == "aé🙂e\u0301"
    assert offsets == [0, 1, 2, 2, 3, 4]


@pytest.mark.parametrize("kind", ["chat", "completion"])
async def test_each_part_of_a_stream_may_have_the_usage_so_far(kind: str) -> None:
    part, end = text("so"), ended()
    for place, each in enumerate((part, end)):
        each.output.prompt_tokens, each.output.output_tokens = 5, 1 + place
    async with served() as orchestrator, asking(orchestrator) as ai:
        orchestrator.scripts.append([admitted(), part, end, finished()])
        options: Any = {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
        complete: Any = partial(ask, ai) if kind == "chat" else partial(ai.completions.create, model="p", prompt="x")
        used = [chunk.usage.total_tokens async for chunk in await complete(**options)]
        assert used == ([6, 6, 7, 7] if kind == "chat" else [6, 7, 7])
        assert orchestrator.requests[0].parameters.sampling.count_tokens


async def test_prompts_are_tokenized_without_the_model() -> None:
    end = finished()
    report = end.finished.choices[0].stages["thinker"]
    report.context_tokens = 99
    for number, part in enumerate(("<s>", "hé", "llo")):
        report.prompt_logprobs.add(sampled=TokenLogprob(id=number, text=part))
    async with served() as orchestrator, asking(orchestrator) as ai:
        orchestrator.description.outputs[0].stage = "thinker"
        orchestrator.scripts.append([admitted(), ended(), end])
        counted = {"count": 3, "max_model_len": 99, "tokens": [0, 1, 2]}

        async def post(path: str, **fields: Any) -> Any:
            return await ai.post(f"http://gateway/{path}", body={"model": "p", **fields}, cast_to=object)

        assert await post("tokenize", prompt="héllo") == {**counted, "token_strs": None}
        assert orchestrator.requests[0].input.raw_text == "héllo"
        assert orchestrator.requests[0].parameters.sampling.tokens_only
        chat = {"messages": [{"role": "user", "content": "x"}], "add_generation_prompt": False}
        asked = await post("tokenize", **chat, return_token_strs=True)
        assert asked == {**counted, "token_strs": ["<s>", "hé", "llo"]}
        assert orchestrator.requests[1].input.conversation.template_arguments == '{"add_generation_prompt": false}'
        assert await post("detokenize", tokens=[0, 1, 2]) == {"prompt": "<s>héllo"}
        assert list(orchestrator.requests[2].input.token_ids.ids) == [0, 1, 2]
        for wrong in ({}, {**chat, "prompt": "x"}, {"prompt": "x", "add_special_tokens": False}):
            with pytest.raises(openai.BadRequestError):
                await post("tokenize", **wrong)
