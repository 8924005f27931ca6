"""The bodies of HTTP requests: the limit of their size, forms with a file, and parameters that endpoints share."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, TypeAlias, TypeVar, cast

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.datastructures import UploadFile

from stagemesh.client import GenerateArguments, OptionValue, StageArguments, Tool
from stagemesh.common.errors import InvalidRequestError
from stagemesh.gateway.catalog import Model
from stagemesh.gateway.errors import ParameterError, error_response

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send


_SAMPLING = (
    *("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"),
    *("stop", "stop_token_ids", "min_tokens", "ignore_eos", "bad_words"),
)
"""The parameters that have the same name and meaning in the client."""
MAX_SEED = (1 << 63) - 1

Object: TypeAlias = Mapping[str, Any]


class Body(BaseModel):
    """The body of a request. A parameter that it does not name is an error, because it would have no effect."""

    model_config = ConfigDict(extra="forbid")


class StreamOptions(Body):
    """The options of a stream."""

    include_usage: bool = False
    include_obfuscation: Literal[False] = False


class Function(Body):
    """A function that the model may call."""

    name: str
    description: str = ""
    parameters: Object | None = None

    def to_tool(self) -> Tool:
        """Returns the client's tool."""
        return Tool(self.name, self.description, self.parameters or "")


class StageBody(Body):
    """The parameters of every endpoint that generates: those of OpenAI's API, and those of Stagemesh."""

    model: str
    user: str | None = None
    seed: Annotated[int | None, Field(ge=0, le=MAX_SEED)] = None
    options: dict[str, OptionValue] = {}
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

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] = []
    min_tokens: int | None = None
    ignore_eos: bool = False
    bad_words: list[str] = []
    n: Annotated[int | None, Field(ge=1)] = None
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
        given = {name: getattr(self, name) for name in _SAMPLING if name in self.model_fields_set}
        if max_tokens is not None:
            given["max_tokens"] = max_tokens
        if isinstance(self.stop, str):
            given["stop"] = [self.stop]
        arguments |= cast("GenerateArguments", {name: value for name, value in given.items() if value is not None})
        if self.n is not None:
            arguments["choices"] = self.n
        return arguments


def option_values(model: Model, given: BaseModel, *names: str, within: str = "") -> dict[str, OptionValue]:
    """Returns the values of parameters that are options of a model's stages, by the names of the options.

    - `given` has the parameters. Those that are None are omitted.
    - `names` are the names of the parameters, which errors name after the prefix `within`.

    Raises ParameterError if no stage has the option of a parameter.
    """
    values = {name: value for name in names if (value := getattr(given, name)) is not None}
    return {model.find_option(name, param=f"{within}{name}"): value for name, value in values.items()}


B = TypeVar("B", bound=BaseModel)


def validate(body: type[B], values: object) -> B:
    """Returns the values of a JSON object or of a form as a body.

    Raises RequestValidationError, which names each wrong value.
    """
    try:
        return body.model_validate(values)
    except ValidationError as exc:
        raise RequestValidationError(exc.errors()) from exc


class Form(NamedTuple):
    """The parts of a form: the fields by name, and the content of the file."""

    fields: dict[str, str]
    data: bytes


async def read_form(request: Request, *, file: str, max_bytes: int) -> Form:
    """Reads a form with the file `file`. A name that ends with [] has this end removed.

    Raises InvalidRequestError if the body is not a form, or if the file is missing, empty, or larger than `max_bytes`.
    """
    if not request.headers.get("content-type", "").startswith("multipart/form-data"):
        raise InvalidRequestError(f"the body is not a form; send multipart/form-data with the file {file!r}")
    fields = dict[str, str]()
    data: bytes | None = None
    async with request.form(max_files=1) as form:
        for key, value in form.multi_items():
            name = key.removesuffix("[]")
            if not isinstance(value, UploadFile):
                fields[name] = value
            elif name != file:
                raise ParameterError(name, "this parameter is not supported")
            elif (value.size or 0) > max_bytes:
                raise ParameterError(
                    file,
                    f"it has {value.size} bytes, and may have {max_bytes}; send a shorter or a compressed file",
                    reason="FILE_TOO_LARGE",
                )
            else:
                data = await value.read()
    if data is None:
        raise ParameterError(file, "it is missing; send it as a file")
    if not data:
        raise ParameterError(file, "it is empty", reason="INVALID_MEDIA")
    return Form(fields, data)


_TOO_LARGE = 413


class BodyLimit:
    """An ASGI middleware that ends requests with status 413 whose body exceeds a number of bytes."""

    def __init__(self, app: "ASGIApp", max_bytes: int) -> None:
        self._app, self._max_bytes = app, max_bytes

    async def __call__(self, scope: "Scope", receive: "Receive", send: "Send") -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        length = dict(scope["headers"]).get(b"content-length", b"")
        if length.isdigit():
            # The server reads no more than this.
            app = self._app if int(length) <= self._max_bytes else self._reject
            await app(scope, receive, send)
            return
        received, rejected = 0, False

        async def limited() -> "Message":
            nonlocal received, rejected
            message = await receive()
            received += len(message.get("body", b""))
            if received > self._max_bytes:
                # A body of unknown length: the rest is not read.
                rejected = True
                raise InvalidRequestError(f"the body exceeds {self._max_bytes} bytes", reason="MESSAGE_TOO_LARGE")
            return message

        started = False

        async def track(message: "Message") -> None:
            nonlocal started
            if not rejected:
                started = True
                await send(message)

        try:
            await self._app(scope, limited, track)
        except InvalidRequestError:
            if not rejected:
                raise
        if rejected and not started:
            await self._reject(scope, receive, send)

    async def _reject(self, scope: "Scope", receive: "Receive", send: "Send") -> None:
        error = InvalidRequestError(
            f"the body exceeds {self._max_bytes} bytes; send less, or upload large files to the pipeline's store",
            reason="MESSAGE_TOO_LARGE",
        )
        response = error_response(error)
        response.status_code = _TOO_LARGE
        response.headers["Connection"] = "close"
        await response(scope, receive, send)
