"""`/v1/chat/completions`: a conversation in, and text, audio and tool calls out."""

import base64
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Annotated, Any, Literal, TypeAlias, cast
from uuid import uuid4

from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic import Field

from stagemesh.client import (
    AsyncResponseStream,
    AudioChunk,
    Event,
    Finished,
    GenerateArguments,
    OutputFinished,
    Reasoning,
    Text,
    TokenLogprob,
    TokenLogprobs,
    Tool,
    ToolCallPart,
    ToolChoice,
)
from stagemesh.client.content import JsonObject
from stagemesh.client.responses import join_calls
from stagemesh.gateway import parameters
from stagemesh.gateway.answers import DONE, LEAST_LOGPROB, now_s, respond, sse, usage_of
from stagemesh.gateway.audio import AnswerEncoder, AudioFormat
from stagemesh.gateway.body import Body, Function, Items, Object, SamplingBody, VoiceId, aside, option_values, read_json
from stagemesh.gateway.catalog import Model, find_model
from stagemesh.gateway.content import MessageBody
from stagemesh.gateway.errors import ParameterError
from stagemesh.gateway.unions import OBJECT, TEXT, by_type

router = APIRouter()

FINISH_REASONS: Mapping[str, str] = {"limit": "length", "length": "length"}
"""OpenAI's reasons why an answer ends, by the reasons of outputs. Others are "stop"."""


class FunctionBody(Function):
    """A function that the model may call."""

    strict: bool | None = None

    def to_tool(self) -> Tool:
        return replace(super().to_tool(), strict=bool(self.strict))


class ToolBody(Body):
    """A tool: always a function."""

    rules = parameters.RULES["tool"]

    type: Literal["function"]
    function: FunctionBody


class FunctionName(Body):
    """The name of a function."""

    name: str


class NamedTool(Body):
    """The tool that the model must call."""

    type: Literal["function"]
    function: FunctionName


_ToolChoice: TypeAlias = Annotated[
    Annotated[Literal["auto", "none", "required"], TEXT] | Annotated[NamedTool, OBJECT],
    by_type("auto, none, required, or an object with a function"),
]


class AudioBody(Body):
    """How the model speaks."""

    format: AudioFormat
    voice: VoiceId = None


class SchemaBody(Body):
    """A JSON schema with a name."""

    name: str = ""
    description: str = ""
    schema_: Annotated[Object, Field(alias="schema")]
    strict: bool | None = None


class ResponseFormat(Body):
    """The structure of the text."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: SchemaBody | None = None


class StructuredOutputs(Body):
    """The structure of the text, as vLLM has it, by the names of the client's arguments. Exactly one of them."""

    json_schema: Annotated[Object | None, Field(alias="json")] = None
    regex: str | None = None
    allowed_texts: Annotated[Items[str] | None, Field(alias="choice")] = None
    grammar: str | None = None


