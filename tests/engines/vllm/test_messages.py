# ruff: noqa: RUF001  # the marks of DeepSeek's calls
"""The messages of language models: reasoning, text and tool calls in the forms of a dozen families of models."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import llguidance.hf
import pytest
from pydantic import JsonValue
from transformers import PreTrainedTokenizerFast
from vllm import SamplingParams
from vllm.outputs import CompletionOutput

from stagemesh.common.errors import InvalidRequestError
from stagemesh.services.engines.base import MessageDelta, Task, TokenLogprob, TokenLogprobs
from stagemesh.services.engines.prompts import ChatMessage, Conversation, Tool, ToolCall
from stagemesh.services.engines.vllm.messages.calls import CallReader, ModelCalls, RequiredCall
from stagemesh.services.engines.vllm.messages.feature import MessageReader, call_id
from stagemesh.services.engines.vllm.messages.parsers import find_parsers, strict_calls, tool_request
from stagemesh.services.engines.vllm.outputs import new_detokenizer
from tests.engines.vllm.tiny_model import byte_tokenizer

MARKS = (
    *("<think>", "</think>", "<tool_call>", "</tool_call>", "<|python_tag|>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"),
    *(
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁calls▁end｜>",
        "<｜tool▁call▁begin｜>",
        "<｜tool▁call▁end｜>",
        "<｜tool▁sep｜>",
    ),
    *("<|tool_call|>", "<|action_start|>", "<|plugin|>", "<|action_end|>", "<tool_calls>", "</tool_calls>"),
    *("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>", "<|tool_call_end|>"),
    *("<|tool_call_argument_begin|>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "[THINK]", "[/THINK]"),
)
STRING: dict[str, JsonValue] = {"type": "string"}
SCHEMA: dict[str, JsonValue] = {
    "type": "object",
    "properties": {"city": STRING, "note": STRING, "days": {"type": "integer"}},
}
TOOLS = [Tool("find", "Finds.", SCHEMA, strict=True), Tool("stop", "", {})]
TASK = Task("r", 1)
CONVERSATION = Conversation([ChatMessage("user", "Hi")], TOOLS)
Arguments = Mapping[str, Any]
Calls = Sequence[tuple[str, Arguments]]


@pytest.fixture(scope="module", name="tokenizer")
def make_tokenizer() -> Any:
    made = byte_tokenizer(["<|end|>"])
    made.add_tokens(list(MARKS))
    create: Any = PreTrainedTokenizerFast
    return create(tokenizer_object=made, eos_token="<|end|>")  # noqa: S106


def dump(arguments: object) -> str:
    return json.dumps(arguments, ensure_ascii=False)


def each(form: str, between: str = "") -> Callable[[Calls], str]:
    """Returns a function that writes each call as `form` says."""
    return lambda calls: between.join(
        form.replace("NAME", name).replace("ARGS", dump(args)).replace("INDEX", str(n))
        for n, (name, args) in enumerate(calls)
    )


def listed(key: str) -> Callable[[Calls], str]:
    return lambda calls: dump([{"name": name, key: args} for name, args in calls])


def xml(begin: str, pair: str, end: str) -> Callable[[Calls], str]:
    """Returns a function that writes calls with an element for each argument."""
    return lambda calls: "\n".join(
        begin.replace("NAME", name)
        + "".join(
            pair.replace("KEY", key).replace("VALUE", value if isinstance(value, str) else dump(value))
            for key, value in args.items()
        )
        + end
        for name, args in calls
    )


V3 = "<｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME\n```json\nARGS\n```<｜tool▁call▁end｜>"
V31 = "<｜tool▁call▁begin｜>NAME<｜tool▁sep｜>ARGS<｜tool▁call▁end｜>"
KIMI = "<|tool_call_begin|>functions.NAME:INDEX<|tool_call_argument_begin|>ARGS<|tool_call_end|>"


class Family(NamedTuple):
    """A family of models: the parser, the text around the calls, and how it writes calls."""

    parser: str
    form: Callable[[Calls], str]
    begin: str = ""
    end: str = ""
    is_single: bool = False


FAMILIES = {
    "qwen": Family("hermes", each('<tool_call>\n{"name": "NAME", "arguments": ARGS}\n</tool_call>', "\n")),
    "qwen-coder": Family(
        "qwen3_coder",
        xml("<tool_call>\n<function=NAME>\n", "<parameter=KEY>\nVALUE\n</parameter>\n", "</function>\n</tool_call>"),
    ),
    "llama": Family("llama3_json", each('{"name": "NAME", "parameters": ARGS}', "; "), "<|python_tag|>"),
    "mistral": Family("mistral", each("[TOOL_CALLS]NAME[ARGS]ARGS".replace("[ARGS]ARGS", "[ARG5]ARGS"))),
    "deepseek-v3": Family("deepseek_v3", each(V3, "\n"), "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
    "deepseek-v3.1": Family("deepseek_v31", each(V31), "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
    "kimi": Family("kimi_k2", each(KIMI), "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
    "glm": Family(
        "glm47", xml("<tool_call>NAME\n", "<arg_key>KEY</arg_key>\n<arg_value>VALUE</arg_value>\n", "</tool_call>")
    ),
    "granite": Family("granite", listed("arguments"), "<|tool_call|>"),
    "internlm": Family(
        "internlm", each('{"name": "NAME", "parameters": ARGS}'), "<|action_start|><|plugin|>", "<|action_end|>", True
    ),
    "jamba": Family("jamba", listed("arguments"), "<tool_calls>", "</tool_calls>"),
    "phi": Family("phi4_mini_json", listed("arguments"), "functools"),
}
ARGUMENTS: Sequence[Arguments] = [
    {"city": "Rome"},
    {"city": 'Åre "x" \\ }', "days": 3},
    {"note": "two\nlines, <b>"},
    {"city": "東京 🎉", "note": ""},
]
SHAPES: Mapping[str, tuple[str, int]] = {
    "one": ("", 1),
    "two": ("", 2),
    "text": ("Let me look.\n", 1),
    "think": ("<think>a < b</think>", 1),
}


def message(
    text: str, tokenizer: Any, calls: CallReader, *, whole: bool = False, reason: str = "stop", **given: Any
) -> list[MessageDelta]:
    """Returns the parts of the message for the tokens of a text, in one piece or token by token."""
    ids = tokenizer.encode(text) + ([0] if reason == "stop" else [])
    detokenizer = new_detokenizer("r", [1], params=SamplingParams(skip_special_tokens=False), tokenizer=tokenizer)
    options: dict[str, Any] = {
        "marks": ("<think>", "</think>"),
        "is_reasoning": False,
        "call_id": partial(call_id, TASK, ""),
        **given,
    }
    reader = MessageReader(detokenizer, calls, **options)
    cuts = [0, len(ids)] if whole else range(len(ids) + 1)
    return [
        part for a, b in pairwise(cuts) for part in reader.read(output(ids[a:b], reason if b == len(ids) else None))
    ]


def output(ids: Sequence[int], reason: str | None) -> CompletionOutput:
    return CompletionOutput(0, "", list(ids), None, None, finish_reason=reason)


class Read(NamedTuple):
    """A message that was read: its reasoning, its text, and the names and arguments of its calls."""

    reasoning: str
    text: str
    calls: list[tuple[str, Any]]


def joined(parts: Sequence[MessageDelta]) -> Read:
    def texts(kind: str) -> str:
        return "".join(part.text for part in parts if part.kind == kind)

    calls = dict[int, tuple[str, str]]()
    for part in parts:
        if part.kind == "tool_call":
            name, arguments = calls.get(part.call, ("", ""))
            calls[part.call] = name + part.name, arguments + part.text
    return Read(texts("reasoning"), texts("text"), [(name, json.loads(args)) for name, args in calls.values()])


def model_calls(tokenizer: Any, parser: str, **given: Any) -> ModelCalls:
    parsers = find_parsers(tokenizer, "", tool=parser, reasoning="none", stage="s")
    return ModelCalls(parsers, tool_request(CONVERSATION), **{"single": False, **given})


@pytest.mark.parametrize("arguments", ARGUMENTS, ids=["plain", "escapes", "lines", "unicode"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("family", FAMILIES)
def test_messages_equal_the_parsers_reading_of_the_whole_text(
    tokenizer: Any, family: str, shape: str, arguments: Arguments
) -> None:
    parser, form, begin, end, is_single = FAMILIES[family]
    before, count = SHAPES[shape]
    if is_single and count > 1:
        pytest.skip("the form has one call")
    calls = [("find", arguments), ("stop", {})][:count]
    answer = (begin + form(calls) + end).replace("[ARG5]", "[ARGS]")
    readings = [
        message(before + answer, tokenizer, model_calls(tokenizer, parser), whole=whole) for whole in (True, False)
    ]
    assert readings[0] == readings[1]
    request, spoken = tool_request(CONVERSATION), "" if "<" in before else before
    parsers = find_parsers(tokenizer, "", tool=parser, reasoning="none", stage="s")
    expected = parsers.new_tool_parser(request).extract_tool_calls(spoken + answer, request)
    assert expected.tools_called
    found = joined(readings[0])
    assert found.reasoning == ("a < b" if "<" in before else "")
    # vLLM's parser of Phi drops the text before calls.
    assert found.text == ("" if parser == "phi4_mini_json" else spoken or (expected.content or ""))
    assert found.calls == [(each.function.name, json.loads(each.function.arguments)) for each in expected.tool_calls]
    assert found.calls[0] == ("find", arguments)


CALL = '{"name": "find", "arguments": {"city": "Rome"}}'
FOUND = [("find", {"city": "Rome"})]
HERMES: Mapping[str, tuple[str, Read]] = {
    "no call": ("a < b <tool_cal", Read("", "a < b <tool_cal", [])),
    "unclosed": (f"<tool_call>{CALL}", Read("", "", FOUND)),
    "reasoning only": (f"<think>a<tool_call>{CALL}</tool_call>", Read(f"a<tool_call>{CALL}</tool_call>", "", [])),
    "call in reasoning": (
        f"<think><tool_call>{CALL}</tool_call></think>\nNo.",
        Read(f"<tool_call>{CALL}</tool_call>", "\nNo.", []),
    ),
    "call after reasoning": (f"<think>a</think><tool_call>{CALL}</tool_call>", Read("a", "", FOUND)),
    **{
        name: (f"Hm <tool_call>{text}</tool_call>", Read("", f"Hm <tool_call>{text}</tool_call>", []))
        for name, text in {
            "parameters": '{"name": "find", "parameters": {"city": "Rome"}}',
            "no name": '{"arguments": {}}',
            "number as name": '{"name": 1, "arguments": {}}',
            "single quotes": "{'name': 'find', 'arguments': {}}",
            "NaN": '{"name": "find", "arguments": {"days": NaN}}',
            "infinite": '{"name": "find", "arguments": {"days": 1e999}}',
            "list": f"[{CALL}, {CALL}]",
            "list of arguments": '{"name": "find", "arguments": [1]}',
            "text as arguments": '{"name": "find", "arguments": "city"}',
            "deep": '{"name": "find", "arguments": ' + "[" * 5000,
            "no JSON": "find(city=Rome)",
        }.items()
    },
}


@pytest.mark.parametrize(("text", "expected"), HERMES.values(), ids=HERMES.keys())
def test_what_is_no_valid_call_is_text(tokenizer: Any, text: str, expected: Read) -> None:
    for whole in (True, False):
        assert joined(message(text, tokenizer, model_calls(tokenizer, "hermes"), whole=whole)) == expected


XML = FAMILIES["qwen-coder"].form([("find", {"city": "Rome"})])


@pytest.mark.parametrize(
    ("parser", "text"),
    [
        ("hermes", f"<tool_call>{CALL[:-6]}"),
        ("qwen3_coder", XML[: XML.index("me\n")]),
        ("glm47", "<tool_call>find\n<arg_key>city</arg_key>\n<arg_value>Ro"),
    ],
)
def test_a_call_that_is_cut_off_is_text(tokenizer: Any, parser: str, text: str) -> None:
    found = joined(message(text, tokenizer, model_calls(tokenizer, parser), reason="length"))
    assert (found.text, found.calls) == (text, [])


def test_a_stop_text_ends_the_message(tokenizer: Any) -> None:
    params = SamplingParams(stop=["X"], skip_special_tokens=False)
    detokenizer = new_detokenizer("r", [1], params=params, tokenizer=tokenizer)
    calls = model_calls(tokenizer, "hermes")
    reader = MessageReader(
        detokenizer, calls, marks=("<think>", "</think>"), is_reasoning=False, call_id=partial(call_id, TASK, "")
    )
    ids = tokenizer.encode(f"<think>a</think><tool_call>{CALL}</tool_call>X")
    parts = [part for token in ids[:-1] for part in reader.read(output([token], None))]
    ended = CompletionOutput(0, "", ids[-1:], None, None, finish_reason="stop", stop_reason="X")
    assert joined([*parts, *reader.read(ended)]) == Read("a", "", FOUND)


def test_one_call_is_kept_if_one_is_allowed(tokenizer: Any) -> None:
    text = FAMILIES["qwen"].form([("find", {}), ("stop", {})])
    assert joined(message(text, tokenizer, model_calls(tokenizer, "hermes", single=True))).calls == [("find", {})]


def test_a_required_call_streams_and_may_be_cut_off(tokenizer: Any) -> None:
    text = '{"name": "find", "arguments": {"city": {"x": "}"}}}'
    parts = message(text, tokenizer, RequiredCall())
    assert (parts[0].name, parts[0].text, len({part.id for part in parts})) == ("find", "", 1)
    assert len(parts) > 10
    for end in range(len(text) + 1):
        parts = message(text[:end], tokenizer, RequiredCall(), reason="length")
        arguments = "".join(part.text for part in parts if part.kind == "tool_call")
        begun = text.index(', "arguments": ') + len(', "arguments": ')
        assert arguments == (text[begun:end] if end < len(text) else text[begun:-1])
        assert "".join(part.text for part in parts if part.kind == "text") == ("" if end > begun else text[:end])


@pytest.mark.parametrize("calls", ["required", "model", "none"])
def test_a_reader_resumes_after_any_token(tokenizer: Any, calls: str) -> None:
    text = "<think>é </think>Hi " + ("" if calls == "required" else f"<tool_call>{CALL}</tool_call>")
    text = f"<think>é</think>{CALL}" if calls == "required" else text

    def reader() -> MessageReader:
        made: CallReader = RequiredCall() if calls == "required" else CallReader()
        made = model_calls(tokenizer, "hermes") if calls == "model" else made
        detokenizer = new_detokenizer("r", [1], params=SamplingParams(), tokenizer=tokenizer)
        return MessageReader(
            detokenizer, made, marks=("<think>", "</think>"), is_reasoning=True, call_id=partial(call_id, TASK, "")
        )

    ids = tokenizer.encode(text)
    scored = [TokenLogprobs(TokenLogprob(id_, "", -1.0), (), 0) for id_ in ids]
    whole = list[tuple[int, MessageDelta]]()
    undisturbed = reader()
    for index, token in enumerate(ids):
        made = undisturbed.read(
            output([token], "stop_text" if index == len(ids) - 1 else None), scored[index : index + 1]
        )
        whole += [(index, part) for part in made]
    tokens = [each.sampled.id for _, part in whole for each in part.logprobs]
    assert tokens == ids[: len(tokens)]
    assert all(
        each.position <= sum(part.length for _, part in whole[:n])
        for n, (_, p) in enumerate(whole)
        for each in p.logprobs
    )
    for resumed in range(len(ids)):
        again = reader()
        again.resume(ids[:resumed])
        rest = again.read(output(ids[resumed:], "stop_text"))
        assert [part._replace(logprobs=()) for part in rest] == [
            part._replace(logprobs=()) for index, part in whole if index >= resumed
        ]


def test_call_ids_have_the_form_of_the_model() -> None:
    asked = replace(TASK, prompt=Conversation([ChatMessage("assistant", tool_calls=[ToolCall("c", "find", {})])]))
    assert call_id(asked, "hermes", 1, "find") == call_id(TASK, "none", 1, "stop") != call_id(TASK, "none", 2, "stop")
    assert call_id(asked, "kimi_k2", 1, "find") == "functions.find:2"
    assert len(call_id(TASK, "mistral", 0, "find")) == 9


@pytest.mark.parametrize(
    ("template", "parser", "marks"),
    [
        ("{{ messages }}", "none", None),
        ('<tool_call>{"name": <name>} {{ "<think>" }}', "hermes", ("<think>", "</think>")),
        ("<tool_call><function=", "qwen3_coder", None),
        ("<｜tool▁calls▁begin｜>", "deepseek_v31", None),
        ("<｜tool▁calls▁begin｜> ```json", "deepseek_v3", None),
        ("[TOOL_CALLS] [THINK]", "mistral", ("[THINK]", "[/THINK]")),
        ("<seed:tool_call>", "seed_oss", None),
        ({"tool_use": "<tool_call>"}, "none", None),
    ],
)
def test_the_chat_template_selects_the_parsers(
    tokenizer: Any, template: object, parser: str, marks: tuple[str, str] | None
) -> None:
    found = find_parsers(tokenizer, template, tool="auto", reasoning="auto", stage="s")
    assert (found.tool_parser_name, found.reasoning_marks) == (parser, marks)


@pytest.mark.parametrize("options", [{"tool": "hermess"}, {"reasoning": "granite"}])
def test_an_option_that_names_no_fitting_parser_is_rejected(tokenizer: Any, options: Mapping[str, str]) -> None:
    with pytest.raises(InvalidRequestError, match="does not fit the model"):
        find_parsers(tokenizer, "", **{"tool": "auto", "reasoning": "auto", **options}, stage="s")


@pytest.mark.parametrize("family", ["qwen", "llama"])
def test_strict_arguments_are_enforced_once_a_call_begins(tokenizer: Any, family: str) -> None:
    parser, form, begin, end, _ = FAMILIES[family]
    parsers = find_parsers(tokenizer, "", tool=parser, reasoning="none", stage="s")
    backend = llguidance.hf.from_tokenizer(tokenizer)

    def accepted(text: str, schema: str | None = None) -> bool:
        structure = strict_calls(CONVERSATION, parsers, backend="guidance", schema=schema)
        assert structure is not None
        matcher, ids = llguidance.LLMatcher(backend, str(structure.grammar)), tokenizer.encode(text)
        assert not matcher.is_error(), matcher.get_error()
        return matcher.validate_tokens([*ids, tokenizer.eos_token_id]) == len(ids) + 1

    assert accepted("Let me <think> { < }</think>")
    for arguments, fits in (({"city": "Rome", "days": 2}, True), ({"days": "two"}, False)):
        call = begin + form([("find", arguments)]) + end
        assert (accepted(f"<think>So</think> {call}"), accepted(f"{call} and {call}")) == (fits, fits)
        call = form([("find", arguments)])
        assert [accepted(text, '{"type": "array"}') for text in (call, f"{call}\n{call}")] == [fits, fits]
    assert [accepted(text, '{"type": "array"}') for text in ("[1]", "{}", "Hello")] == [True, False, False]


def test_strict_tools_are_a_wish_if_their_form_cannot_be_enforced(tokenizer: Any) -> None:
    parsers = find_parsers(tokenizer, "", tool="qwen3_coder", reasoning="none", stage="s")
    assert strict_calls(CONVERSATION, parsers, backend="guidance") is None
    assert strict_calls(CONVERSATION, parsers, backend="xgrammar") is not None
    either = strict_calls(CONVERSATION, parsers, backend="xgrammar", schema='{"type": "array"}')
    assert either is not None
    assert [each["type"] for each in json.loads(str(either.structural_tag))["format"]["elements"]][1] == "json_schema"
    lenient = Conversation(CONVERSATION.messages, [Tool("find", "", SCHEMA)])
    assert strict_calls(lenient, parsers, backend="xgrammar") is None
