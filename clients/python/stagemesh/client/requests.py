"""The arguments of `generate` and `converse`, and the first messages that are made of them.

All arguments are checked before anything is sent.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, Literal, TypeAlias, TypedDict
from uuid import uuid4

from google.protobuf.message import Message as ProtoMessage

from stagemesh.client.content import (
    Content,
    Conversation,
    JsonObject,
    Medium,
    Message,
    Tool,
    ToolChoice,
    to_json,
    to_message,
    to_part,
)
from stagemesh.common.errors import InvalidRequestError
from stagemesh.common.wire.tensors import Tensors, Value, inline_tensor, to_messages
from stagemesh.rpc.channels import MAX_MESSAGE_BYTES
from stagemesh.v1 import orchestrator_pb2, request_pb2

_PROMPTS = ("messages", "raw_text", "token_ids")
_STRUCTURES = ("json_schema", "regex", "allowed_texts", "grammar")
_INPUT_MODES = {"prompt": orchestrator_pb2.INPUT_MODE_PROMPT, "stream": orchestrator_pb2.INPUT_MODE_STREAM}
_LINGER_S = 60
OptionValue: TypeAlias = Value
"""The value of an option: a number, an integer, a flag or a text."""


class SamplingArguments(TypedDict, total=False):
    """The arguments that control how language models choose tokens. `request.proto` defines each argument.

    An omitted argument has the stage's default value.
    """

    max_tokens: int | None
    temperature: float | None
    """The sampling temperature. At 0, the most probable token is always selected."""
    top_p: float | None
    top_k: int | None
    min_p: float | None
    repetition_penalty: float | None
    presence_penalty: float | None
    frequency_penalty: float | None
    stop: Sequence[str]
    """Stop sequences. Generation ends as soon as the model has generated any of these strings."""
    stop_token_ids: Sequence[int]
    min_tokens: int | None
    ignore_eos: bool
    bad_words: Sequence[str]
    logprobs: int | None
    """The number of most probable tokens to report for each position, with their log-probabilities.

    The log-probability of the generated token is always reported in addition. 0 reports only the generated token. None
    reports no log-probabilities.
    """
    prompt_logprobs: int | None
    """The number of most probable tokens to report for each position of the prompt (`StageReport.prompt_logprobs`).

    0 reports only the tokens of the prompt. None reports nothing.
    """
    tokens_only: bool
    """Whether the stage only reports the tokens of the prompt, in `StageReport.prompt_logprobs`.

    The model does not run, and the output is empty.
    """
    count_tokens: bool
    """Whether events of the stage's outputs have `OutputEvent.counts`."""
    json_schema: str | Mapping[str, object] | None
    """The JSON schema to which the output must conform.

    At most one of json_schema, regex, allowed_texts and grammar may be set.
    """
    regex: str | None
    allowed_texts: Sequence[str] | None
    grammar: str | None


class StageArguments(SamplingArguments, total=False):
    """The parameters of one stage. They take precedence over the parameters of the whole request."""

    options: Mapping[str, OptionValue]
    """The values of options that the stage declares, by option name."""
    adapter: str | None
    """The name of the stage's LoRA adapter. An empty name selects no adapter."""
    chunk: int | Literal["whole"]
    """The number of frames in the first chunk that the stage receives, or "whole" for a single chunk at the end.

    Only for stages that receive chunks of frames. If it is omitted, the pipeline file determines the chunks.
    """


