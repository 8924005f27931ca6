"""`/v1/chat/completions`: a conversation in, and text, audio and tool calls out."""

import base64
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Annotated, Any, Literal, Self, TypeAlias, cast
from uuid import uuid4

from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic import Field, model_validator

from stagemesh.client import (
    AsyncResponseStream,
    AudioChunk,
    Choice,
    Event,
    Finished,
    GenerateArguments,
    OutputFinished,
    Reasoning,
    Text,
    TokenLogprob,
    TokenLogprobs,
    ToolCallPart,
)
from stagemesh.client.content import JsonObject
from stagemesh.gateway import parameters
from stagemesh.gateway.answers import DONE, LEAST_LOGPROB, now_s, respond, sse, usage_of, usage_so_far
from stagemesh.gateway.audio import AnswerEncoder, AudioFormat
from stagemesh.gateway.body import Body, Items, Object, SamplingBody, VoiceId, aside, option_values, read_json
from stagemesh.gateway.catalog import Model, find_model
from stagemesh.gateway.content import MessageBody, VideoPart
from stagemesh.gateway.errors import ParameterError
from stagemesh.gateway.tools import Calls, Function, FunctionName, tool_arguments
from stagemesh.gateway.unions import OBJECT, TEXT, by_type

router = APIRouter()

FINISH_REASONS: Mapping[str, str] = {"limit": "length", "length": "length"}
"""OpenAI's reasons why an answer ends, by the reasons of outputs. Others are "stop"."""


class ToolBody(Body):
    """A tool: always a function."""

    rules = parameters.RULES["tool"]

    type: Literal["function"]
    function: Function


class NamedTool(Body):
    """The tool that the model must call."""

    type: Literal["function"]
    function: FunctionName


