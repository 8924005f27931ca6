"""The body of a request for a response, and its conversion to the body of a chat completion."""

import re
from collections.abc import Callable, Iterable, Sequence
from typing import Annotated, Any, TypeAlias, cast
from uuid import uuid4

import msgspec
from pydantic import Field

from stagemesh.client import GenerateArguments
from stagemesh.gateway import parameters
from stagemesh.gateway.body import Body, Items, SamplingBody, validate
from stagemesh.gateway.catalog import Model
from stagemesh.gateway.errors import ParameterError
from stagemesh.gateway.routes.chat import ChatBody
from stagemesh.gateway.unions import LIST, OBJECT, TEXT, by_type

_LOGPROBS = "message.output_text.logprobs"
_ECHOED = {
    *("instructions", "max_output_tokens", "metadata", "parallel_tool_calls", "previous_response_id", "store", "tools"),
    *("temperature", "tool_choice", "top_logprobs", "top_p", "user"),
}
"""The parameters that a response repeats."""
_ITEM_FIELDS = ("type", "id", "status", "phase", "async", "async_", "caller", "namespace")
"""The fields of items that have no meaning for a chat."""
_ID_PREFIXES = {"message": "msg", "function_call": "fc", "function_call_output": "fco", "reasoning": "rs"}
_REFERENCE = "item_reference"
_OWN_NAMES = (
    (r"\bmessages\b", "input"),
    (r"\bmax_completion_tokens\b", "max_output_tokens"),
    (r"\b(tools\.[0-9]+|tool_choice)\.function\b", r"\1"),
    (r"\bresponse_format(\.json_schema)?\b", "text.format"),
    (r"\bimage_url\.url\b", "image_url"),
    (r"expected tags: ('\w+'(, )?)+", "types: 'input_text', 'output_text', 'refusal', 'input_image', 'input_audio'"),
)
"""The names of parameters of chat completions, as patterns, each with the name of the same parameter of responses."""

_Json: TypeAlias = dict[str, Any]


class TextBody(Body):
    """How the text is written."""

    rules = parameters.RULES["text"]

    format: _Json = Field(default_factory=lambda: {"type": "text"})


class ResponseBody(SamplingBody):
    """The body of a request for a response. Its items and tools are checked as messages and tools of a chat."""

    rules = parameters.RULES["responses"]

    input: Annotated[Annotated[str, TEXT] | Annotated[Items[_Json], LIST], by_type("a text or a list of items")] = (
        Field([])
    )
    instructions: str | None = None
    max_output_tokens: int | None = None
    n: Annotated[int | None, Field(ge=1, le=1)] = None
    top_logprobs: Annotated[int | None, Field(ge=0)] = None
    include: Items[Annotated[str, Field(pattern=r"^(code|computer|file|message|reasoning|web)_?[a-z_.]+$")]] = Field(
        default_factory=list
    )
    tools: Items[_Json] = Field(default_factory=list[_Json])
    tool_choice: Annotated[Annotated[str, TEXT] | Annotated[_Json, OBJECT], by_type("a text or an object")] = "auto"
    parallel_tool_calls: bool = True
    text: TextBody = Field(default_factory=TextBody)
    store: bool = True
    previous_response_id: str | None = None
    metadata: dict[str, str] = Field(default_factory=dict)

    def items(self, find: Callable[[str], bytes | None]) -> list[_Json | bytes]:
        """Returns the items of the input. `find` returns the stored item with an id, as JSON.

        Raises ParameterError if a stored item does not exist.
        """
        if isinstance(self.input, str):
            return [{"type": "message", "role": "user", "content": self.input}]
        items: list[_Json | bytes] = []
        for place, item in enumerate(self.input):
            item_id = str(item.get("id"))
            found = find(item_id) if _type_of(item) == _REFERENCE else item
            if found is None:
                problem = f"no stored response has an item {item_id[:140]!r} in its output; send the item itself"
                raise ParameterError(f"input.{place}.id", problem)
            items.append(found)
        return items

    def arguments(self, model: Model, earlier: Sequence[_Json], own: Sequence[_Json]) -> GenerateArguments:
        """Returns the arguments of the client, which are the same as for a chat completion.

        The messages are the `earlier` items and the request's `own`. Raises InvalidRequestError if parameters are
        invalid. It has the names of the parameters of responses.
        """
        items = [("previous_response_id", item) for item in earlier]
        placed = _to_messages([*items, *((f"input.{place}", item) for place, item in enumerate(own))])
        if self.instructions:
            placed.insert(0, ("instructions", {"role": "system", "content": self.instructions}))
        schema, choice = _without(self.text.format, ("type",)), self.tool_choice
        fields = {
            **self.model_dump(include=set(SamplingBody.model_fields), exclude_unset=True),
            "messages": [message for _, message in placed],
            "max_completion_tokens": self.max_output_tokens,
            "logprobs": _LOGPROBS in self.include or bool(self.top_logprobs),
            "top_logprobs": self.top_logprobs,
            "tools": [_to_tool(tool, f"tools.{place}") for place, tool in enumerate(self.tools)],
            "tool_choice": choice if isinstance(choice, str) else _nested(choice),
            "parallel_tool_calls": self.parallel_tool_calls,
            "response_format": {"type": self.text.format.get("type"), "json_schema": schema or None},
        }
        try:
            return validate(ChatBody, fields).arguments(model)
        except ParameterError as exc:
            names = dict(enumerate(name for name, _ in placed))
            text = re.sub(r"\bmessages\.([0-9]{1,4})\b", lambda found: names.get(int(found[1]), "input"), exc.message)
            for name, own_name in _OWN_NAMES:
                text = re.sub(name, own_name, text)
            raise ParameterError(*text.split(": ", 1), reason=exc.reason) from exc

    def echo(self) -> _Json:
        """Returns the parameters that the response repeats."""
        return {name: getattr(self, name) for name in _ECHOED} | {"text": {"format": self.text.format}}


