"""Checks of a request's content.

The orchestrator and all stages share the checks, so that they report the same errors.
"""

import hashlib
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain
from typing import Any

import msgspec

from stagemesh.common.errors import InvalidChunkError, InvalidRequestError
from stagemesh.common.plugins.descriptors import OptionSpec
from stagemesh.common.wire.tensors import Array, Value, from_message, read_inline
from stagemesh.common.wire.versions import refuse_unknown, refuse_unknown_fields
from stagemesh.v1 import request_pb2, tensor_pb2

ATTEMPTS_A_CALL = 1000
"""The attempts of each of a client's calls have their own numbers: from 1, from 1001, and so on."""
_CALLER_NAME = re.compile(r"[A-Za-z0-9._:@/-]{0,128}")
_ID_LENGTH, _DIGEST_LENGTH = 128, 32
_REQUEST_ID = re.compile(rf"[A-Za-z0-9._:-]{{1,{_ID_LENGTH}}}")
_CHOICE = re.compile(r"/[0-9]{1,10}\Z")
_CALLER = "the caller"
_MAX_JSON_VALUES = 1 << 18
_ROLES = ", ".join(request_pb2.Role.keys()[1:])
_SAMPLING: Mapping[str, tuple[str, Callable[[float], bool]]] = {
    "max_tokens": ("at least 1", lambda value: value >= 1),
    "temperature": ("at least 0", lambda value: value >= 0),
    "top_p": ("over 0 and at most 1", lambda value: 0 < value <= 1),
    "min_p": ("from 0 to 1", lambda value: 0 <= value <= 1),
    "repetition_penalty": ("over 0", lambda value: value > 0),
    "presence_penalty": ("from -2 to 2", lambda value: -2 <= value <= 2),
    "frequency_penalty": ("from -2 to 2", lambda value: -2 <= value <= 2),
}


def choice_id(request_id: str, index: int, *, caller: str) -> str:
    """Returns the id by which stages know a choice of a request of `caller`. `index` is the index of the choice.

    With a caller, the id begins with the request's own id, of which at most 95 characters remain, and contains a digest
    of both. No other caller can therefore name, replace or end the request at a stage, whichever orchestrator it uses.
    No client can use the ids of choices other than the first.
    """
    if caller:
        # A request id contains no NUL. No two pairs therefore have the same text.
        digest = hashlib.sha256(f"{caller}\0{request_id}".encode()).hexdigest()[:_DIGEST_LENGTH]
        request_id = f"{request_id[: _ID_LENGTH - _DIGEST_LENGTH - 1]}.{digest}"
    return f"{request_id}/{index}" if index else request_id


def check_choice_id(request_id: str) -> None:
    """Raises InvalidRequestError (INVALID_ID) if `request_id` is not the id of a request or of one of its choices."""
    check_request_id(_CHOICE.sub("", request_id[:256]))


def check_request_id(request_id: str) -> None:
    """Raises InvalidRequestError (INVALID_ID) if `request_id` is empty, too long or has invalid characters."""
    if not _REQUEST_ID.fullmatch(request_id):
        raise InvalidRequestError(
            f"request_id is {request_id[:140]!r}; use 1 to 128 letters, digits, '.', '_', ':' and '-'",
            reason="INVALID_ID",
        )


def check_caller(name: str) -> None:
    """Raises InvalidRequestError (INVALID_CALLER) if a caller's name is too long or has invalid characters."""
    if _CALLER_NAME.fullmatch(name) is None:
        raise InvalidRequestError(
            f'caller is {name[:140]!r}; use at most 128 letters, digits and "._:@/-", or omit it',
            reason="INVALID_CALLER",
        )


def check_input(given: request_pb2.Input) -> None:
    """Checks the messages, tools and tensors of a request's input without decoding media.

    Raises InvalidRequestError (INVALID_PROMPT) if a message, a tool or the template arguments are invalid,
    InvalidChunkError if the bytes of a tensor or of audio samples are invalid, and UnsupportedError (UNKNOWN_KIND) if
    the prompt or a part is of an unknown kind.
    """
    if given.WhichOneof("prompt") is None:
        refuse_unknown(given, of=_CALLER)
    _check_json_size(given.conversation)
    _check_tools(given.conversation)
    read_json_object(given.conversation.template_arguments, "template_arguments")
    known = set[str]()
    for message in given.conversation.messages:
        _check_message(message)
        _check_calls(message, known)
    if given.media and given.WhichOneof("prompt") not in ("token_ids", "raw_text"):
        raise _prompt_error("media are given without token_ids or raw_text; make them parts of a message instead")
    if any(part.HasField("text") for part in given.media):
        raise _prompt_error("media have a part of text; move the text into the prompt")
    for part in parts_of(given):
        _check_part(part)
    read_tensors(given.tensors)


