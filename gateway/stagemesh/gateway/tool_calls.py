"""Finds tool calls in the text of a language model, while the text arrives.

The calls have the form of Hermes, which the chat templates of Qwen and of many other models ask for:
`<tool_call>{"name": "…", "arguments": {…}}</tool_call>`.
"""

import json
from collections.abc import Iterator, Mapping
from typing import Any, Literal, NamedTuple, TypeAlias, cast

_BEGIN, _END = "<tool_call>", "</tool_call>"
_WHITESPACE: Mapping[str, Any] = {"whitespace_flexible": False, "key_separator": ": ", "item_separator": ", "}
"""The whitespace of forced calls, for vLLM's backend "guidance". Otherwise small models write spaces without end."""


class FoundCall(NamedTuple):
    """A tool call: the name of the function, and its arguments as JSON text."""

    name: str
    arguments: str


Piece: TypeAlias = str | FoundCall


class ToolCallSplitter:
    """Separates tool calls from the other text. A call that is not valid remains text.

    If calls are "required", the whole text is a call, because `call_schema` is its schema. If they are "none", it is
    text.
    """

    def __init__(self, calls: Literal["none", "auto", "required"] = "auto") -> None:
        self._calls, self._held = calls, ""

    def push(self, text: str) -> Iterator[Piece]:
        """Yields the texts and calls that are complete after `text`. Retains text that may belong to a call."""
        self._held += text
        if self._calls == "required":
            return
        while self._calls == "auto" and (begin := self._held.find(_BEGIN)) >= 0:
            end = self._held.find(_END, begin)
            if begin:
                yield self._held[:begin]
                self._held = self._held[begin:]
            if end < 0:
                return
            end = end - begin + len(_END)
            call, self._held = self._held[:end], self._held[end:]
            yield _parse(call)
        kept = _kept_length(self._held) if self._calls == "auto" else 0
        if shown := self._held[: len(self._held) - kept]:
            yield shown
        self._held = self._held[len(self._held) - kept :]

    def finish(self) -> Iterator[Piece]:
        """Yields the retained text, or its call: a call without an end tag is complete if its JSON is."""
        if self._held:
            yield (_find_call(self._held) or self._held) if self._calls == "required" else _parse(self._held)
        self._held = ""


def call_schema(parameters: Mapping[str, Mapping[str, Any] | None]) -> Mapping[str, Any]:
    """Returns the JSON schema of a call of one of several tools.

    `parameters` has the schemas of their arguments, by name.
    """
    calls = [
        {
            "type": "object",
            "properties": {"name": {"enum": [name]}, "arguments": schema or {"type": "object"}},
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for name, schema in parameters.items()
    ]
    return {**(calls[0] if len(calls) == 1 else {"anyOf": calls}), "x-guidance": _WHITESPACE}


def _kept_length(text: str) -> int:
    """Returns the length of the longest end of `text` with which a call may begin."""
    return next((n for n in range(min(len(text), len(_BEGIN) - 1), 0, -1) if text.endswith(_BEGIN[:n])), 0)


def _parse(text: str) -> Piece:
    if not text.startswith(_BEGIN):
        return text
    return _find_call(text.removeprefix(_BEGIN).removesuffix(_END)) or text


def _find_call(text: str) -> FoundCall | None:
    """Returns the tool call that a JSON text is, or None if it is none."""
    try:
        call: Any = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(call, dict):
        return None
    fields = cast("dict[str, object]", call)
    name, arguments = fields.get("name"), fields.get("arguments", {})
    if not isinstance(name, str):
        return None
    return FoundCall(name, arguments if isinstance(arguments, str) else json.dumps(arguments))
