# ruff: noqa: RUF001  # the marks of DeepSeek's calls
"""Selects vLLM's parsers for a model, and makes the structures that a request's tools impose on the output."""

import json
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.reasoning import ReasoningParserManager
from vllm.sampling_params import StructuredOutputsParams
from vllm.tokenizers import TokenizerLike
from vllm.tool_parsers import ToolParser, ToolParserManager
from xgrammar.structural_tag import JSONSchemaFormat, OrFormat, StructuralTag, TriggeredTagsFormat

from stagemesh.common.errors import InvalidRequestError
from stagemesh.services.engines.prompts import Conversation

_log = logging.getLogger(__name__)

AUTO, NONE = "auto", "none"
_Table: TypeAlias = Sequence[tuple[tuple[str, ...], str]]
_Parser = TypeVar("_Parser")
# The texts that a chat template must contain, and the parser of the calls that it teaches. The first match counts.
_TOOL_PARSERS: _Table = (
    (("<｜DSML｜",), "deepseek_v32"),
    (("<｜tool▁calls▁begin｜>", "```json"), "deepseek_v3"),
    (("<｜tool▁calls▁begin｜>",), "deepseek_v31"),
    (("<|tool_calls_section_begin|>",), "kimi_k2"),
    (("<minimax:tool_call>",), "minimax_m2"),
    (("<seed:tool_call>",), "seed_oss"),
    (("<longcat_tool_call>",), "longcat"),
    (("<arg_key>",), "glm47"),
    (("<function=",), "qwen3_coder"),
    (("<start_function_call>",), "functiongemma"),
    (("<|tool_call_start|>",), "lfm2"),
    (("<|action_start|>",), "internlm"),
    (("functools[",), "phi4_mini_json"),
    (("<|python_start|>",), "llama4_pythonic"),
    (("<|python_tag|>",), "llama3_json"),
    (("[TOOL_CALLS]",), "mistral"),
    (("<|tool_call|>",), "granite"),
    (("<tool_calls>",), "jamba"),
    (("<tool_call>",), "hermes"),
)
_REASONING_PARSERS: _Table = ((("[THINK]",), "mistral"), (("<seed:think>",), "seed_oss"), (("<think>",), "qwen3"))
# Otherwise small models write spaces without end.
_WHITESPACE: Mapping[str, Any] = {"whitespace_flexible": False, "key_separator": ": ", "item_separator": ", "}
_ANY_OBJECT: Mapping[str, Any] = {"type": "object"}
_GUIDANCE = "guidance"


@dataclass(frozen=True)
class Parsers:
    """The parsers of a model. A part that is None is not separated from the text."""

    tokenizer: TokenizerLike
    tool_parser: type[ToolParser] | None = None
    tool_parser_name: str = NONE
    reasoning_marks: tuple[str, str] | None = None
    """The texts before and after the reasoning."""

    def skips_special_tokens(self, request: ChatCompletionRequest | None) -> bool:
        """Returns whether the parsers need no special tokens in the text. `request` has the tools."""
        if {*(self.reasoning_marks or ())}.intersection(self.tokenizer.all_special_tokens):
            return False
        if request is None or self.tool_parser is None:
            return True
        return bool(self.new_tool_parser(request).adjust_request(request.model_copy()).skip_special_tokens)

    def new_tool_parser(self, request: ChatCompletionRequest) -> ToolParser:
        """Returns a parser of tool calls for one answer. Raises ValueError if the model has none."""
        if self.tool_parser is None:
            raise ValueError("the model has no parser of tool calls")
        tools: list[Any] = [*(request.tools or ())]
        return self.tool_parser(self.tokenizer, tools)


def find_parsers(tokenizer: TokenizerLike, template: object, *, tool: str, reasoning: str, stage: str) -> Parsers:
    """Returns the parsers of a model with the chat template `template`.

    `tool` and `reasoning` are names of vLLM's parsers, "none", or "auto" to select them by the template. Raises
    InvalidRequestError (INVALID_OPTION) if a parser does not exist or does not fit the model.
    """

    def load(
        option: str, wanted: str, table: _Table, load_parser: Callable[[str], _Parser]
    ) -> tuple[str, _Parser | None]:
        text = template if isinstance(template, str) else ""
        fitting = (name for marks, name in table if all(mark in text for mark in marks))
        name = next(fitting, NONE) if wanted == AUTO else wanted
        try:
            return name, load_parser(name) if name != NONE else None
        except Exception as exc:  # the parsers raise errors of all kinds
            problem = f"stage {stage}: vLLM's {option} {name!r} does not fit the model: {exc}"
            if wanted != AUTO:
                raise InvalidRequestError(problem, reason="INVALID_OPTION", metadata={"option": option}) from exc
            _log.warning("%s", problem)
            return NONE, None

    def load_tool_parser(name: str) -> type[ToolParser]:
        parser = ToolParserManager.get_tool_parser(name)
        parser(tokenizer)
        return parser

    def load_marks(name: str) -> tuple[str, str]:
        parser = ReasoningParserManager.get_reasoning_parser(name)(tokenizer)
        begin, end = parser.reasoning_start_str, parser.reasoning_end_str
        if not begin or not end:
            raise ValueError("it has no texts that begin and end the reasoning")
        return begin, end

    tool_name, tool_parser = load("tool_parser", tool, _TOOL_PARSERS, load_tool_parser)
    reasoning_name, marks = load("reasoning_parser", reasoning, _REASONING_PARSERS, load_marks)
    _log.info("stage %s: tool parser %s, reasoning parser %s", stage, tool_name, reasoning_name)
    return Parsers(tokenizer, tool_parser, tool_name, marks)


