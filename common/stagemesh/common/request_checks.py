"""The checks of a request's content that the orchestrator and every stage share: one text and one reason per cause."""

import math
import re
from collections.abc import Callable, Iterable, Mapping
from itertools import chain

from stagemesh.common.descriptors import OptionSpec
from stagemesh.common.errors import InvalidChunkError, InvalidRequestError
from stagemesh.common.tensors import Array, read_inline
from stagemesh.v1 import request_pb2, tensor_pb2

_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
_ROLES = ("system", "user", "assistant")
_SAMPLING: Mapping[str, tuple[str, Callable[[float], bool]]] = {
    "max_tokens": ("at least 1", lambda value: value >= 1),
    "temperature": ("at least 0", lambda value: value >= 0),
    "top_p": ("over 0 and at most 1", lambda value: 0 < value <= 1),
    "min_p": ("from 0 to 1", lambda value: 0 <= value <= 1),
    "repetition_penalty": ("over 0", lambda value: value > 0),
    "presence_penalty": ("from -2 to 2", lambda value: -2 <= value <= 2),
    "frequency_penalty": ("from -2 to 2", lambda value: -2 <= value <= 2),
}


def check_request_id(request_id: str) -> None:
    """Raises InvalidRequestError (INVALID_REQUEST_ID) if the id is empty, too long or has other characters."""
    if not _REQUEST_ID.fullmatch(request_id):
        raise InvalidRequestError(
            f"request_id is {request_id[:140]!r}; use 1 to 128 letters, digits, '.', '_', ':' and '-'",
            reason="INVALID_REQUEST_ID",
        )


def check_input(given: request_pb2.Input) -> None:
    """Checks messages and tensors. Does not decode media.

    Raises InvalidRequestError (INVALID_PROMPT) for a message, InvalidChunkError for a tensor.
    """
    for message in given.conversation.messages:
        if message.role not in _ROLES:
            raise InvalidRequestError(
                f"a message's role is {message.role!r}; use one of {', '.join(_ROLES)}", reason="INVALID_PROMPT"
            )
        if message.content and message.parts:
            raise InvalidRequestError(
                "a message holds content and parts; put the content into a part, at its place", reason="INVALID_PROMPT"
            )
        for part in message.parts:
            if part.WhichOneof("content") is None:
                raise InvalidRequestError(
                    "a message holds a part without content; leave it out", reason="INVALID_PROMPT"
                )
            if part.HasField("audio"):
                read_samples(part.audio)
    read_tensors(given.tensors)


def read_tensors(messages: Iterable[tensor_pb2.Tensor]) -> dict[str, Array]:
    """Returns tensors by name. Raises InvalidRequestError for a name that occurs twice.

    Raises InvalidChunkError for a tensor that is not inline, or whose bytes do not match its shape.
    """
    tensors: dict[str, Array] = {}
    for message in messages:
        if message.name in tensors:
            raise InvalidRequestError(f"the input holds tensor {message.name!r} twice")
        tensors[message.name] = _read(message, f"input tensor {message.name!r}")
    return tensors


def read_samples(audio: request_pb2.Audio) -> Array:
    """Returns the samples of a message's audio. Raises InvalidChunkError as `read_tensors` does."""
    return _read(audio.samples, "samples of a message")


def empty_prompt_error() -> InvalidRequestError:
    """Returns the error of a request that needs a prompt and has none."""
    return InvalidRequestError("the prompt is empty; give some text", reason="EMPTY_PROMPT")


def has_prompt(given: request_pb2.Input) -> bool:
    """Returns whether there is any text, medium or token id. White space is not text."""
    messages = given.conversation.messages
    parts = list(chain.from_iterable(message.parts for message in messages))
    texts = chain([given.text], (message.content for message in messages), (part.text for part in parts))
    return bool(given.token_ids.ids) or any(map(is_medium, parts)) or any(text.strip() for text in texts)


def is_medium(part: request_pb2.Part) -> bool:
    """Returns whether a part of a message is an image, audio or a video."""
    return part.WhichOneof("content") not in ("text", None)


def check_options(options: Mapping[str, float], known: Mapping[str, OptionSpec], *, owner: str) -> None:
    """Raises InvalidRequestError (UNKNOWN_OPTION, INVALID_OPTION); `owner` names the stage or pipeline with options."""
    for name, value in options.items():
        if name not in known:
            raise InvalidRequestError(
                f"unknown option {name!r}; {owner} has {', '.join(sorted(known)) or 'none'}",
                reason="UNKNOWN_OPTION",
                metadata={"option": name},
            )
        if not known[name].minimum <= value <= known[name].maximum:
            raise InvalidRequestError(
                f"option {name!r} is {value:g}; it must be from {known[name].minimum:g} to {known[name].maximum:g}",
                reason="INVALID_OPTION",
                metadata={"option": name},
            )


def check_sampling(sampling: request_pb2.Sampling) -> None:
    """Raises InvalidRequestError (INVALID_SAMPLING) for a value out of range, or for options that contradict."""
    given = {field.name: value for field, value in sampling.ListFields()}
    for name, (allowed, holds) in _SAMPLING.items():
        value: float | None = given.get(name)
        if value is not None and not (math.isfinite(value) and holds(value)):
            raise _sampling_error(f"{name} is {value:g}; it must be {allowed}")
    if "" in sampling.stop:
        raise _sampling_error("a stop text is empty; leave it out")
    if not all(word.strip() for word in sampling.bad_words):
        raise _sampling_error("one of bad_words is empty; leave it out")
    if sampling.HasField("max_tokens") and sampling.min_tokens > sampling.max_tokens:
        raise _sampling_error(
            f"min_tokens is {sampling.min_tokens} and max_tokens {sampling.max_tokens}; lower one, or raise the other"
        )
    _check_structure(sampling)


def _check_structure(sampling: request_pb2.Sampling) -> None:
    kind = sampling.WhichOneof("structure")
    if kind is None:
        return
    texts = sampling.choice.texts if kind == "choice" else [getattr(sampling, kind)]
    if not texts or not all(text.strip() for text in texts):
        problem = "holds no text, or an empty one" if kind == "choice" else "is empty"
        raise _sampling_error(f"{kind} {problem}; say what the output must be, or leave it unset")
    if sampling.min_tokens or sampling.ignore_eos:
        other = "min_tokens" if sampling.min_tokens else "ignore_eos"
        raise _sampling_error(
            f"{other} contradicts {kind}, which determines where the output ends; leave one of them out"
        )


def _sampling_error(message: str) -> InvalidRequestError:
    return InvalidRequestError(message, reason="INVALID_SAMPLING")


def _read(tensor: tensor_pb2.Tensor, what: str) -> Array:
    if tensor.WhichOneof("location") not in ("inline", None):
        raise InvalidChunkError(f"{what} must be sent inline")
    return read_inline(tensor)
