"""`/v1/completions`: text in, to which no chat template is applied, and its continuation out."""

from collections import defaultdict
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from itertools import accumulate, pairwise
from typing import Annotated, Any, TypeAlias, cast

from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError

from stagemesh.client import (
    AsyncResponseStream,
    Event,
    Finished,
    GenerateArguments,
    OutputFinished,
    Text,
    TokenLogprobs,
)
from stagemesh.gateway import parameters
from stagemesh.gateway.answers import DONE, LEAST_LOGPROB, now_s, respond, sse, usage_of
from stagemesh.gateway.body import SamplingBody, TokenIds, read_json
from stagemesh.gateway.catalog import Model, find_model
from stagemesh.gateway.routes.chat import FINISH_REASONS
from stagemesh.gateway.unions import LIST, TEXT, by_type

router = APIRouter()

_MAX_TOKENS = 16


def _single(prompt: object) -> object:
    """Returns the prompt of a list that contains one text or one list of token ids."""
    given = prompt
    prompts = cast("list[object]", given) if isinstance(given, list) else []
    if not prompts or type(prompts[0]) not in {str, list}:
        return prompt
    if len(prompts) > 1:
        raise PydanticCustomError("prompts", "A request has one prompt; send a request for each")
    return prompts[0]


_Prompt: TypeAlias = Annotated[
    Annotated[str, TEXT] | Annotated[TokenIds, LIST], by_type("a text or a list of token ids"), BeforeValidator(_single)
]


class CompletionBody(SamplingBody):
    """The body of a request for a completion."""

    rules = parameters.RULES["completions"]

    prompt: _Prompt
    max_tokens: int | None = None
    """16 by default, as in OpenAI's API."""
    logprobs: Annotated[int | None, Field(ge=0)] = None

    def arguments(self, model: Model) -> GenerateArguments:
        """Returns the arguments of the client for this request."""
        default = _MAX_TOKENS if model.chooses_tokens else None
        arguments = self.sampling_arguments(model, max_tokens=default if self.max_tokens is None else self.max_tokens)
        arguments["outputs"] = [model.require_output("text")]
        if self.logprobs is not None:
            arguments["logprobs"] = self.logprobs
        if isinstance(self.prompt, str):
            return arguments | {"raw_text": self.prompt}
        return arguments | {"token_ids": self.prompt}


@router.post("/v1/completions")
async def create_completion(request: Request) -> Response:
    """Continues a text."""
    body = await read_json(request, CompletionBody)
    model = await find_model(request, body.model)
    events = model.client.generate(**body.arguments(model))
    fields = {"id": f"cmpl-{events.request_id}", "object": "text_completion", "created": now_s(), "model": model.id}
    return await respond(
        request,
        events,
        streams=body.stream,
        chunks=lambda events: _chunks(events, model, fields, includes_usage=body.includes_usage),
        whole=lambda events: _whole(events, model, fields),
    )


async def _chunks(
    events: AsyncIterator[Event], model: Model, fields: dict[str, Any], *, includes_usage: bool
) -> AsyncGenerator[bytes]:
    made = defaultdict[int, bytearray](bytearray)
    async for event in events:
        if isinstance(event, Text):
            made[event.index] += event.delta.encode()
            yield sse({**fields, "choices": [_choice(event.index, event.delta, event.logprobs, made[event.index])]})
        elif isinstance(event, OutputFinished):
            yield sse({**fields, "choices": [_choice(event.index, "", (), b"", event.reason)]})
        elif isinstance(event, Finished) and includes_usage:
            yield sse({**fields, "choices": [], "usage": usage_of(event, model)})
    yield DONE


async def _whole(events: AsyncResponseStream, model: Model, fields: dict[str, Any]) -> dict[str, Any]:
    result, output = await events.result(), model.require_output("text")
    found = [
        _choice(n, each.text, each.logprobs.get(output, ()), each.text.encode(), each.finishes[output].reason)
        for n, each in enumerate(result.choices)
    ]
    return {**fields, "choices": found, "usage": usage_of(result.finished, model)}


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