def read_tensors(messages: Iterable[tensor_pb2.Tensor]) -> dict[str, Array]:
    """Returns the tensors in the messages of a request's input, by tensor name.

    Raises InvalidRequestError if a name occurs twice. Raises InvalidChunkError if a tensor is not inline, or if its
    number of bytes does not match its shape.
    """
    tensors: dict[str, Array] = {}
    for message in messages:
        if message.name in tensors:
            raise InvalidRequestError(f"the input has tensor {message.name[:100]!r} twice; use each name once")
        tensors[message.name] = _read(message, f"input tensor {message.name[:100]!r}")
    return tensors


def read_json_object(text: str, what: str) -> dict[str, Any]:
    """Returns the JSON object that `text` contains, or an empty dict if `text` is empty.

    `what` names the value in the error message. Raises InvalidRequestError (INVALID_PROMPT) if `text` is not a JSON
    object.
    """
    if not text:
        return {}
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError) as exc:
        raise _prompt_error(f"{what} must be a JSON object: {exc}") from exc


def read_samples(audio: request_pb2.Audio) -> Array:
    """Returns the audio samples in a message as a read-only array.

    Raises InvalidChunkError if the samples are not inline, or if their number of bytes does not match their shape.
    """
    return _read(audio.samples, "samples of a message")


def empty_prompt_error() -> InvalidRequestError:
    """Returns the error (EMPTY_PROMPT) for a request that has no prompt although a stage needs a prompt."""
    return InvalidRequestError("the prompt is empty; provide some text", reason="EMPTY_PROMPT")


def has_prompt(given: request_pb2.Input) -> bool:
    """Returns whether a request's input has text, media or token ids. White space alone does not count as text."""
    parts = list(parts_of(given))
    contents = (message.content for message in given.conversation.messages)
    texts = chain([given.text, given.raw_text], contents, (part.text for part in parts))
    return bool(given.token_ids.ids) or any(map(is_medium, parts)) or any(text.strip() for text in texts)


def parts_of(given: request_pb2.Input) -> Iterator[request_pb2.Part]:
    """Yields the parts of all messages, and the media of a prompt without messages."""
    for message in given.conversation.messages:
        yield from message.parts
    yield from given.media


def is_medium(part: request_pb2.Part) -> bool:
    """Returns whether a part of a message is an image, audio or a video."""
    return part.WhichOneof("content") not in ("text", None)


def read_options(messages: Mapping[str, tensor_pb2.TypedValue]) -> dict[str, Value]:
    """Returns the values of a request's options, by option name.

    Raises InvalidRequestError (INVALID_OPTION) if a value is not set, and UnsupportedError (UNKNOWN_KIND) if it is of
    an unknown type.
    """
    values: dict[str, Value] = {}
    for name, message in messages.items():
        value = from_message(message)
        if value is None:
            refuse_unknown(message, of=_CALLER)
            raise _option_error(name, "has no value; set one, or omit the option")
        values[name] = value
    return values


def check_options(options: Mapping[str, Value], known: Mapping[str, OptionSpec], *, owner: str) -> dict[str, Value]:
    """Returns the values of a request's options, each with the type that its specification declares.

    `known` contains the allowed options by name. `owner` describes the stage or pipeline that declares these options,
    for the error message. Raises InvalidRequestError if an option is unknown (UNKNOWN_OPTION), or if its value has
    another type or is not allowed (INVALID_OPTION).
    """
    values: dict[str, Value] = {}
    for name, given in options.items():
        if name not in known:
            is_sampling = name in request_pb2.Sampling.DESCRIPTOR.fields_by_name
            other = ", and it is a sampling parameter" if is_sampling else ""
            raise InvalidRequestError(
                f"unknown option {name[:100]!r}; {owner} has {', '.join(sorted(known)) or 'none'}{other}",
                reason="UNKNOWN_OPTION",
                metadata={"option": name},
            )
        value = _convert(given, known[name].default)
        if value is None or not is_allowed(value, known[name]):
            shown = f"{given:g}" if isinstance(given, float) else repr(given[:200] if isinstance(given, str) else given)
            raise _option_error(name, f"is {shown}; it must be {describe_allowed(known[name])}")
        values[name] = value
    return values