class RequestArguments(SamplingArguments, total=False):
    """The arguments that `generate` and `converse` share. An omitted argument has the server's default value."""

    messages: Conversation
    """A conversation: to send instead of a prompt, or before the first turn of a session."""
    tools: Sequence[Tool]
    """The tools that the model may call. A request with tools requires a prompt of text and media, or messages."""
    tool_choice: ToolChoice
    """The tools that the model must call, and how many it may call."""
    template_arguments: JsonObject
    """Arguments of the model's chat template. A request with them requires a prompt of text and media, or messages."""
    outputs: Sequence[str]
    """The names of the outputs to produce. An empty sequence produces all outputs."""
    adapter: str | None
    """The name of a LoRA adapter for the pipeline's main stage. None selects no adapter."""
    seed: int | None
    """The random seed, from 0 to 2**63 - 1. If it is omitted or None, the server chooses a random seed.

    The events `Admitted` and `SessionOpened` contain the seed. Each turn of a session has the next seed.
    """
    options: Mapping[str, OptionValue]
    """The values of options that the pipeline's stages declare, by option name."""
    stages: Mapping[str, StageArguments]
    """The parameters of single stages, by stage name. All others mean the pipeline's main stage, except `options`.

    `options` apply to every stage that declares them.
    """
    pipeline: str
    """The name of the pipeline. May be omitted if the server has only one pipeline."""
    priority: int
    """The request's priority, from -10 to 10. Requests with higher priority leave the admission queue first."""
    caller: str
    """The caller's name. Callers whose requests have equal priority share the pipeline and its queue equally."""


class GenerateArguments(RequestArguments, total=False):
    """The arguments of `generate` in addition to the prompt. An omitted argument has the server's default value."""

    raw_text: str
    """Text to which no chat template is applied, to send instead of a prompt."""
    token_ids: Sequence[int]
    """Token ids in the model's vocabulary, to send instead of a prompt."""
    media: Sequence[Medium]
    """The media to which the placeholders in `raw_text` or `token_ids` refer, in order."""
    negative_prompt: str | None
    """A description of content that images or videos must not show. None means none, which differs from an empty
    text.
    """
    tensors: Tensors
    """Input tensors by name, for pipelines that accept tensors."""
    choices: int
    """The number of times to run the request, each time with the next seed. If it is omitted, the request runs once.

    `Result.choices` contains the outputs of each run. The `index` of an event is that of its choice, from 0.
    """
    request_id: str | None
    """The id that identifies the request in every service and log.

    None stands for an id that is generated at random.
    """
    parsed: bool
    """Whether the events `Reasoning` and `ToolCallPart` separate reasoning and tool calls from the text of an answer.

    `Text` then contains the rest. Otherwise it contains the model's own text, with all markup.
    """
    preferred_replicas: Mapping[str, str]
    """The replicas that the request prefers, by stage, such as `Admitted.replicas` of an earlier request.

    If the input begins as that of the earlier request did, their engines may have its states in a cache.
    """


class TurnDetection(TypedDict, total=False):
    """The detection of turns: the pipeline finds the ends of the turns in the appended audio."""

    options: Mapping[str, OptionValue]
    """The values of options of the stage that detects turns, by name, for example silence_ms."""
    interrupts: bool
    """Whether speech of the user interrupts the answer to the former turn. If it is omitted, it does not."""
    detects_only: bool
    """Whether the session only reports turns, and answers none. If it is omitted, it answers each turn."""


class ConverseArguments(RequestArguments, total=False):
    """The arguments of `converse`. An omitted argument has the server's default value."""

    input_mode: Literal["prompt", "stream"]
    """The way of the input. "prompt" is the default: the pieces of a turn become the prompt of its request.

    In the mode "stream", each piece goes at once to the stages that an edge from `@input` feeds.
    """
    turn_detection: TurnDetection
    """Lets the pipeline commit the turns. `{}` uses the default options. If it is omitted, only `commit` does."""
    turn_timeout_s: float
    """The time limit of each turn in seconds."""
    linger_s: int
    """The number of seconds for which the orchestrator keeps the session while it has no connection. 60 if omitted.

    The client opens the session again, from its transcript, if the orchestrator no longer knows it.
    """
    session_id: str | None
    """The id that identifies the session in every service and log. The turn n is the request "SESSION.n".

    None stands for an id that is generated at random.
    """


