"""The message feature: emits reasoning, text and tool calls as separate parts of a message."""

import asyncio
import copy
import hashlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from contextlib import AsyncExitStack
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from vllm.outputs import CompletionOutput
from vllm.tool_parsers.utils import partial_tag_overlap
from vllm.v1.engine.detokenizer import BaseIncrementalDetokenizer

from stagemesh.services.engines.base import MessageDelta, Task, TokenLogprobs
from stagemesh.services.engines.prompts import Conversation
from stagemesh.services.engines.vllm.features import EngineRequest, RequestFeature
from stagemesh.services.engines.vllm.messages.calls import CallReader, ModelCalls, Piece, RequiredCall
from stagemesh.services.engines.vllm.messages.parsers import AUTO, NONE, Parsers, find_parsers, tool_request
from stagemesh.services.engines.vllm.options import StageOptions
from stagemesh.services.engines.vllm.outputs import TEXT, is_wanted, new_detokenizer
from stagemesh.services.engines.vllm.requests import chat_template

if TYPE_CHECKING:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

_TAIL_TOKENS = 16
"""The number of tokens at the end of a prompt in which the mark of the reasoning is searched."""
_KIMI, _MISTRAL = "kimi_k2", "mistral"


class Messages(RequestFeature):
    """The request feature for parsed messages. The tokenizer runs on `tokenizer_thread`."""

    def __init__(self, options: StageOptions, *, stage: str, tokenizer_thread: Executor) -> None:
        self._tool, self._reasoning = options.tool_parser, options.reasoning_parser
        self._stage, self._thread = stage, tokenizer_thread
        self._parsers: Parsers | None = None

    @property
    def parsers(self) -> Parsers:
        """The parsers of the model. Valid after `start`."""
        assert self._parsers is not None, "a request follows `start`"
        return self._parsers

    def set_arguments(self, arguments: "AsyncEngineArgs") -> None:
        if self._reasoning not in (AUTO, NONE):
            # The structure of an output then begins after the reasoning.
            arguments.reasoning_parser = self._reasoning

    async def start(self, llm: "AsyncLLM") -> None:
        await super().start(llm)
        template = chat_template(llm.renderer)
        self._parsers = find_parsers(
            llm.get_tokenizer(), template, tool=self._tool, reasoning=self._reasoning, stage=self._stage
        )

    async def prepare(self, request: EngineRequest, held: AsyncExitStack) -> None:  # noqa: ARG002
        if request.task.parsed and is_wanted(request.task, TEXT):
            loop = asyncio.get_running_loop()
            request.message = await loop.run_in_executor(self._thread, self._reader, request)

    def open(self, request: EngineRequest, held: AsyncExitStack) -> None:  # noqa: ARG002
        if request.message is not None:
            # The caller has the message of a checkpoint's tokens. Its reader must have read them, too.
            request.message.resume(request.sampled)

    def _reader(self, request: EngineRequest) -> "MessageReader | None":
        """Returns the reader of a request's message, or None if nothing would be separated from its text."""
        parsers, conversation = self.parsers, request.task.prompt
        calls = CallReader()
        tools = None
        if isinstance(conversation, Conversation) and conversation.tools:
            if conversation.tool_choice.required:
                calls = RequiredCall()
            elif parsers.tool_parser is not None:
                tools = tool_request(conversation)
                calls = ModelCalls(parsers, tools, single=conversation.tool_choice.single)
        marks = parsers.reasoning_marks
        if marks is None and type(calls) is CallReader:
            return None
        params = copy.copy(request.params)
        params.skip_special_tokens &= parsers.skips_special_tokens(tools)
        tail = parsers.tokenizer.decode(request.prompt.token_ids[-_TAIL_TOKENS:])
        return MessageReader(
            new_detokenizer(request.name, request.prompt.token_ids, params=params, tokenizer=parsers.tokenizer),
            calls,
            marks=marks,
            is_reasoning=marks is not None and tail.rstrip().endswith(marks[0]),
            call_id=partial(call_id, request.task, parsers.tool_parser_name),
        )


def call_id(task: Task, parser: str, index: int, name: str) -> str:
    """Returns the id of a call, which is the same if the task runs again.

    The chat templates of some models demand a form. `parser` is the name of the model's parser.
    """
    if parser == _KIMI:
        messages = task.prompt.messages if isinstance(task.prompt, Conversation) else ()
        return f"functions.{name}:{sum(len(each.tool_calls) for each in messages) + index}"
    digest = hashlib.sha256(f"{task.request_id}/{index}".encode()).hexdigest()
    return digest[:9] if parser == _MISTRAL else f"call_{digest[:24]}"