class ChatBody(SamplingBody):
    """The body of a request for a chat completion."""

    rules = parameters.RULES["chat"]

    messages: Annotated[Items[MessageBody], Field(min_length=1)]
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int | None, Field(ge=0)] = None
    tools: Items[ToolBody] | None = None
    tool_choice: _ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    """False if the answer has at most one tool call."""
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    modalities: Items[Literal["text", "audio"]] | None = None
    audio: AudioBody | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    def arguments(self, model: Model) -> GenerateArguments:
        """Returns the arguments of the client for this request. Raises InvalidRequestError if some contradict."""
        if len({self.max_tokens, self.max_completion_tokens} - {None}) > 1:
            raise ParameterError("max_tokens", "it contradicts max_completion_tokens; send one of them")
        if self.top_logprobs and not self.logprobs:
            raise ParameterError("top_logprobs", "it needs logprobs: true")
        most = self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
        arguments = self.sampling_arguments(model, max_tokens=most)
        arguments["messages"] = [message.to_message(index) for index, message in enumerate(self.messages)]
        arguments["outputs"], arguments["parsed"] = self._outputs(model), True
        if self.tools and self.tool_choice != "none":
            arguments["tools"] = [tool.function.to_tool() for tool in self.tools]
            arguments["tool_choice"] = self._calls()
        elif self._requires_call:
            raise ParameterError("tools", 'tool_choice "required" needs tools')
        if self.logprobs:
            arguments["logprobs"] = self.top_logprobs or 0
        if self.chat_template_kwargs:
            arguments["template_arguments"] = self.chat_template_kwargs
        if self.audio is not None:
            arguments["options"] = {**self.options, **option_values(model, self.audio, "voice", within="audio.")}
        return arguments | self._structure()

    @property
    def _requires_call(self) -> bool:
        return self.tool_choice == "required" or isinstance(self.tool_choice, NamedTool)

    @property
    def speaks(self) -> bool:
        """Whether the answer is spoken."""
        return "audio" in (self.modalities or ())

    def _outputs(self, model: Model) -> list[str]:
        if self.speaks != (self.audio is not None):
            raise ParameterError("audio", 'it belongs to modalities: ["text", "audio"]; send both or none of them')
        names = [model.require_output("text")]
        if self.audio is not None:
            if self.stream and self.audio.format != "pcm16":
                raise ParameterError("audio.format", "a stream has pcm16 alone")
            names.append(model.require_output("audio", param="modalities"))
        return names

    def _calls(self) -> ToolChoice:
        """Returns how the model uses the tools. Raises ParameterError if it must call one that is none of them."""
        name = self.tool_choice.function.name if isinstance(self.tool_choice, NamedTool) else ""
        if name and name not in {tool.function.name for tool in self.tools or ()}:
            raise ParameterError("tool_choice", f"no tool has the name {name[:100]!r}; use one of `tools`")
        return ToolChoice(required=self._requires_call, name=name, single=self.parallel_tool_calls is False)

    def _structure(self) -> GenerateArguments:
        wanted, given = self.response_format, self.structured_outputs
        if self._requires_call and (given is not None or (wanted is not None and wanted.type != "text")):
            raise ParameterError("tool_choice", "a required call contradicts response_format and structured_outputs")
        if wanted is not None and wanted.type != "text":
            if given is not None:
                raise ParameterError("structured_outputs", "it contradicts response_format; send one of them")
            if wanted.type == "json_object":
                return {"json_schema": {"type": "object"}}
            if wanted.json_schema is None:
                raise ParameterError("response_format.json_schema", "it is missing")
            return {"json_schema": wanted.json_schema.schema_}
        if given is None:
            return {}
        return cast("GenerateArguments", {name: value for name, value in given if value is not None})


@router.post("/v1/chat/completions")
async def create_chat_completion(request: Request) -> Response:
    """Answers a conversation."""
    body = await read_json(request, ChatBody)
    model = await find_model(request, body.model)
    arguments = await aside(partial(body.arguments, model), size_bytes=len(await request.body()))
    events = model.client.generate(**arguments)
    answer = _Answer(body, model, f"chatcmpl-{events.request_id}")
    return await respond(request, events, streams=body.stream, chunks=answer.chunks, whole=answer.whole)


Piece: TypeAlias = Text | Reasoning | ToolCallPart | bytes
"""A part that an event adds to a message: the event itself, or audio in the requested format."""
_Event: TypeAlias = Text | Reasoning | ToolCallPart | AudioChunk | OutputFinished


class _Choice:
    """One of the choices of an answer: converts its events to pieces of a message."""

    def __init__(self, body: ChatBody, model: Model) -> None:
        self._encoder = AnswerEncoder(body.audio.format) if body.audio is not None else None
        self._text = model.require_output("text")
        self._running = 2 if body.speaks else 1
        self.audio_id = f"audio_{uuid4().hex}" if body.speaks else ""
        self._has_calls = False
        self._logprobs: list[TokenLogprobs] = []
        """The log-probabilities of tokens that have not been reported."""
        self._reason = ""

    @property
    def finish_reason(self) -> str | None:
        """OpenAI's reason why the choice ended, or None if one of its outputs has not ended."""
        if self._running:
            return None
        return "tool_calls" if self._has_calls and self._reason == "stop" else self._reason

    def take_logprobs(self) -> dict[str, Any] | None:
        """Returns the log-probabilities that have not been reported, or None if there are none."""
        taken, self._logprobs = self._logprobs, []
        return {"content": [to_logprob(each) for each in taken]} if taken else None

    def changes(self, event: _Event) -> Iterator[dict[str, Any]]:
        """Yields the choices of OpenAI's chunks for the event."""
        for piece in self.pieces(event):
            if piece:
                yield {"delta": _delta(piece, self), "logprobs": self.take_logprobs()}
        if isinstance(event, OutputFinished) and self.finish_reason is not None:
            yield {"delta": {}, "finish_reason": self.finish_reason}

    def pieces(self, event: _Event) -> Iterator[Piece]:
        """Yields what the event adds to the message."""
        match event:
            case AudioChunk():
                assert self._encoder is not None, "audio was requested"
                yield self._encoder.push(event)
            case OutputFinished():
                self._running -= 1
                if event.output == self._text:
                    self._reason = FINISH_REASONS.get(event.reason, "stop")
                elif self._encoder is not None:
                    yield self._encoder.finish()
            case _:
                self._logprobs += event.logprobs
                self._has_calls |= isinstance(event, ToolCallPart)
                yield event