def _option_error(name: str, problem: str) -> InvalidRequestError:
    return InvalidRequestError(f"option {name[:100]!r} {problem}", reason="INVALID_OPTION", metadata={"option": name})


def _convert(given: Value, default: Value) -> Value | None:
    """Returns `given` with the type of `default`, or None if it cannot be converted without loss."""
    if isinstance(default, bool | str) or isinstance(given, bool | str):
        return given if type(given) is type(default) else None
    if isinstance(default, float):
        return float(given)
    return int(given) if math.isfinite(given) and given == int(given) else None


def is_allowed(value: Value, spec: OptionSpec) -> bool:
    """Returns whether an option may have a value of the option's type."""
    if isinstance(value, str):
        return value in spec.allowed_texts if spec.allowed_texts else len(value) <= spec.maximum
    return spec.minimum <= value <= spec.maximum


def describe_allowed(spec: OptionSpec) -> str:
    """Returns a description of an option's type and allowed values, for error messages."""
    match spec.default:
        case bool():
            return "true or false"
        case str() if spec.allowed_texts:
            return f"one of {', '.join(map(repr, spec.allowed_texts))}"
        case str():
            return "text" if math.isinf(spec.maximum) else f"text of at most {spec.maximum:g} characters"
        case _:
            pass
    kind = "a whole number" if isinstance(spec.default, int) else "a number"
    if math.isinf(spec.minimum):
        return kind if math.isinf(spec.maximum) else f"{kind} of at most {spec.maximum:g}"
    at_least = f"{kind} of at least {spec.minimum:g}"
    return at_least if math.isinf(spec.maximum) else f"{kind} from {spec.minimum:g} to {spec.maximum:g}"


def check_known(*parameters: request_pb2.Parameters | request_pb2.StageParameters) -> None:
    """Raises UnsupportedError (UNKNOWN_KIND) if parameters of a request have a field that this process does not know.

    Otherwise a parameter of a newer client would have no effect, and the client would not notice.
    """
    for each in parameters:
        refuse_unknown_fields(each, of=_CALLER)
        refuse_unknown_fields(each.sampling, of=_CALLER)
        if isinstance(each, request_pb2.StageParameters):
            refuse_unknown_fields(each.chunk, of=_CALLER)


def check_sampling(sampling: request_pb2.Sampling) -> None:
    """Raises InvalidRequestError (INVALID_SAMPLING) if a parameter is out of range or contradicts another parameter."""
    given = {field.name: value for field, value in sampling.ListFields()}
    for name, (allowed, holds) in _SAMPLING.items():
        value: float | None = given.get(name)
        if value is not None and not (math.isfinite(value) and holds(value)):
            raise _sampling_error(f"{name} is {value:g}; it must be {allowed}")
    if "" in sampling.stop:
        raise _sampling_error("a stop text is empty; remove it")
    if not all(word.strip() for word in sampling.bad_words):
        raise _sampling_error("an entry of bad_words is empty; remove it")
    if sampling.HasField("max_tokens") and sampling.min_tokens > sampling.max_tokens:
        raise _sampling_error(
            f"min_tokens is {sampling.min_tokens} but max_tokens is {sampling.max_tokens}; lower min_tokens, or raise "
            "max_tokens"
        )
    _check_structure(sampling)


def _check_structure(sampling: request_pb2.Sampling) -> None:
    kind = sampling.WhichOneof("structure")
    if kind is None:
        return
    texts = sampling.allowed_texts.texts if kind == "allowed_texts" else [getattr(sampling, kind)]
    if not texts or not all(text.strip() for text in texts):
        problem = "has no text, or an empty text" if kind == "allowed_texts" else "is empty"
        raise _sampling_error(f"{kind} {problem}; specify the required output, or leave {kind} unset")
    if sampling.min_tokens or sampling.ignore_eos:
        other = "min_tokens" if sampling.min_tokens else "ignore_eos"
        raise _sampling_error(
            f"{other} contradicts {kind}, which determines where the output ends; remove one of the two options"
        )