class MessageReader:
    """Converts the tokens of one request to the parts of its message.

    Reads one token after the other. The parts are therefore the same in any grouping of the tokens, and in any run.
    Nothing within the reasoning is a tool call.
    """

    def __init__(
        self,
        detokenizer: BaseIncrementalDetokenizer,
        calls: CallReader,
        *,
        marks: tuple[str, str] | None,
        is_reasoning: bool,
        call_id: Callable[[int, str], str],
    ) -> None:
        """`marks` are the texts around the reasoning, or None if the model does not reason.

        `is_reasoning` is whether the prompt ends with the first of them.
        """
        self._detokenizer, self._calls, self._marks, self._call_id = detokenizer, calls, marks, call_id
        self._phase: Literal["begin", "reasoning", "answer"] = "begin" if marks is not None else "answer"
        self._is_reasoning = is_reasoning
        self._text, self._token_ids = "", list[int]()
        """The text that belongs to no part yet, and the tokens since the last text."""
        self._length = 0
        self.waiting = list[TokenLogprobs]()
        """The log-probabilities of the tokens since the last part."""
        self._call_ids = dict[int, str]()

    def read(self, output: CompletionOutput, logprobs: Sequence[TokenLogprobs] = ()) -> list[MessageDelta]:
        """Returns the parts that an output of vLLM completes.

        `logprobs` are the log-probabilities of its tokens, or empty.
        """
        parts, is_finished = list[MessageDelta](), output.finish_reason is not None
        # vLLM omits the text of a token that ends the output.
        ends_by_token = output.finish_reason == "stop" and not isinstance(output.stop_reason, str)
        last = len(output.token_ids) - 1
        for index, token in enumerate(output.token_ids):
            if index < len(logprobs):
                self.waiting.append(logprobs[index]._replace(position=self._length))
            parts += self._take(token, is_end=ends_by_token and index == last)
        if is_finished:
            parts += self._push(self._detokenizer.get_next_output_text(finished=True, delta=True))
            parts += self._finish(is_cut=output.finish_reason == "length")
        return parts

    def resume(self, tokens: Sequence[int]) -> None:
        """Reads the tokens of a checkpoint, whose message the caller has."""
        for token in tokens:
            list(self._take(token, is_end=False))

    def _take(self, token: int, *, is_end: bool) -> Iterator[MessageDelta]:
        self._detokenizer.update([token], stop_terminated=is_end)
        self._token_ids.append(token)
        return self._push(self._detokenizer.get_next_output_text(finished=False, delta=True))

    def _push(self, text: str) -> Iterator[MessageDelta]:
        self._text += text
        if self._phase == "begin" and self._marks is not None:
            self._begin(self._marks[0])
        if self._phase == "reasoning" and self._marks is not None:
            yield from self._reasoning(self._marks[1])
        if self._phase == "answer":
            yield from self._answer()

    def _begin(self, mark: str) -> None:
        """Finds out whether the text begins with reasoning, which has a mark before it unless the prompt has it."""
        begin = self._text.lstrip()
        if begin.startswith(mark):
            self._text, self._is_reasoning = begin.removeprefix(mark), True
        elif mark.startswith(begin):
            return
        self._phase = "reasoning" if self._is_reasoning else "answer"

    def _reasoning(self, mark: str) -> Iterator[MessageDelta]:
        text, end, rest = self._text.partition(mark)
        known = len(text) if end else len(text) - partial_tag_overlap(text, mark)
        self._text = rest if end else text[known:]
        if known:
            yield self._part("reasoning", text[:known])
        if end:
            self._phase = "answer"
        # A parser of tool calls must not see those in the reasoning.
        self._token_ids = self._token_ids[-1:]

    def _answer(self) -> Iterator[MessageDelta]:
        if self._text:
            text, self._text = self._text, ""
            ids, self._token_ids = self._token_ids, []
            yield from self._pieces(self._calls.push(text, ids))

    def _finish(self, *, is_cut: bool) -> Iterator[MessageDelta]:
        if self._text:
            yield self._part("reasoning" if self._is_reasoning else "text", self._text)
        yield from self._pieces(self._calls.finish(is_cut=is_cut))

    def _pieces(self, pieces: Iterator[Piece]) -> Iterator[MessageDelta]:
        for text, call, name in pieces:
            if call is None:
                yield self._part("text", text)
            else:
                each_id = self._call_ids.setdefault(call, self._call_id(call, name))
                yield self._part("tool_call", text, call=call, id=each_id, name=name)

    def _part(self, kind: Literal["reasoning", "text", "tool_call"], text: str, **call: Any) -> MessageDelta:
        waiting, self.waiting = tuple(self.waiting), []
        part = MessageDelta(kind, text, logprobs=waiting, **call)
        self._length += part.length
        return part
