"""Builds a GenerateRequest from the arguments of `generate`, and checks the arguments before anything is sent."""

import json
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias, TypedDict, cast
from uuid import uuid4

from stagemesh.client.media import Content, message_to_wire
from stagemesh.common.errors import InvalidRequestError
from stagemesh.common.tensors import Tensors, inline_tensor
from stagemesh.rpc.channels import MAX_MESSAGE_BYTES
from stagemesh.v1 import orchestrator_pb2, request_pb2

_STRUCTURES = ("json_schema", "regex", "choice", "grammar")

Conversation: TypeAlias = Sequence[tuple[str, Content]]
"""The turns of a conversation as (role, content), oldest first. Roles are "system", "user" and "assistant"."""


class SamplingArguments(TypedDict, total=False):
    """Arguments that control how language models choose tokens. `request.proto` defines each argument.

    The stage's default applies to an omitted argument.
    """

    max_tokens: int | None
    temperature: float | None
    """The sampling temperature. 0 always selects the most probable token."""
    top_p: float | None
    top_k: int | None
    min_p: float | None
    repetition_penalty: float | None
    presence_penalty: float | None
    frequency_penalty: float | None
    stop: Sequence[str]
    """Texts that end the output as soon as one of them is generated."""
    stop_token_ids: Sequence[int]
    min_tokens: int | None
    ignore_eos: bool
    bad_words: Sequence[str]
    logprobs: int | None
    """The number of most probable tokens to report for each position, with their log-probabilities.

    The log-probability of the generated token is reported in addition. 0 reports only the generated token's
    log-probability. None reports no log-probabilities.
    """
    json_schema: str | Mapping[str, object] | None
    """The JSON schema to which the output must conform.

    At most one of json_schema, regex, choice and grammar may be set.
    """
    regex: str | None
    choice: Sequence[str] | None
    grammar: str | None


_SAMPLING_FIELDS = SamplingArguments.__annotations__.keys() - set(_STRUCTURES)


class GenerateArguments(SamplingArguments, total=False):
    """The arguments of `generate` in addition to the prompt. The server's default applies to an omitted argument."""

    messages: Conversation
    """A conversation to send instead of a prompt."""
    token_ids: Sequence[int]
    """Token ids of the model's own vocabulary to send instead of a prompt."""
    negative_prompt: str
    """Text that describes what images or videos must not show."""
    tensors: Tensors
    """Input tensors by name, for pipelines that accept them."""
    outputs: Sequence[str]
    """The names of the outputs to produce. An empty sequence produces all outputs."""
    adapter: str | None
    """The name of a LoRA adapter, for stages that support adapters."""
    seed: int | None
    """The random seed, from 0 to 2**32 - 1.

    If the seed is omitted, the server chooses one at random and reports it in `Admitted`.
    """
    options: Mapping[str, float]
    """Values of options that the pipeline's stages declare, by option name."""
    request_id: str | None
    """The id that identifies the request in every service and log. Generated at random if omitted."""
    pipeline: str
    """The name of the pipeline. Optional if the server has only one pipeline."""
    priority: int
    """The priority, from -10 to 10. Requests of a higher priority leave the queue first."""
    caller: str
    """The caller's name. Callers whose requests have equal priority receive equal shares of the pipeline and its queue.
    """


def build_request(prompt: Content | None, arguments: GenerateArguments) -> orchestrator_pb2.GenerateRequest:
    """Returns the request message for a prompt and the other arguments of `generate`.

    The message always has a request_id, so that it can safely be sent again. Raises InvalidRequestError if protobuf
    cannot encode a value, if the arguments contradict each other, or if the message is too large.
    """
    try:
        request = orchestrator_pb2.GenerateRequest(
            request_id=arguments.get("request_id") or uuid4().hex,
            pipeline=arguments.get("pipeline", ""),
            input=_input(prompt, arguments),
            parameters=_parameters(arguments),
            outputs=arguments.get("outputs", ()),
            priority=arguments.get("priority", 0),
            caller=arguments.get("caller", ""),
        )
    except (ValueError, TypeError) as exc:
        raise InvalidRequestError(f"an argument of generate cannot be sent: {exc}") from exc
    _check_size(request)
    return request


def _input(prompt: Content | None, arguments: GenerateArguments) -> request_pb2.Input:
    given = [name for name in ("messages", "token_ids") if name in arguments] + ["prompt"] * (prompt is not None)
    if len(given) > 1:
        raise InvalidRequestError(f"{' and '.join(given)} are given; a request accepts only one of them")
    if not given and not arguments.get("tensors"):
        raise InvalidRequestError("the request has no input; give a prompt, messages, token_ids or tensors")
    message = request_pb2.Input(
        negative_prompt=arguments.get("negative_prompt", ""),
        tensors=[inline_tensor(name, tensor) for name, tensor in arguments.get("tensors", {}).items()],
    )
    if isinstance(prompt, str):
        message.text = prompt
    elif prompt is not None:
        message.conversation.messages.append(message_to_wire("user", prompt))
    if "messages" in arguments:
        turns = [message_to_wire(role, content) for role, content in arguments["messages"]]
        message.conversation.CopyFrom(request_pb2.Conversation(messages=turns))
    if "token_ids" in arguments:
        message.token_ids.CopyFrom(request_pb2.TokenIds(ids=arguments["token_ids"]))
    return message


def _parameters(arguments: GenerateArguments) -> request_pb2.Parameters:
    return request_pb2.Parameters(
        seed=arguments.get("seed"),
        sampling=_sampling(arguments),
        options=arguments.get("options", {}),
        adapter=arguments.get("adapter"),
    )


def _check_size(request: orchestrator_pb2.GenerateRequest) -> None:
    size_bytes = request.ByteSize()
    if size_bytes > MAX_MESSAGE_BYTES:
        raise InvalidRequestError(
            f"the request is {size_bytes} bytes long; the limit is {MAX_MESSAGE_BYTES}; shorten the input",
            reason="MESSAGE_TOO_LARGE",
            metadata={"size_bytes": str(size_bytes), "limit_bytes": str(MAX_MESSAGE_BYTES)},
        )


def _sampling(arguments: SamplingArguments) -> request_pb2.Sampling:
    given = {name: value for name, value in arguments.items() if name in _SAMPLING_FIELDS and value is not None}
    sampling = request_pb2.Sampling(**cast("Any", given))
    _set_structure(sampling, arguments)
    return sampling


def _set_structure(sampling: request_pb2.Sampling, arguments: SamplingArguments) -> None:
    given = [name for name in _STRUCTURES if arguments.get(name) is not None]
    if len(given) > 1:
        raise InvalidRequestError(f"{' and '.join(given)} are given; an output can have only one structure")
    if (schema := arguments.get("json_schema")) is not None:
        sampling.json_schema = schema if isinstance(schema, str) else json.dumps(schema)
    if (regex := arguments.get("regex")) is not None:
        sampling.regex = regex
    if (choice := arguments.get("choice")) is not None:
        sampling.choice.CopyFrom(request_pb2.Choice(texts=choice))
    if (grammar := arguments.get("grammar")) is not None:
        sampling.grammar = grammar