_ToolChoice: TypeAlias = Annotated[
    Annotated[Calls, TEXT] | Annotated[NamedTool, OBJECT], by_type("auto, none, required, or an object with a function")
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
    mm_processor_kwargs: dict[Literal["use_audio_in_video"], bool] | None = None

    @model_validator(mode="after")
    def _apply_defaults(self) -> Self:
        """Sets the format of an answer that is spoken, and the audio tracks of all videos, as vLLM-Omni does."""
        if self.speaks and self.audio is None:
            self.audio = AudioBody(format="pcm16" if self.stream else "wav")
        contents = (message.content for message in self.messages if isinstance(message.content, list))
        for part in chain.from_iterable(contents) if (self.mm_processor_kwargs or {}).get("use_audio_in_video") else ():
            if isinstance(part, VideoPart):
                part.video_url.use_audio = True
        return self

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
        choice = self.tool_choice.function if isinstance(self.tool_choice, NamedTool) else self.tool_choice
        tools = [tool.function for tool in self.tools or ()]
        arguments |= tool_arguments(tools, choice, parallel=self.parallel_tool_calls)
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
        if self.audio is not None and not self.speaks:
            raise ParameterError("audio", 'it needs modalities: ["text", "audio"]; send both or none of them')
        names = [model.require_output("text")]
        if self.audio is not None:
            if self.stream and self.audio.format != "pcm16":
                raise ParameterError("audio.format", "a stream has pcm16 alone")
            names.append(model.require_output("audio", param="modalities"))
        return names

    def _structure(self) -> GenerateArguments:
        wanted, given = self.response_format, self.structured_outputs
        if self._requires_call:
            if given is not None:
                raise ParameterError("tool_choice", "a required call contradicts structured_outputs")
            # It is the structure of a text, and the answer has none.
            return {}
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


_Event: TypeAlias = Text | Reasoning | ToolCallPart | AudioChunk | OutputFinished


class _ChoiceStream:
    """One of the choices of a stream: converts its events to changes in OpenAI's form."""

    def __init__(self, body: ChatBody, text_output: str) -> None:
        self._encoder = AnswerEncoder(body.audio.format) if body.audio is not None else None
        self._audio_id = _new_audio_id()
        self._text_output, self._reason = text_output, ""
        self._running = 2 if body.speaks else 1
        """The number of outputs that have not ended."""
        self._has_begun = self._has_calls = False

    def changes(self, event: _Event) -> Iterator[dict[str, Any]]:
        """Yields what changes with an event. The role is sent together with the first output."""
        if not self._has_begun:
            self._has_begun = True
            yield {"delta": {"role": "assistant", "content": ""}}
        if delta := self._delta(event):
            yield {"delta": delta, "logprobs": _logprobs(getattr(event, "logprobs", ()))}
        if isinstance(event, OutputFinished):
            self._running -= 1
            if event.output == self._text_output:
                self._reason = event.reason
            if not self._running:
                yield {"delta": {}, "finish_reason": _finish_reason(self._reason, has_calls=self._has_calls)}

    def _delta(self, event: _Event) -> dict[str, Any]:
        delta: dict[str, Any] = {}
        match event:
            case Text() if self._encoder is not None:
                delta = {"audio": {"id": self._audio_id, "transcript": event.delta}}
            case Text():
                delta = {"content": event.delta}
            case Reasoning():
                delta = _reasoning(event.delta)
            case ToolCallPart(name=""):
                delta = {"tool_calls": [{"index": event.call, "function": {"arguments": event.arguments}}]}
            case ToolCallPart():
                self._has_calls = True
                delta = {"tool_calls": [{"index": event.call, **_tool_call(event.id, event.name, event.arguments)}]}
            case AudioChunk() if self._encoder is not None:
                delta = self._audio(self._encoder.push(event))
            case OutputFinished() if self._encoder is not None and event.output != self._text_output:
                delta = self._audio(self._encoder.finish())
            case _:
                pass
        return delta

    def _audio(self, data: bytes) -> dict[str, Any]:
        return {"audio": {"id": self._audio_id, "data": base64.b64encode(data).decode()}} if data else {}


class _Answer:
    """The answer to a request: as chunks while its events arrive, or whole."""

    def __init__(self, body: ChatBody, model: Model, answer_id: str) -> None:
        self._body, self._model = body, model
        self._fields = {"id": answer_id, "created": now_s(), "model": model.id}

    async def chunks(self, events: AsyncIterator[Event]) -> AsyncGenerator[bytes]:
        """Yields the events of a stream."""
        common: dict[str, Any] = {"object": "chat.completion.chunk", **self._fields}
        if self._body.includes_usage:
            common["usage"] = None
        text_output = self._model.require_output("text")
        choices = [_ChoiceStream(self._body, text_output) for _ in range(self._body.n or 1)]
        async for event in events:
            if isinstance(event, _Event):
                choice = {"index": event.index, "logprobs": None, "finish_reason": None}
                changes = choices[event.index].changes(event)
                fields = common | usage_so_far(event)
                if part := b"".join(sse({**fields, "choices": [choice | change]}) for change in changes):
                    yield part
            elif isinstance(event, Finished) and self._body.includes_usage:
                yield sse({**common, "choices": [], "usage": usage_of(event, self._model)})
        yield DONE

    async def whole(self, events: AsyncResponseStream) -> dict[str, Any]:
        """Returns the whole answer."""
        result = await events.result()
        audios = (audio for choice in result.choices for audio in choice.audios.values())
        choices = await aside(
            lambda: [{"index": n, **self._whole_choice(choice)} for n, choice in enumerate(result.choices)],
            size_bytes=sum(audio.samples.nbytes for audio in audios),
        )
        usage = usage_of(result.finished, self._model)
        return {"object": "chat.completion", **self._fields, "choices": choices, "usage": usage}

    def _whole_choice(self, choice: Choice) -> dict[str, Any]:
        """Returns a choice with its message in OpenAI's form."""
        text_output = self._model.require_output("text")
        reasoning, calls = choice.reasonings.get(text_output), choice.tool_calls.get(text_output, ())
        message: dict[str, Any] = {"role": "assistant", "content": choice.text, "refusal": None}
        if self._body.audio is not None:
            message |= {"content": None, "audio": _spoken(choice, self._body.audio.format)}
        if reasoning:
            message |= _reasoning(reasoning)
        if calls:
            message["tool_calls"] = [_tool_call(call.id, call.name, call.arguments) for call in calls]
            message["content"] = choice.text or None
        return {
            "message": message,
            "logprobs": _logprobs(choice.logprobs.get(text_output, ())),
            "finish_reason": _finish_reason(choice.finishes[text_output].reason, has_calls=bool(calls)),
        }


def _spoken(choice: Choice, audio_format: AudioFormat) -> dict[str, Any]:
    """Returns the audio of a message. It is not kept: a later request cannot refer to it."""
    encoder = AnswerEncoder(audio_format)
    data = b"".join(encoder.push(audio) for audio in choice.audios.values()) + encoder.finish()
    encoded = base64.b64encode(data).decode()
    return {"id": _new_audio_id(), "data": encoded, "transcript": choice.text, "expires_at": now_s()}


def _new_audio_id() -> str:
    return f"audio_{uuid4().hex}"


def _finish_reason(reason: str, *, has_calls: bool) -> str:
    known = FINISH_REASONS.get(reason, "stop")
    return "tool_calls" if has_calls and known == "stop" else known


def _reasoning(text: str) -> dict[str, str]:
    """Returns the fields of reasoning, which vLLM has renamed."""
    return {"reasoning_content": text, "reasoning": text}


def _tool_call(call_id: str, name: str, arguments: JsonObject) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def _logprobs(tokens: Sequence[TokenLogprobs]) -> dict[str, Any] | None:
    return {"content": [to_logprob(each) for each in tokens]} if tokens else None


def to_logprob(token: TokenLogprobs) -> dict[str, Any]:
    """Returns the log-probabilities of a token in OpenAI's form."""
    return {**_token(token.sampled), "top_logprobs": [_token(top) for top in token.top]}


def _token(token: TokenLogprob) -> dict[str, Any]:
    return {"token": token.text, "logprob": max(token.logprob, LEAST_LOGPROB), "bytes": list(token.text.encode())}
