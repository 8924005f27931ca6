"""From a caller's arguments to a GenerateRequest, checked before anything is sent."""

from collections.abc import Mapping, Sequence
from typing import TypeAlias
from uuid import uuid4

from stagemesh.client.media import Content, message_to_wire
from stagemesh.client.sampling import SamplingArguments, sampling_to_wire
from stagemesh.common.errors import InvalidRequestError
from stagemesh.common.tensors import Tensors, inline_tensor
from stagemesh.rpc.channels import MAX_MESSAGE_BYTES
from stagemesh.v1 import orchestrator_pb2, request_pb2

Conversation: TypeAlias = Sequence[tuple[str, Content]]
"""Turns as (role, content), oldest first; roles are system, user and assistant."""


class GenerateArguments(SamplingArguments, total=False):
    """What `generate` takes beside the prompt; what is left out is left to the server."""

    messages: Conversation
    """Instead of a prompt: a conversation."""
    token_ids: Sequence[int]
    """Instead of a prompt: the model's own tokens."""
    negative_prompt: str
    """What the output is not to show, for pipelines that make pictures or films."""
    tensors: Tensors
    """Inputs by name, for pipelines that take them."""
    outputs: Sequence[str]
    """The outputs wanted; all when left out."""
    adapter: str | None
    """The LoRA adapter, for stages that take adapters."""
    seed: int | None
    """0 to 2**32 - 1; drawn by the server when left out, and reported in `Admitted`."""
    options: Mapping[str, float]
    """Options that the pipeline's stages declare."""
    request_id: str | None
    """Drawn when left out."""
    pipeline: str
    """Needed only where a server has several."""
    priority: int
    """Higher goes first where requests queue, from -10 to 10."""
    caller: str
    """In whose name: callers of one priority share the pipeline and its queue evenly."""


def build_request(prompt: Content | None, arguments: GenerateArguments) -> orchestrator_pb2.GenerateRequest:
    """The message for these arguments, always with a request_id, so that it can be sent again safely.

    Raises InvalidRequestError for a value that the wire cannot carry, or more bytes than it takes.
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
        raise InvalidRequestError(f"{' and '.join(given)} are given; a request takes one of them")
    if not given and not arguments.get("tensors"):
        raise InvalidRequestError("nothing to work on; give a prompt, messages, token_ids or tensors")
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
        sampling=sampling_to_wire(arguments),
        options=arguments.get("options", {}),
        adapter=arguments.get("adapter"),
    )


def _check_size(request: orchestrator_pb2.GenerateRequest) -> None:
    size_bytes = request.ByteSize()
    if size_bytes > MAX_MESSAGE_BYTES:
        raise InvalidRequestError(
            f"the request is {size_bytes} bytes long; a message may have {MAX_MESSAGE_BYTES}; shorten the input",
            reason="MESSAGE_TOO_LARGE",
            metadata={"size_bytes": str(size_bytes), "limit_bytes": str(MAX_MESSAGE_BYTES)},
        )
