"""`/v1/completions`: text in, to which no chat template is applied, and its continuation out."""

import asyncio
from collections import defaultdict
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from dataclasses import replace
from itertools import accumulate, chain, pairwise
from typing import Annotated, Any, TypeAlias, cast

from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic import BeforeValidator, Field

from stagemesh.client import (
    AsyncResponseStream,
    Event,
    Finished,
    GenerateArguments,
    OutputFinished,
    StageReport,
    Text,
    TokenLogprobs,
)
from stagemesh.common.tasks import end_tasks
from stagemesh.gateway import parameters
from stagemesh.gateway.answers import DONE, LEAST_LOGPROB, now_s, respond, sse, usage_of, usage_so_far
from stagemesh.gateway.body import SamplingBody, TokenIds, aside, read_json
from stagemesh.gateway.catalog import Model, find_model
from stagemesh.gateway.errors import ParameterError
from stagemesh.gateway.routes.chat import FINISH_REASONS
from stagemesh.gateway.unions import LIST, TEXT, by_type

router = APIRouter()

_MAX_TOKENS = 16


_MAX_PROMPTS = 64
"""The maximum number of prompts of a request, and of the choices of several prompts. They run at the same time."""
_SCORED_BYTES = 200
"""The approximate size of a token's log-probability in an answer, in bytes."""
_MAX_SCORED = 1 << 19
"""The maximum number of log-probabilities of a request's prompts. A text counts as one token for each character."""


def _as_list(prompt: object) -> object:
    """Returns a list of prompts. A text, or a list of token ids, is a single prompt."""
    given = prompt
    prompts = cast("list[object]", given) if isinstance(given, list) else []
    return prompt if prompts and type(prompts[0]) in {str, list} else [prompt]


_Prompt: TypeAlias = Annotated[
    Annotated[str, TEXT] | Annotated[TokenIds, LIST], by_type("a text or a list of token ids")
]


class CompletionBody(SamplingBody):
    """The body of a request for completions."""

    rules = parameters.RULES["completions"]

    prompt: Annotated[list[_Prompt], Field(max_length=_MAX_PROMPTS, fail_fast=True), BeforeValidator(_as_list)]
    max_tokens: Annotated[int | None, Field(ge=0)] = None
    """16 by default, as in OpenAI's API."""
    logprobs: Annotated[int | None, Field(ge=0)] = None
    echo: bool = False
    """Whether the text of an answer begins with its prompt."""

    def arguments(self, model: Model, prompt: str | list[int]) -> GenerateArguments:
        """Returns the arguments of the client for a prompt. Raises InvalidRequestError if some contradict."""
        if self.max_tokens == 0 and not self.echo:
            raise ParameterError("max_tokens", "it is 0, which needs echo: true")
        if self.stream and (self.echo or len(self.prompt) > 1):
            raise ParameterError("stream", "echo and several prompts are answered as a whole; omit it")
        if self.echo and self.n not in {None, 1}:
            raise ParameterError("n", "an answer with echo has one choice; omit it")
        if len(self.prompt) > 1 and len(self.prompt) * (self.n or 1) > _MAX_PROMPTS:
            raise ParameterError("n", f"the prompts have more than {_MAX_PROMPTS} choices; send several requests")
        if self.echo and sum(map(len, self.prompt)) * (1 + (self.logprobs or 0)) > _MAX_SCORED:
            raise ParameterError("logprobs", f"the prompts have more than {_MAX_SCORED:,}; send several requests")
        default = _MAX_TOKENS if model.chooses_tokens else None
        # A stage samples at least one token.
        most = default if self.max_tokens is None else max(1, self.max_tokens)
        arguments = self.sampling_arguments(model, max_tokens=most)
        arguments["outputs"] = [model.require_output("text")]
        if self.logprobs is not None:
            arguments["logprobs"] = self.logprobs
        if self.echo and (self.logprobs is not None or not isinstance(prompt, str)):
            # They also have the text of the tokens.
            arguments["prompt_logprobs"] = self.logprobs or 0
        if isinstance(prompt, str):
            return arguments | {"raw_text": prompt}
        return arguments | {"token_ids": prompt}


@router.post("/v1/completions")
async def create_completion(request: Request) -> Response:
    """Continues a text, or each of several texts."""
    body = await read_json(request, CompletionBody)
    model = await find_model(request, body.model)
    answers = [model.client.generate(**body.arguments(model, prompt)) for prompt in body.prompt]
    name = f"cmpl-{answers[0].request_id}"
    fields = {"id": name, "object": "text_completion", "created": now_s(), "model": model.id}
    return await respond(
        request,
        answers[0],
        streams=body.stream,
        chunks=lambda events: _chunks(events, model, fields, includes_usage=body.includes_usage),
        whole=lambda _: _whole(answers, body, model, fields),
    )