class _Answer:
    """The answer to a request: as chunks while its events arrive, or whole."""

    def __init__(self, body: ChatBody, model: Model, answer_id: str) -> None:
        self._model, self._includes_usage = model, body.includes_usage
        self._choices = [_Choice(body, model) for _ in range(body.n or 1)]
        self._fields = {"id": answer_id, "created": now_s(), "model": model.id}

    async def chunks(self, events: AsyncIterator[Event]) -> AsyncGenerator[bytes]:
        """Yields the events of a stream. The role of each choice is sent together with the choice's first output."""
        common: dict[str, Any] = {"object": "chat.completion.chunk", **self._fields}
        if self._includes_usage:
            common["usage"] = None

        def chunk(index: int, change: Mapping[str, Any]) -> bytes:
            choice = {"index": index, "logprobs": None, "finish_reason": None, **change}
            return sse({**common, "choices": [choice]})

        silent = set(range(len(self._choices)))
        async for event in events:
            if isinstance(event, _Event):
                changes = list(self._choices[event.index].changes(event))
                if event.index in silent:
                    silent.remove(event.index)
                    changes.insert(0, {"delta": {"role": "assistant", "content": ""}})
                if changes:
                    yield b"".join(chunk(event.index, change) for change in changes)
            elif isinstance(event, Finished) and self._includes_usage:
                yield sse({**common, "choices": [], "usage": usage_of(event, self._model)})
        yield DONE

    async def whole(self, events: AsyncResponseStream) -> dict[str, Any]:
        """Returns the whole answer."""
        pieces: list[list[Piece]] = [[] for _ in self._choices]
        usage: Mapping[str, Any] = {}
        async for event in events:
            if isinstance(event, _Event):
                pieces[event.index] += self._choices[event.index].pieces(event)
            elif isinstance(event, Finished):
                usage = usage_of(event, self._model)
        choices = [{"index": n, **_whole_choice(choice, pieces[n])} for n, choice in enumerate(self._choices)]
        return {"object": "chat.completion", **self._fields, "choices": choices, "usage": usage}


def _whole_choice(choice: _Choice, pieces: Sequence[Piece]) -> dict[str, Any]:
    """Returns a choice with its message, which consists of these pieces, in OpenAI's form."""
    text = "".join(piece.delta for piece in pieces if isinstance(piece, Text))
    reasoning = "".join(piece.delta for piece in pieces if isinstance(piece, Reasoning))
    calls = [
        _tool_call(call.id, call.name, call.arguments)
        for call in join_calls(piece for piece in pieces if isinstance(piece, ToolCallPart))
    ]
    message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
    if choice.audio_id:
        audio = b"".join(piece for piece in pieces if isinstance(piece, bytes))
        message["content"] = None
        message["audio"] = {
            "id": choice.audio_id,
            "data": base64.b64encode(audio).decode(),
            "transcript": text,
            # The audio is not kept: a later request cannot refer to it.
            "expires_at": now_s(),
        }
    if reasoning:
        message |= _reasoning(reasoning)
    if calls:
        message |= {"tool_calls": calls, "content": text or None}
    return {"message": message, "logprobs": choice.take_logprobs(), "finish_reason": choice.finish_reason}


def _delta(piece: Piece, choice: _Choice) -> dict[str, Any]:
    match piece:
        case Text() if choice.audio_id:
            return {"audio": {"id": choice.audio_id, "transcript": piece.delta}}
        case Text():
            return {"content": piece.delta}
        case Reasoning():
            return _reasoning(piece.delta)
        case bytes():
            return {"audio": {"id": choice.audio_id, "data": base64.b64encode(piece).decode()}}
        case ToolCallPart(name=""):
            return {"tool_calls": [{"index": piece.call, "function": {"arguments": piece.arguments}}]}
        case ToolCallPart():
            return {"tool_calls": [{"index": piece.call, **_tool_call(piece.id, piece.name, piece.arguments)}]}


def _reasoning(text: str) -> dict[str, str]:
    """Returns the fields of reasoning, which vLLM has renamed."""
    return {"reasoning_content": text, "reasoning": text}


def _tool_call(call_id: str, name: str, arguments: JsonObject) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def to_logprob(token: TokenLogprobs) -> dict[str, Any]:
    """Returns the log-probabilities of a token in OpenAI's form."""
    return {**_token(token.sampled), "top_logprobs": [_token(top) for top in token.top]}


def _token(token: TokenLogprob) -> dict[str, Any]:
    return {"token": token.text, "logprob": max(token.logprob, LEAST_LOGPROB), "bytes": list(token.text.encode())}
