"""The bodies of HTTP requests: their limits, JSON, forms with files, and parameters that endpoints share."""

import asyncio
import re
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from typing import Annotated, Any, ClassVar, NamedTuple, TypeAlias, TypeVar, cast
from weakref import WeakValueDictionary

import msgspec
from fastapi import Request
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import PydanticCustomError
from python_multipart.multipart import parse_options_header

from stagemesh.client import GenerateArguments, OptionValue, StageArguments
from stagemesh.client.content import EncodedMedia
from stagemesh.common.errors import InvalidRequestError
from stagemesh.gateway import parameters
from stagemesh.gateway.catalog import Model
from stagemesh.gateway.errors import ParameterError, validation_error
from stagemesh.gateway.limits import CALLER
from stagemesh.gateway.unions import FLAG, LIST, NUMBER, TEXT, by_type

T = TypeVar("T")

MAX_ITEMS = 4096
"""The maximum number of entries of a list."""
MAX_TOKEN_IDS = 1 << 18
"""The maximum number of entries of a list of token ids."""
_MAX_KEYS = 1024
"""The maximum number of keys of an object with parameters."""
_MAX_VALUES = MAX_TOKEN_IDS + 65_536
"""The maximum number of commas in a JSON text, outside of its texts."""
_MAX_OBJECTS = 65_536
"""The maximum number of texts, lists and objects in a JSON text. They take longer than numbers."""

_SAMPLING = {
    *("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"),
    *("stop", "stop_token_ids", "min_tokens", "ignore_eos", "bad_words"),
}
"""The parameters that have the same name and meaning in the client."""
MAX_SEED = (1 << 63) - 1

Object: TypeAlias = Mapping[str, Any]


Items: TypeAlias = Annotated[list[T], Field(max_length=MAX_ITEMS, fail_fast=True)]
TokenIds: TypeAlias = Annotated[list[int], Field(max_length=MAX_TOKEN_IDS, fail_fast=True)]

_Option: TypeAlias = Annotated[
    Annotated[str, TEXT] | Annotated[bool, FLAG] | Annotated[int | float, NUMBER], by_type("a text, a number or a flag")
]
Stops: TypeAlias = Annotated[Annotated[str, TEXT] | Annotated[Items[str], LIST], by_type("a text or a list of texts")]


def voice_id(voice: object) -> object:
    """Returns the id of a voice that is an object with an id, as OpenAI's API has created voices."""
    fields: Object = cast("Object", voice) if isinstance(voice, dict) else {"id": voice}
    return fields["id"] if list(fields) == ["id"] else fields


VoiceId: TypeAlias = Annotated[str | None, BeforeValidator(voice_id)]


class Body(BaseModel):
    """The body of a request, or an object in it. The policy of `parameters` decides about parameters without a field.

    Its lists are `Items` or `TokenIds`: each wrong entry of another list would be an error with a copy of its input.
    """

    model_config = ConfigDict(extra="forbid")

    rules: ClassVar[parameters.Rules] = {}
    """The rules for known parameters without a field, in addition to the rules of the base classes."""
    permits_unknown_nulls: ClassVar[bool] = False
    """Whether null is the same as omitting a parameter even if the parameter is unknown."""
    decisions: ClassVar[parameters.Rules]
    """The rules of the class and of its base classes."""
    _declared: ClassVar[frozenset[str]]

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        super().__pydantic_init_subclass__(**kwargs)
        cls._declared = frozenset(field.alias or name for name, field in cls.model_fields.items())
        bases = [base for base in reversed(cls.__mro__) if issubclass(base, Body)]
        cls.decisions = {name: rule for base in bases for name, rule in base.rules.items()}

    @model_validator(mode="before")
    @classmethod
    def _apply_policy(cls, given: object) -> object:
        """Rejects objects with too many keys, each of which could be an error, and applies the policy to the others."""
        check_keys(given)
        if not isinstance(given, dict):
            return given
        values = cast("Object", given)
        if cls.permits_unknown_nulls:
            values = {name: value for name, value in values.items() if value is not None}
        return parameters.apply_policy(values, cls._declared, cls.decisions)


def check_keys(given: object) -> None:
    """Raises PydanticCustomError if a JSON object, or an object that it contains directly, has too many keys."""
    if any(len(_entries(each)) > _MAX_KEYS for each in (given, *_entries(given))):
        raise PydanticCustomError("too_long", "An object should have at most {keys} keys", {"keys": _MAX_KEYS})


def _entries(value: object) -> Collection[object]:
    """Returns the values of a JSON object. Empty for another value."""
    return cast("Object", value).values() if isinstance(value, dict) else ()


class StreamOptions(Body):
    """The options of a stream."""

    rules = parameters.RULES["stream_options"]

    include_usage: bool = False
    continuous_usage_stats: bool = False
    """Whether each part of a stream has the usage so far, as vLLM has it."""