async def _chunks(
    events: AsyncIterator[Event], model: Model, fields: dict[str, Any], *, includes_usage: bool
) -> AsyncGenerator[bytes]:
    made = defaultdict[int, bytearray](bytearray)
    async for event in events:
        if isinstance(event, Text):
            made[event.index] += event.delta.encode()
            choice = _choice(event.index, event.delta, event.logprobs, made[event.index])
            yield sse({**fields, **usage_so_far(event), "choices": [choice]})
        elif isinstance(event, OutputFinished):
            choice = _choice(event.index, "", (), b"", event.reason)
            yield sse({**fields, **usage_so_far(event), "choices": [choice]})
        elif isinstance(event, Finished) and includes_usage:
            yield sse({**fields, "choices": [], "usage": usage_of(event, model)})
    yield DONE


async def _whole(
    answers: Sequence[AsyncResponseStream], body: CompletionBody, model: Model, fields: dict[str, Any]
) -> dict[str, Any]:
    tasks = [asyncio.create_task(each.result()) for each in answers]
    try:
        results = await asyncio.gather(*tasks)
    finally:
        await end_tasks(tasks)
    reports = tuple(chain.from_iterable(result.finished.choices for result in results))
    choices = chain.from_iterable(result.choices for result in results)
    output = model.output("text")
    assert output is not None, "the request has this output"

    def made() -> list[dict[str, Any]]:
        found = list[dict[str, Any]]()
        for index, (choice, stages) in enumerate(zip(choices, reports, strict=True)):
            tokens, reason = choice.logprobs.get(output.name, ()), choice.finishes[output.name].reason
            if body.echo:
                found.append(_echo(body, index, choice.text, tokens, report=stages[output.stage], reason=reason))
            else:
                found.append(_choice(index, choice.text, tokens, choice.text.encode(), reason))
        return found

    usage = usage_of(replace(results[0].finished, choices=reports), model)
    if body.max_tokens == 0:
        usage |= {"completion_tokens": 0, "total_tokens": usage["prompt_tokens"]}
    scored = sum(len(stages[output.stage].prompt_logprobs) for stages in reports) if body.echo else 0
    return {**fields, "choices": await aside(made, size_bytes=scored * _SCORED_BYTES), "usage": usage}


def _echo(
    body: CompletionBody, index: int, text: str, tokens: Sequence[TokenLogprobs], *, report: StageReport, reason: str
) -> dict[str, Any]:
    """Returns a choice that begins with its prompt.

    The first token of the prompt has no log-probability. A generated token without text, such as the one that ends the
    text, has none either. The text of a prompt lacks the special tokens that a tokenizer adds at its start. Their
    offset is 0.
    """
    silent = report.usage.output_tokens - len(tokens)
    if body.max_tokens == 0:
        text, tokens, silent, reason = "", (), 0, "length"
    prompt, before = body.prompt[index], "".join(each.sampled.text for each in report.prompt_logprobs)
    if isinstance(prompt, str):
        added = len(before.encode()) - len(prompt.encode())
        before, known = prompt, report.prompt_logprobs
        report = replace(
            report, prompt_logprobs=tuple(replace(each, position=max(0, each.position - added)) for each in known)
        )
    shifted = (replace(each, position=each.position + len(before.encode())) for each in tokens)
    scored = () if body.logprobs is None else (*report.prompt_logprobs, *shifted)
    answer = _choice(index, before + text, scored, (before + text).encode(), reason)
    if scored:
        logprobs: dict[str, list[Any]] = answer["logprobs"]
        logprobs["token_logprobs"][0] = logprobs["top_logprobs"][0] = None
        for values, absent in zip(logprobs.values(), ("", None, None, len(before + text)), strict=True):
            values.extend([absent] * silent)
    return answer


def _choice(
    index: int, text: str, tokens: Sequence[TokenLogprobs], made: bytes | bytearray, reason: str | None = None
) -> dict[str, Any]:
    """Returns a choice, or a part of one. `made` is the whole text of the choice so far, in UTF-8."""
    # Positions count bytes, and OpenAI's offsets characters.
    ends = pairwise((0, *(each.position for each in tokens)))
    offsets = accumulate(len(made[begin:end].decode(errors="ignore")) for begin, end in ends)
    logprobs = {
        "tokens": [each.sampled.text for each in tokens],
        "token_logprobs": [max(each.sampled.logprob, LEAST_LOGPROB) for each in tokens],
        "top_logprobs": [{top.text: max(top.logprob, LEAST_LOGPROB) for top in each.top} for each in tokens],
        "text_offset": list(offsets),
    }
    known = reason and FINISH_REASONS.get(reason, "stop")
    return {"index": index, "text": text, "logprobs": logprobs if tokens else None, "finish_reason": known}