def build_request(prompt: Content | None, arguments: GenerateArguments) -> orchestrator_pb2.GenerateRequest:
    """Returns the request message for a prompt and the other arguments of `generate`.

    The message always has a request_id, so that it can safely be sent again. Raises InvalidRequestError if an argument
    is unknown, if protobuf cannot encode a value, if the arguments contradict each other, or if the message is too
    large.
    """
    _check_names(arguments, GenerateArguments)
    try:
        request = orchestrator_pb2.GenerateRequest(
            request_id=arguments.get("request_id") or uuid4().hex,
            input=_input(prompt, arguments),
            parameters=_parameters(arguments, choices=arguments.get("choices")),
            **_shared(arguments),
            preferred_replicas=arguments.get("preferred_replicas"),
            parsed=arguments.get("parsed", False),
        )
    except (ValueError, TypeError) as exc:
        raise InvalidRequestError(f"an argument of generate cannot be sent: {exc}") from exc
    check_size(request, what="request")
    return request


def build_open(arguments: ConverseArguments) -> orchestrator_pb2.SessionOpen:
    """Returns the message that opens a session with the arguments of `converse`. It always has a session_id.

    Raises InvalidRequestError in the cases in which `build_request` does.
    """
    _check_names(arguments, ConverseArguments)
    mode = arguments.get("input_mode", "prompt")
    if mode not in _INPUT_MODES:
        raise InvalidRequestError(f"input_mode is {mode!r}; use one of {', '.join(_INPUT_MODES)}")
    detection = arguments.get("turn_detection")
    try:
        message = orchestrator_pb2.SessionOpen(
            session_id=arguments.get("session_id") or uuid4().hex,
            conversation=_conversation(None, arguments, needs_messages=False),
            parameters=_parameters(arguments),
            input_mode=_INPUT_MODES[mode],
            turn_detection=None if detection is None else _turn_detection(detection),
            linger_s=arguments.get("linger_s", _LINGER_S),
            turn_timeout_s=arguments.get("turn_timeout_s", 0.0),
            **_shared(arguments),
        )
    except (ValueError, TypeError) as exc:
        raise InvalidRequestError(f"an argument of converse cannot be sent: {exc}") from exc
    check_size(message, what="opening conversation")
    return message


