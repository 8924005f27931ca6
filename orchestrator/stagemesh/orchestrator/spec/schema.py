"""The shapes that a pipeline file may have; what the values mean together is checked afterwards."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeAlias, cast

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    JsonValue,
    SerializerFunctionWrapHandler,
    StringConstraints,
    Tag,
    model_serializer,
    model_validator,
)

from stagemesh.common.connector_descriptors import AUTO
from stagemesh.common.descriptors import OptionSpec
from stagemesh.common.stage_config import STALL_S, DataPlaneConfig
from stagemesh.connectors.edge import ChunkPolicy, FramesPolicy, StepPolicy, WholePolicy
from stagemesh.orchestrator.spec.conditions import Comparison, InputKind

Name: TypeAlias = Annotated[str, StringConstraints(pattern=r"^[a-z][a-z0-9-]*$", max_length=63)]
OptionName: TypeAlias = Annotated[str, StringConstraints(pattern=r"^[a-z][a-z0-9_]*$", max_length=63)]
OutputName: TypeAlias = Annotated[str, StringConstraints(pattern=r"^[a-z][a-z0-9_-]*$", max_length=63)]
Count: TypeAlias = Annotated[int, Field(strict=True, ge=0, le=1_000_000)]
Size: TypeAlias = Annotated[int, Field(strict=True, ge=1)]
Positive: TypeAlias = Annotated[int, Field(strict=True, ge=1, le=1_000_000)]
Number: TypeAlias = Annotated[float, Field(strict=True, allow_inf_nan=False)]


class _Shape(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class DataPlaneShape(_Shape):
    """A stage's `data_plane`: the limits of each of its replicas."""

    arena_bytes: Size = DataPlaneConfig.arena_bytes
    window_bytes: Size = DataPlaneConfig.window_bytes
    inline_limit_bytes: Size = DataPlaneConfig.inline_limit_bytes

    @model_validator(mode="after")
    def _holds_together(self) -> "DataPlaneShape":
        assert self.config, "the limits are checked where they are made"
        return self

    @property
    def config(self) -> DataPlaneConfig:
        """The limits in the replica's terms; raises ValueError where they do not hold together."""
        return DataPlaneConfig(self.arena_bytes, self.window_bytes, self.inline_limit_bytes)


class TermShape(_Shape):
    """An item of a `when`: names one of option, input and output, and says what of it."""

    option: str | None = None
    input: InputKind | None = None
    output: str | None = None
    equal: Number | None = Field(default=None, alias="is")
    is_not: Number | None = None
    over: Number | None = None
    at_least: Number | None = None
    under: Number | None = None
    at_most: Number | None = None
    given: Annotated[bool, Field(strict=True)] | None = None
    wanted: Annotated[bool, Field(strict=True)] | None = None

    @property
    def comparisons(self) -> Mapping[Comparison, float]:
        """What an option is compared with."""
        values = {
            Comparison.IS: self.equal,
            Comparison.IS_NOT: self.is_not,
            Comparison.OVER: self.over,
            Comparison.AT_LEAST: self.at_least,
            Comparison.UNDER: self.under,
            Comparison.AT_MOST: self.at_most,
        }
        return {how: value for how, value in values.items() if value is not None}

    @property
    def flag_name(self) -> str | None:
        """The key that is for inputs and outputs alone, where it is there."""
        return next((name for name in ("given", "wanted") if getattr(self, name) is not None), None)

    @model_serializer(mode="wrap")
    def _as_written(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return {name: value for name, value in write(self).items() if value is not None}


def _as_list(value: object) -> object:
    return [cast("object", value)] if isinstance(value, dict) else value


WhenShape: TypeAlias = Annotated[list[TermShape], Field(min_length=1), BeforeValidator(_as_list)]
"""Terms that must all hold; a single one may stand alone."""


def _join_form(value: object) -> str:
    return "(names)" if isinstance(value, list) else "(word)"


JoinShape: TypeAlias = Annotated[
    Annotated[Literal["all", "any"], Tag("(word)")] | Annotated[list[str], Field(min_length=1), Tag("(names)")],
    Discriminator(_join_form),
]


class StageShape(_Shape):
    """A value of `stages`."""

    engine: str
    model: str | None = None
    function: str | None = None
    replicas: Positive = 1
    options: dict[str, JsonValue] = {}
    when: WhenShape | None = None
    join: JoinShape = "all"
    data_plane: DataPlaneShape = DataPlaneShape()
    stall_s: Annotated[Number, Field(ge=0)] = STALL_S


class FramesShape(_Shape):
    """An edge's `chunk` where it is a mapping."""

    frames: Positive
    initial_frames: Count = 0
    left_context_frames: Count = 0


def _chunk_form(value: object) -> str:
    return "(frames)" if isinstance(value, dict | FramesShape) else "(word)"


ChunkShape: TypeAlias = Annotated[
    Annotated[Literal["step", "whole"], Tag("(word)")] | Annotated[FramesShape, Tag("(frames)")],
    Discriminator(_chunk_form),
]


class EdgeShape(_Shape):
    """An item of `edges`."""

    producer: str = Field(alias="from")
    consumer: str = Field(alias="to")
    transform: str | None = None
    connector: str = AUTO
    chunk: ChunkShape = "step"
    tokens: Literal["all", "last"] = "all"
    name: Name | None = None
    when: WhenShape | None = None

    @property
    def edge_name(self) -> str:
        """The name given, or "from->to"."""
        return self.name or f"{self.producer}->{self.consumer}"

    @property
    def policy(self) -> ChunkPolicy:
        """The chunk policy in the data plane's terms."""
        if isinstance(self.chunk, FramesShape):
            return FramesPolicy(self.chunk.frames, self.chunk.initial_frames, self.chunk.left_context_frames)
        return WholePolicy() if self.chunk == "whole" else StepPolicy()


class OptionShape(_Shape):
    """A value of `options`: a number that requests may set, for conditions alone."""

    default: Number
    minimum: Number
    maximum: Number

    @model_validator(mode="after")
    def _holds_together(self) -> "OptionShape":
        if not self.minimum <= self.default <= self.maximum or self.minimum == self.maximum:
            raise ValueError("minimum is to be less than maximum, and default between them")
        return self

    @property
    def spec(self) -> OptionSpec:
        """The option in the terms of cards."""
        return OptionSpec(self.default, self.minimum, self.maximum)


class CallerLimitsShape(_Shape):
    """The value of `limits.per_caller`; what is left out has no limit of its own."""

    max_in_flight: Positive | None = None
    max_in_flight_bytes: Size | None = None
    max_queued: Count | None = None
    max_queued_bytes: Size | None = None


class LimitsShape(_Shape):
    """The value of `limits`."""

    max_in_flight: Positive = 64
    max_in_flight_bytes: Size = 4 << 30
    max_queued: Count = 256
    max_queued_bytes: Size = 256 << 20
    max_unread_bytes: Size = 256 << 20
    per_caller: CallerLimitsShape = CallerLimitsShape()


class PipelineShape(_Shape):
    """The whole file."""

    pipeline: Name
    stages: Annotated[dict[Name, StageShape], Field(min_length=1)]
    edges: list[EdgeShape] = []
    outputs: Annotated[dict[OutputName, str], Field(min_length=1)]
    options: dict[OptionName, OptionShape] = {}
    limits: LimitsShape = LimitsShape()
