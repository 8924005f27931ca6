"""Finds tool calls in the text of an answer, while the text arrives. Text that is not a valid call remains text."""

import json
import logging
import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

from stagemesh.services.engines.vllm.messages.parsers import Parsers

_log = logging.getLogger(__name__)

_CALL = re.compile(r'\s*\{\s*"name"\s*:\s*"((?:[^"\\]|\\.)*)"\s*,\s*"arguments"\s*:\s*(?=\S)')


class Piece(NamedTuple):
    """A piece of an answer: text, or a part of a tool call with the index `call`."""

    text: str
    call: int | None = None
    name: str = ""


class CallReader:
    """Separates tool calls from the text of an answer. This class itself is for answers without calls."""

    def push(self, text: str, token_ids: Sequence[int]) -> Iterator[Piece]:  # noqa: ARG002
        """Yields the pieces that are known after `text`, the text of the tokens `token_ids`."""
        yield Piece(text)

    def finish(self, *, is_cut: bool) -> Iterator[Piece]:  # noqa: ARG002
        """Yields the remaining pieces. `is_cut` is whether a limit has ended the text."""
        yield from ()


class ModelCalls(CallReader):
    """The reader of calls in the model's own form, which one of vLLM's parsers knows.

    While the text arrives, the parser finds the text before the calls. The calls follow at the end, when the parser has
    read them as a whole: their arguments are then known to be JSON objects, and everything else remains text.
    """

    def __init__(self, parsers: Parsers, request: ChatCompletionRequest, *, single: bool) -> None:
        """`request` has the tools. If `single` is True, drops all calls but the first."""
        self._parsers, self._request, self._single = parsers, request, single
        self._parser = parsers.new_tool_parser(request)
        self._mark: str = getattr(self._parser, "bot_token", "")
        self._text, self._ids = "", list[int]()
        self._rest = ""
        """The text that may be a call: all text since the last piece."""
        self._calls_begun = False

    def push(self, text: str, token_ids: Sequence[int]) -> Iterator[Piece]:
        self._rest += text
        if self._calls_begun:
            return
        if self._mark and self._mark in text:
            # Some parsers expect the mark at the start of an answer, and would return it as text.
            before, _, _ = self._rest.partition(self._mark)
            self._rest, self._calls_begun = self._rest.removeprefix(before), True
            if before:
                yield Piece(before)
            return
        before, ids_before = self._text, self._ids
        self._text, self._ids = before + text, [*ids_before, *token_ids]
        try:
            delta = self._parser.extract_tool_calls_streaming(
                before, self._text, text, ids_before, self._ids, token_ids, self._request
            )
        except Exception:  # noqa: BLE001  # the parsers raise errors of all kinds for texts that they do not expect
            _log.debug("vLLM's tool parser failed", exc_info=True)
            self._calls_begun = True
            return
        if delta is None:
            return
        if delta.content:
            yield Piece(delta.content)
            _, _, self._rest = self._rest.partition(delta.content)
        self._calls_begun = bool(delta.tool_calls)

    def finish(self, *, is_cut: bool) -> Iterator[Piece]:
        if not self._rest:
            return
        # Of a call that is cut off, some parsers omit the incomplete arguments.
        pieces = None if is_cut else self._read(self._rest)
        if pieces is None:
            if self._calls_begun:
                _log.warning("a tool call of the model cannot be read, and is sent as text")
            yield Piece(self._rest)
        else:
            yield from (piece for piece in pieces if not (self._single and piece.call))

    def _read(self, text: str) -> Sequence[Piece] | None:
        """Returns the text and the calls that vLLM's parser finds. None if it finds no calls, or an invalid one."""
        try:
            found = self._parsers.new_tool_parser(self._request).extract_tool_calls(text, self._request)
        except Exception:  # noqa: BLE001
            _log.debug("vLLM's tool parser failed", exc_info=True)
            return None
        calls = [(each.function.name, each.function.arguments) for each in found.tool_calls]
        if not found.tools_called or not all(name and _is_object(arguments) for name, arguments in calls):
            return None
        texts = [Piece(found.content)] if found.content and found.content.strip() else []
        return [*texts, *(Piece(arguments, index, name) for index, (name, arguments) in enumerate(calls))]


class RequiredCall(CallReader):
    """The reader of a text that is one call: `{"name": …, "arguments": …}`, as its structure ensures.

    Yields the arguments while they arrive. They are incomplete if a limit ends the text.
    """

    def __init__(self) -> None:
        self._whole = self._rest = ""
        self._has_name = False

    def push(self, text: str, token_ids: Sequence[int]) -> Iterator[Piece]:  # noqa: ARG002
        self._whole += text
        self._rest += text
        if not self._has_name and (found := _CALL.match(self._rest)):
            self._has_name, self._rest = True, self._rest[found.end() :]
            yield Piece("", 0, json.loads(f'"{found[1]}"'))
        if self._has_name:
            # The last brace ends the call.
            known = len(self._rest.rstrip().rstrip("} \t\r\n"))
            if known:
                yield Piece(self._rest[:known], 0)
            self._rest = self._rest[known:]

    def finish(self, *, is_cut: bool) -> Iterator[Piece]:
        if self._has_name and not (is_cut and not _is_object(self._whole)):
            self._rest = self._rest.rstrip().removesuffix("}")
        if self._rest:
            yield Piece(self._rest, 0) if self._has_name else Piece(self._rest)


def _is_object(text: str) -> bool:
    """Returns whether a text is a JSON object, without the numbers that JSON does not have."""
    try:
        return isinstance(json.loads(text, parse_constant=_reject), dict)
    except (ValueError, RecursionError):
        return False


def _reject(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")