def _shared(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the arguments with which requests and sessions have fields of the same names."""
    return {name: arguments[name] for name in ("pipeline", "outputs", "priority", "caller") if name in arguments}


def _turn_detection(given: TurnDetection) -> orchestrator_pb2.TurnDetection:
    return orchestrator_pb2.TurnDetection(
        options=to_messages(given.get("options", {})),
        interrupts=given.get("interrupts", False),
        detects_only=given.get("detects_only", False),
    )


def _parameters(arguments: RequestArguments, *, choices: int | None = None) -> request_pb2.Parameters:
    return request_pb2.Parameters(
        seed=arguments.get("seed"),
        sampling=_sampling(arguments),
        options=to_messages(arguments.get("options", {})),
        adapter=arguments.get("adapter"),
        stages={name: _stage(name, given) for name, given in arguments.get("stages", {}).items()},
        choices=choices,
    )


def _input(prompt: Content | None, arguments: GenerateArguments) -> request_pb2.Input:
    given = [name for name in _PROMPTS if name in arguments] + ["prompt"] * (prompt is not None)
    if len(given) > 1:
        raise InvalidRequestError(f"{' and '.join(given)} are given; a request accepts only one of them")
    if not given and not arguments.get("tensors"):
        raise InvalidRequestError(f"the request has no input; give a prompt, {', '.join(_PROMPTS)} or tensors")
    message = request_pb2.Input(
        conversation=_conversation(prompt, arguments),
        token_ids=request_pb2.TokenIds(ids=arguments["token_ids"]) if "token_ids" in arguments else None,
        media=[to_part(medium) for medium in arguments.get("media", ())],
        negative_prompt=arguments.get("negative_prompt") or "",
        empty_negative_prompt=arguments.get("negative_prompt") == "",
        tensors=[inline_tensor(name, tensor) for name, tensor in arguments.get("tensors", {}).items()],
    )
    if "raw_text" in arguments:
        message.raw_text = arguments["raw_text"]
    if isinstance(prompt, str) and not message.HasField("conversation"):
        message.text = prompt
    return message


def _conversation(
    prompt: Content | None, arguments: RequestArguments, *, needs_messages: bool = True
) -> request_pb2.Conversation | None:
    """Returns the conversation to send, or None if the prompt is text alone, raw text, token ids or absent.

    Raises InvalidRequestError if it has tools or template arguments but no messages, and `needs_messages` is True.
    """
    tools, template_arguments = arguments.get("tools", ()), arguments.get("template_arguments", "")
    messages = list(arguments.get("messages", ()))
    if prompt is not None and (tools or template_arguments or not isinstance(prompt, str)):
        messages.append(Message("user", prompt))
    if not messages and "messages" not in arguments:
        if not tools and not template_arguments:
            return None
        if needs_messages:
            raise InvalidRequestError("tools and template_arguments need a prompt or messages; give one of them")
    return request_pb2.Conversation(
        messages=[to_message(each if isinstance(each, Message) else Message(*each)) for each in messages],
        tools=[
            request_pb2.Tool(
                name=tool.name, description=tool.description, parameters=to_json(tool.parameters), strict=tool.strict
            )
            for tool in tools
        ],
        template_arguments=to_json(template_arguments),
        tool_choice=request_pb2.ToolChoice(**asdict(arguments["tool_choice"])) if "tool_choice" in arguments else None,
    )


def check_size(message: ProtoMessage, *, what: str) -> None:
    """Raises InvalidRequestError (MESSAGE_TOO_LARGE) if a message is larger than a server accepts.

    `what` names the message in the error.
    """
    size_bytes = message.ByteSize()
    if size_bytes > MAX_MESSAGE_BYTES:
        raise InvalidRequestError(
            f"the {what} is {size_bytes} bytes long; the limit is {MAX_MESSAGE_BYTES}; shorten the input, or upload "
            "its media",
            reason="MESSAGE_TOO_LARGE",
            metadata={"size_bytes": str(size_bytes), "limit_bytes": str(MAX_MESSAGE_BYTES)},
        )


def _sampling(arguments: SamplingArguments) -> request_pb2.Sampling:
    names = SamplingArguments.__annotations__.keys()
    given: dict[str, Any] = {key: value for key, value in arguments.items() if key in names and value is not None}
    structures = [name for name in _STRUCTURES if name in given]
    if len(structures) > 1:
        raise InvalidRequestError(f"{' and '.join(structures)} are given; an output can have only one structure")
    if not isinstance(given.get("json_schema", ""), str):
        given["json_schema"] = json.dumps(given["json_schema"])
    if "allowed_texts" in given:
        given["allowed_texts"] = request_pb2.AllowedTexts(texts=given["allowed_texts"])
    return request_pb2.Sampling(**given)


def _check_names(given: Mapping[str, object], kind: type[SamplingArguments], *, of: str = "") -> None:
    unknown = given.keys() - kind.__annotations__.keys()
    if unknown:
        raise InvalidRequestError(
            f"unknown argument{of}: {', '.join(sorted(unknown))}; options that a stage declares belong into `options`"
        )


def _stage(name: str, given: StageArguments) -> request_pb2.StageParameters:
    _check_names(given, StageArguments, of=f" of stage {name}")
    return request_pb2.StageParameters(
        sampling=_sampling(given),
        options=to_messages(given.get("options", {})),
        adapter=given.get("adapter"),
        chunk=_chunk(given["chunk"]) if "chunk" in given else None,
    )


def _chunk(given: int | str) -> request_pb2.ChunkParameters:
    if isinstance(given, int):
        return request_pb2.ChunkParameters(initial_frames=given)
    if given != "whole":
        raise InvalidRequestError(f'chunk is {given!r}; give the number of frames of the first chunk, or "whole"')
    return request_pb2.ChunkParameters(whole=True)