class StageBody(Body):
    """The parameters of every endpoint that generates: those of OpenAI's API, and those of Stagemesh."""

    rules = parameters.RULES["generation"]

    model: str
    user: str | None = None
    seed: Annotated[int | None, Field(ge=0, le=MAX_SEED)] = None
    options: dict[str, _Option] = {}
    """The values of options that the stages declare, by name."""
    stages: dict[str, dict[str, Any]] = {}
    """The parameters of single stages, by name."""
    priority: Annotated[int, Field(ge=-10, le=10)] = 0

    def stage_arguments(self, model: Model) -> GenerateArguments:
        """Returns the arguments of the client for these parameters."""
        return {
            "pipeline": model.description.pipeline,
            "adapter": model.adapter,
            "seed": self.seed,
            "options": dict(self.options),
            # The client checks their names and types.
            "stages": cast("Mapping[str, StageArguments]", self.stages),
            "priority": self.priority,
            "caller": self.user or "",
        }


class SamplingBody(StageBody):
    """The parameters by which language models choose tokens: OpenAI's, and those that vLLM has in addition."""

    rules = parameters.RULES["sampling"]

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    stop: Stops | None = None
    stop_token_ids: TokenIds = []
    min_tokens: int | None = None
    ignore_eos: bool = False
    bad_words: Items[str] = []
    n: Annotated[int | None, Field(ge=1, le=MAX_ITEMS)] = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    @property
    def includes_usage(self) -> bool:
        """Whether a stream ends with the usage."""
        return self.stream_options is not None and self.stream_options.include_usage

    def sampling_arguments(self, model: Model, *, max_tokens: int | None) -> GenerateArguments:
        """Returns the arguments of the client for these parameters.

        Omits those that are not given, because a pipeline without a language model accepts none.
        """
        if self.stream_options is not None and not self.stream:
            raise ParameterError("stream_options", "it needs stream: true")
        arguments = self.stage_arguments(model)
        given = self.model_dump(include=_SAMPLING, exclude_unset=True, exclude_none=True)
        if max_tokens is not None:
            given["max_tokens"] = max_tokens
        if isinstance(self.stop, str):
            given["stop"] = [self.stop]
        arguments |= cast("GenerateArguments", given)
        if self.includes_usage and self.stream_options is not None and self.stream_options.continuous_usage_stats:
            arguments["count_tokens"] = True
        if self.n is not None:
            arguments["choices"] = self.n
        return arguments


def option_values(model: Model, given: BaseModel, *names: str, within: str = "") -> dict[str, OptionValue]:
    """Returns the values of parameters that are options of a model's stages, by the names of the options.

    - `given` has the parameters. Those that are None are omitted.
    - `names` are the names of the parameters, which errors name after the prefix `within`.

    Omits parameters without an option if the policy permits it (`options` in parameters.toml), and OpenAI's voices that
    the model lacks. Raises ParameterError if no stage has the option of another parameter.
    """
    values: dict[str, OptionValue] = {}
    for name in names:
        value, param, rule = getattr(given, name), f"{within}{name}", parameters.RULES["options"].get(name)
        if name == "voice" and value is not None:
            value = model.find_voice(value)
        if value is not None and rule is not None and model.option(name) is None:
            parameters.apply_rule(rule, name, value, param=param)
        elif value is not None:
            values[model.find_option(name, param=param)] = value
    return values


B = TypeVar("B", bound=BaseModel)


def validate(body: type[B], values: object) -> B:
    """Returns the values of a JSON object or of a form as a body.

    Raises InvalidRequestError, which names the wrong values.
    """
    try:
        return body.model_validate(values)
    except ValidationError as exc:
        raise validation_error(exc) from None


_COUNTED_BYTES = 1 << 16
_SLOW_NUMBER = re.compile(rb"[-+.0-9eE]{26}|[0-9][eE][-+]?0*[1-9][0-9]{2}")
"""Numbers whose conversion takes ten microseconds: long ones, and those next to the smallest float."""


def decode_json(text: bytes, *, fault: str = "the body is not JSON") -> Any:
    """Returns the value of a JSON text. Blocks. `fault` is the beginning of the error if it is another text.

    Raises InvalidRequestError if it is not JSON, and MESSAGE_TOO_LARGE if it has too many values. These are counted
    before it is parsed, because the parser lets no other thread run.
    """
    rest, quotes, values, objects = b"", 0, 0, 0
    for begin in range(0, len(text), _COUNTED_BYTES):
        bare = (rest + text[begin : begin + _COUNTED_BYTES]).replace(b"\\\\", b"")
        rest = b"\\" if bare.endswith(b"\\") else b""
        parts = bare.replace(b'\\"', b"").split(b'"')
        outside = b"".join(parts[quotes % 2 :: 2])
        quotes += len(parts) - 1
        values += outside.count(b",")
        objects += outside.count(b"[") + outside.count(b"{")
        if _SLOW_NUMBER.search(outside):
            raise InvalidRequestError(
                "a number of the JSON has more than 25 characters, or an exponent of three digits; shorten it"
            )
        if values > _MAX_VALUES or objects + quotes // 2 > _MAX_OBJECTS:
            raise InvalidRequestError(
                f"the JSON has more than {_MAX_VALUES:,} values, or {_MAX_OBJECTS:,} texts, lists and objects",
                reason="MESSAGE_TOO_LARGE",
            )
    try:
        return msgspec.json.decode(text)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as exc:
        raise InvalidRequestError(f"{fault}: {exc}") from exc


