"""Finds tool calls in the text of a language model, while the text arrives.

The calls have the form of Hermes, which the chat templates of Qwen and of many other models ask for:
`<tool_call>{"name": "…", "arguments": {…}}</tool_call>`.
"""

import json
from collections.abc import Iterator
from typing import Any, NamedTuple, TypeAlias, cast

_BEGIN, _END = "<tool_call>", "</tool_call>"


class FoundCall(NamedTuple):
    """A tool call: the name of the function, and its arguments as JSON text."""

    name: str
    arguments: str


Piece: TypeAlias = str | FoundCall


class ToolCallSplitter:
    """Separates tool calls from the other text. A call that is not valid remains text."""

    def __init__(self) -> None:
        self._held = ""

    def push(self, text: str) -> Iterator[Piece]:
        """Yields the texts and calls that are complete after `text`. Retains text that may belong to a call."""
        self._held += text
        while (begin := self._held.find(_BEGIN)) >= 0:
            end = self._held.find(_END, begin)
            if begin:
                yield self._held[:begin]
                self._held = self._held[begin:]
            if end < 0:
                return
            end = end - begin + len(_END)
            call, self._held = self._held[:end], self._held[end:]
            yield _parse(call)
        kept = _kept_length(self._held)
        if shown := self._held[: len(self._held) - kept]:
            yield shown
        self._held = self._held[len(self._held) - kept :]

    def finish(self) -> Iterator[Piece]:
        """Yields the retained text, or its call: a call without an end tag is complete if its JSON is."""
        if self._held:
            yield _parse(self._held)
        self._held = ""


def _kept_length(text: str) -> int:
    """Returns the length of the longest end of `text` with which a call may begin."""
    return next((n for n in range(min(len(text), len(_BEGIN) - 1), 0, -1) if text.endswith(_BEGIN[:n])), 0)


def _parse(text: str) -> Piece:
    try:
        call: Any = json.loads(text.removeprefix(_BEGIN).removesuffix(_END))
    except ValueError:
        return text
    if not text.startswith(_BEGIN) or not isinstance(call, dict):
        return text
    fields = cast("dict[str, object]", call)
    name, arguments = fields.get("name"), fields.get("arguments", {})
    if not isinstance(name, str):
        return text
    return FoundCall(name, arguments if isinstance(arguments, str) else json.dumps(arguments))
