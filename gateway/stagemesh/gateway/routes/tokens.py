"""`/tokenize` and `/detokenize`, as vLLM's server has them: the tokens of a prompt, and the text of tokens."""

from typing import Any

from fastapi import APIRouter, Request
from pydantic import Field

from stagemesh.client import GenerateArguments, StageReport
from stagemesh.common.errors import UnsupportedError
from stagemesh.gateway.answers import until_disconnected
from stagemesh.gateway.body import Items, StageBody, TokenIds, read_json
from stagemesh.gateway.catalog import Model, find_model
from stagemesh.gateway.content import MessageBody
from stagemesh.gateway.errors import ParameterError
from stagemesh.gateway.routes.chat import ChatBody

router = APIRouter()


class TokenizeBody(ChatBody):
    """The body of a request for the tokens of a text, or of the conversation of a chat."""

    messages: Items[MessageBody] = Field(default_factory=list[MessageBody])
    prompt: str | None = None
    """A text to which no chat template is applied."""
    add_special_tokens: bool | None = None
    add_generation_prompt: bool = True
    return_token_strs: bool = False

    def arguments(self, model: Model) -> GenerateArguments:
        """Returns the arguments of the client for this request. Raises InvalidRequestError if some contradict."""
        if (self.prompt is None) is not bool(self.messages):
            raise ParameterError("prompt", "send either it or messages")
        if self.add_special_tokens is (self.prompt is None):
            raise ParameterError("add_special_tokens", "it is true for a prompt and false for messages; omit it")
        if self.prompt is not None:
            return self.stage_arguments(model) | {"raw_text": self.prompt}
        given = self.chat_template_kwargs or {}
        self.chat_template_kwargs = {**given, "add_generation_prompt": self.add_generation_prompt}
        return super().arguments(model)


class DetokenizeBody(StageBody):
    """The body of a request for the text of tokens."""

    tokens: TokenIds

    def arguments(self, model: Model) -> GenerateArguments:
        """Returns the arguments of the client for this request."""
        return self.stage_arguments(model) | {"token_ids": self.tokens}


@router.post("/tokenize")
async def tokenize(request: Request) -> dict[str, Any]:
    """Returns the tokens of a prompt, and the length of the model's context."""
    body = await read_json(request, TokenizeBody)
    report = await _read(request, body)
    tokens = [each.sampled for each in report.prompt_logprobs]
    texts = [token.text for token in tokens] if body.return_token_strs else None
    counts = {"count": len(tokens), "max_model_len": report.context_tokens}
    return {**counts, "tokens": [token.id for token in tokens], "token_strs": texts}


@router.post("/detokenize")
async def detokenize(request: Request) -> dict[str, str]:
    """Returns the text of tokens, with special tokens."""
    report = await _read(request, await read_json(request, DetokenizeBody))
    return {"prompt": "".join(each.sampled.text for each in report.prompt_logprobs)}


async def _read(request: Request, body: TokenizeBody | DetokenizeBody) -> StageReport:
    """Returns the report of the stage that makes the text of a model, with the tokens of the prompt."""
    model = await find_model(request, body.model)
    arguments, output = body.arguments(model), model.output("text")
    arguments |= {"tokens_only": True, "outputs": [model.require_output("text")]}
    result = await until_disconnected(request, model.client.generate(**arguments).result())
    report = result.finished.stages.get("" if output is None else output.stage)
    if report is None or not report.prompt_logprobs:
        raise UnsupportedError("the stage that makes the text of this model reports no tokens; use a vllm stage")
    return report