def tool_request(conversation: Conversation) -> ChatCompletionRequest:
    """Returns the request that vLLM's tool parsers read. It has the tools of the conversation, at least one."""
    functions = [{**vars(tool), "parameters": tool.parameters or _ANY_OBJECT} for tool in conversation.tools]
    tools = [{"type": "function", "function": each} for each in functions]
    return ChatCompletionRequest.model_validate({"messages": [], "tools": tools, "tool_choice": "auto"})


def required_call(conversation: Conversation) -> StructuredOutputsParams:
    """Returns the structure of the one call that the conversation requires."""
    wanted = conversation.tool_choice.name
    calls = [
        {
            "type": "object",
            "properties": {"name": {"enum": [tool.name]}, "arguments": dict(tool.parameters) or _ANY_OBJECT},
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for tool in conversation.tools
        if wanted in ("", tool.name)
    ]
    schema = {**(calls[0] if len(calls) == 1 else {"anyOf": calls}), "x-guidance": _WHITESPACE}
    return StructuredOutputsParams(json=json.dumps(schema))


def strict_calls(
    conversation: Conversation, parsers: Parsers, *, backend: str, schema: str | None = None
) -> StructuredOutputsParams | None:
    """Returns the structure of text that is free apart from the arguments of calls of strict tools.

    With a JSON `schema`, the output is either calls or JSON that conforms to it. `backend` is vLLM's backend for
    structures. Returns None if no tool is strict, or if the form of the model's calls cannot be expressed.
    """
    if parsers.tool_parser is None or not any(tool.strict for tool in conversation.tools):
        return None
    request = tool_request(conversation)
    if schema is not None and backend != _GUIDANCE:
        request = request.model_copy(update={"tool_choice": "required"})
    try:
        answer = None if schema is None else json.loads(schema)
        tag: StructuralTag | None = parsers.new_tool_parser(request).get_structural_tag(request)
    except (ValueError, RecursionError) as exc:
        _log.warning("the schemas of the strict tools are not enforced: %s", exc)
        return None
    if tag is None:
        return None
    if backend != _GUIDANCE:
        if answer is not None:
            tag = StructuralTag(format=OrFormat(elements=[tag.format, JSONSchemaFormat(json_schema=answer)]))
        return StructuredOutputsParams(structural_tag=tag.model_dump_json())
    grammar = _grammar(tag, parsers.tokenizer, answer)
    return None if grammar is None else StructuredOutputsParams(grammar=grammar)


def _grammar(tag: StructuralTag, tokenizer: TokenizerLike, answer: object) -> str | None:
    """Converts a structural tag to a grammar of vLLM's backend "guidance": text with calls, whose arguments are JSON.

    Without free text if the output is either calls or JSON of the schema `answer`, which may be None. Returns None if
    the tag has another form.
    """
    # The backend takes tokens in angle brackets for special ones, which text cannot contain.
    added = tokenizer.get_added_vocab()
    known = frozenset(tokenizer.all_special_tokens)
    special = {text: token for text, token in added.items() if text in known or (text[0], text[-1]) == ("<", ">")}
    split = re.compile(f"({'|'.join(map(re.escape, sorted(special, key=len, reverse=True))) or '$^'})").split

    def literal(text: str) -> str:
        parts = filter(None, split(text))
        return " ".join(f"<[{special[part]}]>" if part in special else json.dumps(part) for part in parts)

    rules, triggers, form = list[str](), {tokenizer.eos_token_id}, tag.format
    if not isinstance(form, TriggeredTagsFormat):
        return None
    for number, each in enumerate(form.tags):
        begin, end, content = each.begin, each.end, each.content
        if not (
            isinstance(begin, str)
            and isinstance(end, str)
            and isinstance(content, JSONSchemaFormat)
            and content.style == "json"
        ):
            return None
        schema = content.json_schema if isinstance(content.json_schema, dict) else _ANY_OBJECT
        arguments = f"%json {json.dumps({**schema, 'x-guidance': _WHITESPACE})} {literal(end)}"
        trigger = next(text for text in form.triggers if begin.startswith(text))
        if answer is not None:
            rules.append(f"call_{number}: {literal(begin)} {arguments}")
        elif trigger in special:
            triggers.add(special[trigger])
            rules.append(f"call_{number}: TEXT {literal(begin)} {arguments}")
        else:
            rules.append(f"begin_{number}[lazy]: TEXT {json.dumps(trigger)}")
            rules.append(f"call_{number}: begin_{number} {literal(begin.removeprefix(trigger))} {arguments}")
    if not rules:
        return None
    if answer is not None:
        calls = " | ".join(rule.partition(":")[0] for rule in rules)
        rules += [f"answer: %json {json.dumps(answer)}", r"SPACE: /\s*/"]
        return "\n".join(["%llguidance {}", f"start: answer | (({calls}) SPACE)+", *rules])
    if others := sorted({*special.values()} - triggers):
        rules.append(f"call_other: TEXT <[{','.join(map(str, others))}]>")
    calls = " | ".join(rule.partition(":")[0] for rule in rules if rule.startswith("call_"))
    return "\n".join(["%llguidance {}", f"start: ({calls})* end", "end: TEXT", "TEXT: /(.|\\n)*/", *rules])
