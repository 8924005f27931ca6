"""The base class of a pipeline file's entries, and the schema of an external stage's signature."""

from collections.abc import Mapping
from typing import Annotated, Any, Self, TypeAlias

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PlainSerializer,
    PlainValidator,
    SerializerFunctionWrapHandler,
    StringConstraints,
    model_serializer,
    model_validator,
)

from stagemesh.common.plugins.descriptors import Emitted, OptionSpec, OutputKind, Signature
from stagemesh.common.requests.request_checks import describe_allowed, is_allowed
from stagemesh.common.wire.tensors import TensorSpec, Value

Name: TypeAlias = Annotated[str, StringConstraints(pattern=r"^[a-z][a-z0-9-]*$", max_length=63)]
OptionName: TypeAlias = Annotated[str, StringConstraints(pattern=r"^[a-z][a-z0-9_]*$", max_length=63)]
OutputName: TypeAlias = Annotated[str, StringConstraints(pattern=r"^[a-z][a-z0-9_-]*$", max_length=63)]
Count: TypeAlias = Annotated[int, Field(strict=True, ge=0, le=1_000_000)]
Size: TypeAlias = Annotated[int, Field(strict=True, ge=1)]
Positive: TypeAlias = Annotated[int, Field(strict=True, ge=1, le=1_000_000)]
Number: TypeAlias = Annotated[float, Field(strict=True, allow_inf_nan=False)]
Flag: TypeAlias = Annotated[bool, Field(strict=True)]


class Entry(BaseModel, frozen=True):
    """Base class for mappings in a pipeline file. Unknown keys are errors."""

    # Python code uses the names of fields. `pipeline.file` accepts only the keys of the file.
    model_config = ConfigDict(extra="forbid", validate_by_name=True, validate_by_alias=True)


_FORMS: Mapping[OutputKind, tuple[str, range]] = {
    "text": ("uint8", range(1, 2)),
    "tokens": ("int32", range(1, 2)),
    "audio": ("float32", range(1, 3)),
    "image": ("uint8", range(1, 2)),
    "media": ("uint8", range(1, 2)),
}
"""The dtype and the allowed numbers of dimensions of a tensor, by the tensor's kind."""


def _parse_type(value: object) -> TensorSpec:
    return TensorSpec.parse(str(value))


class _TensorEntry(Entry, frozen=True):
    """An item of `accepts` or `emits`. A type alone may be written without a mapping."""

    type: Annotated[TensorSpec, PlainValidator(_parse_type, json_schema_input_type=str), PlainSerializer(str)]
    """The dtype and the shape, for example `float32[samples]`. A name in a shape is a length that varies."""

    @model_validator(mode="before")
    @classmethod
    def _expand(cls, value: object) -> object:
        return {"type": value} if isinstance(value, str) else value

    @model_serializer(mode="wrap")
    def _shorten(self, serialize: SerializerFunctionWrapHandler) -> Any:
        return str(self.type) if self.model_fields_set == {"type"} else serialize(self)


class AcceptedEntry(_TensorEntry, frozen=True):
    """An item of `accepts`: the type of a tensor that the stage accepts."""

    optional: Flag = False
    """Whether a packet or a whole request may omit the tensor."""


class EmittedEntry(_TensorEntry, frozen=True):
    """An item of `emits`: the type of a tensor that the stage emits, and how clients interpret the tensor."""

    kind: OutputKind = "tensor"
    """The interpretation of the tensor by clients."""
    sample_rate_hz: Count = 0
    """The sample rate of audio in Hz. Other kinds have none."""
    media_type: str = ""
    """The media type of a tensor of the kind `media`. Other kinds have none."""

    @model_validator(mode="after")
    def _check_kind(self) -> Self:
        if self.type.ticket_kind and self.kind != "tensor":
            raise ValueError("a ticket is not for clients; remove `kind`")
        dtype, dimensions = _FORMS.get(self.kind, (self.type.dtype, range(17)))
        if self.type.dtype != dtype or len(self.type.shape) not in dimensions:
            allowed = " or ".join(f"{dtype} with {number} dimension{'s'[: number - 1]}" for number in dimensions)
            raise ValueError(f"a tensor of kind {self.kind} is {allowed}, not {self.type}")
        if (self.kind == "audio") != bool(self.sample_rate_hz):
            raise ValueError("audio needs sample_rate_hz, and other kinds have none")
        if (self.kind == "media") != bool(self.media_type):
            raise ValueError("media needs media_type, and other kinds have none")
        return self


class StageOptionEntry(Entry, frozen=True):
    """An item of `options`: an option that requests may set for the stage. The type of `default` is its type."""

    default: Value
    """The value of requests that do not set the option."""
    minimum: Number | None = None
    """The least allowed number."""
    maximum: Number | None = None
    """The greatest allowed number, or the maximum number of characters of a text."""
    allowed_texts: tuple[str, ...] = ()
    """The allowed texts. Empty if any text is allowed."""
    description: str = ""
    """A description of the option for people."""

    @model_validator(mode="after")
    def _check_default(self) -> Self:
        is_text = isinstance(self.default, str)
        if self.allowed_texts and not is_text:
            raise ValueError("only a text has allowed_texts")
        if self.minimum is not None and (is_text or isinstance(self.default, bool)):
            raise ValueError("only a number has a minimum")
        if self.maximum is not None and isinstance(self.default, bool):
            raise ValueError("a flag has no maximum")
        if not is_allowed(self.default, self.spec):
            raise ValueError(f"the default must be {describe_allowed(self.spec)}")
        return self

    @property
    def spec(self) -> OptionSpec:
        """The option's type, default and allowed values."""
        bounds = {"minimum": self.minimum, "maximum": self.maximum}
        given = {name: value for name, value in bounds.items() if value is not None}
        return OptionSpec(self.default, **given, allowed_texts=self.allowed_texts, description=self.description)


class SignatureEntry(Entry, frozen=True):
    """The value of an external stage's `signature`."""

    accepts: Mapping[OutputName, AcceptedEntry] = {}
    """The accepted tensors by name. A stage that accepts none receives the client's prompt."""
    emits: Annotated[Mapping[OutputName, EmittedEntry], Field(min_length=1)]
    """The emitted tensors by name."""
    options: Mapping[OptionName, StageOptionEntry] = {}
    """The options that requests may set for the stage, by their names."""
    sampling: Flag = False
    """Whether the stage chooses tokens, so that a request may set sampling parameters for the stage."""
    adapters: Flag = False
    """Whether a request may select an adapter for the stage."""
    media: Flag = False
    """Whether a request's messages may contain images, audio or video."""
    negative_prompt: Flag = False
    """Whether a request may have a negative prompt."""

    @property
    def signature(self) -> Signature:
        """The signature that the entry describes."""
        return Signature(
            accepts={name: each.type for name, each in self.accepts.items()},
            emits={
                name: Emitted(each.type, each.kind, each.sample_rate_hz, each.media_type)
                for name, each in self.emits.items()
            },
            options={name: each.spec for name, each in self.options.items()},
            sampling=self.sampling,
            adapters=self.adapters,
            media=self.media,
            negative_prompt=self.negative_prompt,
            optional=frozenset(name for name, each in self.accepts.items() if each.optional),
        )