def _check_message(message: request_pb2.Message) -> None:
    if message.role not in request_pb2.Role.values()[1:]:
        raise _prompt_error(f"a message's role is {message.role}; use one of {_ROLES}")
    if message.content and message.parts:
        raise _prompt_error("a message has both content and parts; move the content into a part")
    if message.tool_calls and message.role != request_pb2.ROLE_ASSISTANT:
        raise _prompt_error("a message with tool_calls has another role than ROLE_ASSISTANT; change its role")
    if message.reasoning and message.role != request_pb2.ROLE_ASSISTANT:
        raise _prompt_error("a message with reasoning has another role than ROLE_ASSISTANT; change its role")
    if bool(message.tool_call_id) != (message.role == request_pb2.ROLE_TOOL):
        raise _prompt_error("a message must have a tool_call_id if its role is ROLE_TOOL, and none otherwise")


def _check_calls(message: request_pb2.Message, known: set[str]) -> None:
    """Checks the tool calls of a message, or the id if the message is the result of a call.

    `known` contains the ids of the calls in earlier messages. Adds the ids of the message's own calls.
    """
    if message.tool_call_id and message.tool_call_id not in known:
        raise _prompt_error(
            f"tool_call_id is {message.tool_call_id[:100]!r}, which no earlier message has among its tool_calls; send "
            "the message with this call before its result"
        )
    ids = [call.id for call in message.tool_calls]
    if len(set(ids)) < len(ids):
        raise _prompt_error("two tool_calls of a message have the same id; give each call its own id")
    known.update(ids)
    for call in message.tool_calls:
        if not (call.id and call.name):
            raise _prompt_error("a tool call has no id or no name; set both")
        read_json_object(call.arguments, f"the arguments of tool call {call.id[:100]!r}")


def _check_json_size(conversation: request_pb2.Conversation) -> None:
    """Limits the values in the JSON texts of a conversation before any of them is parsed. Counts their separators."""
    calls = (call.arguments for message in conversation.messages for call in message.tool_calls)
    texts = chain([conversation.template_arguments], (tool.parameters for tool in conversation.tools), calls)
    if sum(text.count(mark) for text in texts for mark in ",[{") > _MAX_JSON_VALUES:
        raise _prompt_error(f"tools, tool calls and template_arguments have over {_MAX_JSON_VALUES} values; send fewer")


def _check_tools(conversation: request_pb2.Conversation) -> None:
    tools, choice = conversation.tools, conversation.tool_choice
    names = [tool.name for tool in tools]
    if "" in names or len(set(names)) < len(names):
        raise _prompt_error("a tool has no name, or the name of another tool; give each tool its own name")
    for tool in tools:
        read_json_object(tool.parameters, f"the parameters of tool {tool.name[:100]!r}")
    if choice.required and (choice.name or not names) and choice.name not in names:
        missing = (
            f"names {choice.name[:100]!r}, which is no tool" if choice.name else "requires a call, but has no tools"
        )
        raise _prompt_error(f"tool_choice {missing}; send the tool")


def _check_part(part: request_pb2.Part) -> None:
    kind = part.WhichOneof("content")
    if kind is None:
        refuse_unknown(part, of=_CALLER)
        raise _prompt_error("a message has a part without content; remove the part")
    if part.use_audio_in_video and not part.HasField("video_file"):
        raise _prompt_error("use_audio_in_video is set for a part that is not a video; leave it unset")
    if kind == "audio":
        read_samples(part.audio)
    elif kind != "text" and getattr(part, kind).WhichOneof("content") is None:
        refuse_unknown(getattr(part, kind), of=_CALLER)


def _prompt_error(message: str) -> InvalidRequestError:
    return InvalidRequestError(message, reason="INVALID_PROMPT")


def _sampling_error(message: str) -> InvalidRequestError:
    return InvalidRequestError(message, reason="INVALID_SAMPLING")


def _read(tensor: tensor_pb2.Tensor, what: str) -> Array:
    if tensor.WhichOneof("location") not in ("inline", None):
        raise InvalidChunkError(f"{what} must be sent inline")
    return read_inline(tensor)