_INLINE_BYTES = 1 << 16
_LARGE = ThreadPoolExecutor(2, "large-input")
_TURNS = WeakValueDictionary[str, asyncio.Lock]()
"""The locks of callers that have large work."""


async def aside(work: Callable[[], T], *, size_bytes: int) -> T:
    """Returns the result of `work` on an input of some size.

    If it is large, one of two threads does it. It waits until other large work of the caller is done.
    """
    if size_bytes <= _INLINE_BYTES:
        return work()
    async with _TURNS.setdefault(CALLER.get(), asyncio.Lock()):
        return await asyncio.get_running_loop().run_in_executor(_LARGE, copy_context().run, work)


async def read_json(request: Request, body: type[B]) -> B:
    """Reads a body that is JSON.

    Raises InvalidRequestError if it is not JSON or has another content type, which a form of a web page could have.
    """
    text = await request.body()
    if not is_json(request):
        raise InvalidRequestError("the body is not JSON; send it with the header Content-Type: application/json")
    return await aside(lambda: validate(body, decode_json(text)), size_bytes=len(text))


def is_json(request: Request) -> bool:
    """Returns whether the content type of a request's body is JSON."""
    kind, _ = parse_options_header(request.headers.get("content-type", ""))
    return kind == b"application/json" or (kind.startswith(b"application/") and kind.endswith(b"+json"))


class Form(NamedTuple):
    """The parts of a form: the fields by name, and the files with the media types that the caller states, or none."""

    fields: dict[str, str]
    files: list[EncodedMedia]


_MAX_FIELDS = 64
_MAX_FIELD_BYTES = 1 << 20
_MAX_NAME = 100
_MAX_PART_HEAD_BYTES = 4096


async def read_form(
    request: Request, *, file: str, min_files: int = 1, max_files: int = 1, max_bytes: int | None = None
) -> Form:
    """Reads a form whose files have the name `file`. A name that ends with [] has this end removed.

    Raises ParameterError if the body is not a form, if it has too many or too large parts, or if a file is missing,
    empty, larger than `max_bytes`, or has another name.
    """
    kind, options = parse_options_header(request.headers.get("content-type", ""))
    if kind != b"multipart/form-data" or not options.get(b"boundary"):
        raise ParameterError(file, f"the body is not a form; send multipart/form-data with the file {file!r}")
    body, most_parts = await request.body(), _MAX_FIELDS + max_files
    form = await aside(
        lambda: _parse_form(body, options[b"boundary"], file=file, most_parts=most_parts), size_bytes=len(body)
    )
    request.scope["sender"].add(0, values=sum(text.count(",") for text in form.fields.values()))
    if not min_files <= len(form.files) <= max_files:
        problem = f"the form has {len(form.files)} files; send at most {max_files}"
        raise ParameterError(file, problem if form.files else "it is missing; send it as a file")
    for each in form.files:
        if not each.data:
            raise ParameterError(file, "it is empty", reason="INVALID_MEDIA")
        if max_bytes is not None and len(each.data) > max_bytes:
            raise ParameterError(
                file,
                f"it has {len(each.data)} bytes, and may have {max_bytes}; send a shorter or a compressed file",
                reason="FILE_TOO_LARGE",
            )
    return form


def _parse_form(body: bytes, boundary: bytes, *, file: str, most_parts: int) -> Form:
    form = Form({}, [])
    # The first delimiter may begin the body. What is before it is ignored.
    _, *parts = (b"\r\n" + body).split(b"\r\n--" + boundary, most_parts + 2)
    if not parts or len(parts) > most_parts + 1 or not parts.pop().startswith(b"--"):
        raise ParameterError(file, f"the form is incomplete, or has more than {most_parts} parts")
    for part in parts:
        head, _, content = part.partition(b"\r\n\r\n")
        lines = (line.partition(b":") for line in head[:_MAX_PART_HEAD_BYTES].split(b"\r\n"))
        headers = {name.lower(): value.strip() for name, _, value in lines}
        _, options = parse_options_header(headers.get(b"content-disposition"))
        name = options.get(b"name", b"").decode(errors="replace").removesuffix("[]")[:_MAX_NAME]
        if b"filename" not in options:
            if len(content) > _MAX_FIELD_BYTES:
                raise ParameterError(name, f"it has {len(content)} bytes; a field has at most {_MAX_FIELD_BYTES}")
            form.fields[name] = content.decode(errors="replace")
        elif name != file:
            raise ParameterError(name, f"it is not a file of this form; send {file!r} alone")
        else:
            form.files.append(EncodedMedia(content, headers.get(b"content-type", b"").decode(errors="replace")))
    return form