def encode_item(item: _Json) -> bytes:
    """Returns an item as JSON, as it is stored and listed."""
    kind, content = _type_of(item), item.get("content")
    if isinstance(content, str):
        text = "output_text" if item.get("role") == "assistant" else "input_text"
        item = {**item, "content": [{"type": text, "text": content}]}
    item_id = item.get("id") or f"{_ID_PREFIXES.get(kind)}_{uuid4().hex}"
    return msgspec.json.encode({"status": "completed", **item, "type": kind, "id": item_id})


def _to_messages(items: Iterable[tuple[str, _Json]]) -> list[tuple[str, _Json]]:
    """Returns the messages of a chat, with the names of their items. The model's messages include its tool calls."""
    messages, answer, reasoning = list[tuple[str, _Json]](), cast("_Json | None", None), ""
    for name, item in items:
        rest = _without(item, _ITEM_FIELDS)
        match _type_of(item):
            case "reasoning":
                reasoning, answer = _text_of(item.get("content")), None
                continue
            case "function_call":
                if answer is None:
                    messages.append((name, answer := dict[str, Any](role="assistant")))
                call = {"id": rest.pop("call_id", None), "type": "function", "function": rest}
                answer.setdefault("tool_calls", []).append(call)
            case "function_call_output":
                result: _Json = {
                    "tool_call_id": rest.pop("call_id", None),
                    "content": _to_content(rest.pop("output", None)),
                }
                messages.append((name, {**rest, **result, "role": "tool"}))
                answer = None
            case "message":
                message: _Json = {**rest, "content": _to_content(rest.get("content"))}
                messages.append((name, message))
                answer = message if message.get("role") == "assistant" and "tool_calls" not in message else None
            case kind:
                problem = f"{kind[:140]!r} is not supported; use one of {', '.join((*_ID_PREFIXES, _REFERENCE))}"
                raise ParameterError(f"{name}.type", problem)
        if reasoning and answer is not None:
            answer["reasoning_content"] = reasoning
        reasoning = ""
    return messages


def _text_of(content: object) -> str:
    """Returns the joined texts of contents."""
    parts = cast("list[object]", content) if isinstance(content, list) else []
    return "".join(str(cast("_Json", part).get("text", "")) for part in parts if isinstance(part, dict))


def _to_content(given: object) -> object:
    """Returns the content of a message. A single text is not a list, as templates without media expect it."""
    if not isinstance(given, list):
        return given
    listed = cast("list[object]", given)
    parts = [_to_part(cast("_Json", part)) if isinstance(part, dict) else part for part in listed]
    single = cast("_Json", parts[0]) if len(parts) == 1 and isinstance(parts[0], dict) else {}
    return single["text"] if set(single) == {"type", "text"} else parts


def _to_part(part: _Json) -> _Json:
    match part.get("type"):
        case "input_text" | "output_text":
            return {**_without(part, ("annotations", "logprobs")), "type": "text"}
        case "refusal":
            return {"type": "text", "text": part.get("refusal")}
        case "input_image":
            url = {"url": part.get("image_url"), "detail": part.get("detail")}
            return {**_without(part, ("detail",)), "type": "image_url", "image_url": url}
        case _:
            return part


def _to_tool(tool: _Json, name: str) -> _Json:
    if (kind := tool.get("type")) != "function":
        problem = f"the gateway has no tool {str(kind)[:140]!r}; offer a function that your program runs"
        raise ParameterError(f"{name}.type", problem)
    return _nested(tool)


def _nested(given: _Json) -> _Json:
    """Returns a tool, or the choice of one, in the form of chat completions."""
    return {"type": given.get("type"), "function": _without(given, ("type",))}


def _type_of(item: _Json) -> str:
    """Returns the type of an item. It may be omitted for messages and references."""
    return str(item.get("type") or ("message" if "role" in item else _REFERENCE))


def _without(given: _Json, names: Sequence[str]) -> _Json:
    """Returns the fields that are not null and have none of the names."""
    return {name: value for name, value in given.items() if value is not None and name not in names}
