"""The schema of pipeline files.

`pipeline.file` checks the structure of a file against the schema. The resolvers convert each entry to its type in
`pipeline.graph`.
"""

import sys
from collections.abc import Mapping
from dataclasses import field
from functools import partial
from itertools import accumulate, repeat
from operator import mul
from typing import Annotated, Literal, Self, TypeAlias, cast

from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    JsonValue,
    PlainSerializer,
    SerializerFunctionWrapHandler,
    Tag,
    model_serializer,
    model_validator,
)
from pydantic.dataclasses import dataclass

from stagemesh.common.media.encodings import MAX_FRAME_RATE
from stagemesh.common.plugins.connectors import AUTO
from stagemesh.common.plugins.descriptors import INPUT, OptionSpec
from stagemesh.common.process.media_config import MediaConfig, parse_root
from stagemesh.common.process.stage_process import STALL_S, DataPlaneConfig
from stagemesh.common.wire.chunk_sizes import ChunkPolicy, FramesPolicy, StepPolicy, WholePolicy
from stagemesh.pipeline.conditions import Comparison, InputKind
from stagemesh.pipeline.signature_schema import (
    Count,
    Entry,
    Flag,
    Name,
    Number,
    OptionName,
    OutputName,
    Positive,
    SignatureEntry,
    Size,
)

_WRITTEN = PlainSerializer(partial(Entry.model_dump, by_alias=True, exclude_unset=True))
"""Field annotation: only the keys that the file contains are serialized. Defaults are omitted."""


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class DataPlaneEntry(DataPlaneConfig):
    """The value of a stage's `data_plane`: memory limits of each replica of the stage."""

    arena_bytes: Size = DataPlaneConfig.arena_bytes
    window_bytes: Size = DataPlaneConfig.window_bytes
    inline_limit_bytes: Size = DataPlaneConfig.inline_limit_bytes
    shared_arena: bool = DataPlaneConfig.shared_arena


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class OptionEntry(OptionSpec):
    """An item of `options`: a number that requests may set for use in conditions. Engines ignore this number."""

    default: Number
    """The value of requests that do not set the option."""
    minimum: Number = Field()
    """The least allowed value."""
    maximum: Number = Field()
    """The greatest allowed value."""

    def __post_init__(self) -> None:
        if not self.minimum <= self.default <= self.maximum or self.minimum == self.maximum:
            raise ValueError("minimum must be less than maximum, and default must be between them")


class OptionTerm(Entry, frozen=True):
    """An item of `when` that compares an option with one or more numbers."""

    option: str
    """The name of an option that the file or a stage declares."""
    equal: Annotated[Number | None, Field(validation_alias="is", serialization_alias="is")] = None
    """True if the option equals this number. A flag is 0 or 1."""
    is_not: Number | None = None
    """True if the option differs from this number."""
    over: Number | None = None
    """True if the option is greater than this number."""
    at_least: Number | None = None
    """True if the option is greater than this number, or equals it."""
    under: Number | None = None
    """True if the option is less than this number."""
    at_most: Number | None = None
    """True if the option is less than this number, or equals it."""

    @property
    def comparisons(self) -> Mapping[Comparison, float]:
        """The numbers with which the option is compared, by comparison operator."""
        values = {how: getattr(self, how.key, self.equal) for how in Comparison}
        return {how: value for how, value in values.items() if value is not None}


class InputTerm(Entry, frozen=True):
    """An item of `when` that tests whether the request contains a kind of input."""

    input: InputKind
    """The kind of input. `stream` is input that the client streams while the request runs."""
    given: Flag = True
    """False if the term is true for requests without this kind of input."""


class OutputTerm(Entry, frozen=True):
    """An item of `when` that tests whether an output is requested."""

    output: str
    """The name of an output of the pipeline."""
    wanted: Flag = True
    """False if the term is true for requests that do not want this output."""


def _term_form(value: object) -> str | None:
    names = [name for name in ("option", "input", "output") if isinstance(value, dict) and name in value]
    return f"({names[0]})" if len(names) == 1 else None


Term: TypeAlias = Annotated[
    Annotated[OptionTerm, Tag("(option)")]
    | Annotated[InputTerm, Tag("(input)")]
    | Annotated[OutputTerm, Tag("(output)")],
    Discriminator(
        _term_form,
        custom_error_type="condition",
        custom_error_message="name exactly one of option, input, output, and use a list for more",
    ),
    _WRITTEN,
]


def _as_list(value: object) -> object:
    return [cast("object", value)] if isinstance(value, dict) else value


When: TypeAlias = Annotated[list[Term], Field(min_length=1), BeforeValidator(_as_list)]
"""The terms of a condition, which must all be true. In the file, a single term may be written without a list."""


Join: TypeAlias = Annotated[
    Annotated[Literal["all", "any"], Tag("(word)")] | Annotated[list[str], Field(min_length=1), Tag("(names)")],
    Discriminator(lambda value: "(names)" if isinstance(value, list) else "(word)"),
]


def _check_address(text: str) -> str:
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise ValueError("write an address as host:port")
    return text


class SplitEntry(Entry, frozen=True):
    """The value of a stage's `split`: how many replicas compute prompts, and how many sample tokens."""

    prefill: Positive
    """The number of replicas that compute prompts."""
    decode: Positive
    """The number of replicas that sample tokens."""
    min_tokens: Count | None = None
    """The number of tokens from which a prompt is computed by a prefill replica."""
    wait_s: Annotated[Number, Field(gt=0)] | None = None
    """The time in seconds for which a decode replica waits for a prefill replica."""


class StageEntry(Entry, frozen=True):
    """An item of `stages`: the description of a stage."""

    engine: str
    """The engine that computes: `vllm`, `diffusion`, `function`, `fake`, or one that another package adds."""
    model: str | None = None
    """The model: a name that `stagemesh models list` prints, a name on Hugging Face, or a path."""
    function: str | None = None
    """The name of the function that the engine runs. Needed by the engines `function` and `fake`."""
    replicas: Positive = 1
    """The number of replicas that `stagemesh up` and the Helm chart start."""
    options: dict[str, JsonValue] = Field(default_factory=dict[str, JsonValue])
    """Options of the engine, of the function, or both. Requests cannot change them."""
    when: When | None = None
    """The condition on which the stage runs. None if it runs for each request that needs it."""
    join: Join = "all"
    """The rule by which the packets of several incoming edges are combined into inputs.

    A list names the edges whose packets are combined, by their own names or by those of their producers.
    """
    data_plane: DataPlaneEntry = DataPlaneEntry()
    """The memory limits of each replica."""
    insecure_tcp: bool = False
    """Whether libraries of the replicas may use TCP without TLS although the replicas have certificates."""
    stall_s: Annotated[Number, Field(ge=0)] = STALL_S
    """The time in seconds without progress after which a step counts as hanging. 0 turns the detection off."""
    non_finite: Literal["warn", "error"] = "warn"
    """The reaction to NaN and infinite values in audio and images: a warning of the request, or an error."""
    error_details: bool | None = None
    """Whether clients receive the text of exceptions of user code. None stands for True if `stagemesh up` runs it."""
    group: Name | None = None
    """The colocation group: stages of one group share a pod in Kubernetes. None if the stage has pods of its own."""
    split: SplitEntry | None = None
    """Divides the stage into a prefill stage and a decode stage (`pipeline.stage_splits`). None in a checked stage."""


class ExternalStageEntry(Entry, frozen=True):
    """An item of `stages` with `engine: external`: a stage whose replicas are not started by Stagemesh.

    Each replica listens at one of `addresses`, or registers with the orchestrator.
    """

    engine: Literal["external"]
    """Always `external`."""
    signature: SignatureEntry
    """The tensors that the stage accepts and emits, and its options."""
    addresses: tuple[Annotated[str, AfterValidator(_check_address)], ...] = ()
    """The addresses of replicas, as "host:port". Empty if all replicas register themselves."""
    when: When | None = None
    """The condition on which the stage runs. None if it runs for each request that needs it."""
    join: Join = "all"
    """The rule by which the stage combines the packets of several incoming edges into inputs."""


def _stage_form(value: object) -> str:
    match value:
        case {"engine": "external"} | ExternalStageEntry():
            return "(external)"
        case _:
            return "(started)"


AnyStageEntry: TypeAlias = Annotated[
    Annotated[StageEntry, Tag("(started)")] | Annotated[ExternalStageEntry, Tag("(external)")],
    Discriminator(_stage_form),
]


Ramp: TypeAlias = Annotated[
    Annotated[Literal["auto"], Tag("(word)")] | Annotated[tuple[Positive, ...], Field(min_length=1), Tag("(sizes)")],
    Discriminator(lambda value: "(sizes)" if isinstance(value, list | tuple) else "(word)"),
]


class FramesEntry(Entry, frozen=True):
    """The value of an edge's `chunk` if packets are cut into chunks by numbers of frames."""

    frames: Positive
    """The number of frames of each chunk."""
    initial_frames: Count = 0
    """The number of frames of the first chunk, or 0 for `frames`."""
    ramp: Ramp | None = None
    """The numbers of frames of several first chunks, instead of `initial_frames`.

    "auto" if the orchestrator chooses them for each request, at least `initial_frames`.
    """
    left_context_frames: Count = 0
    """The maximum number of preceding frames that are repeated at the front of each chunk."""

    @model_validator(mode="after")
    def _check_sizes(self) -> Self:
        if isinstance(self.ramp, tuple) and self.initial_frames:
            raise ValueError("remove initial_frames, because ramp begins with the size of the first chunk")
        if self.ramp == "auto" and not self.initial_frames:
            raise ValueError("add initial_frames, the least size of a chunk that `ramp: auto` may choose")
        if max(self.policy.ramp, default=0) > self.frames:
            raise ValueError("make initial_frames and the sizes in ramp at most `frames`")
        return self

    @property
    def first_frames(self) -> int:
        """The least number of frames of the first chunk."""
        return next(iter(self.policy.ramp), self.frames)

    def sizes_from(self, initial_frames: int) -> tuple[int, ...]:
        """Returns the sizes of chunks if the first one has `initial_frames` frames. The last size repeats.

        A ramp that is "auto" doubles the size. The sizes of any other ramp remain, without smaller ones.
        """
        ramp = self.ramp if isinstance(self.ramp, tuple) else ()
        if self.ramp == "auto":
            ramp = tuple(accumulate(repeat(2, self.frames.bit_length()), mul, initial=initial_frames))
        return initial_frames, *(size for size in ramp if initial_frames < size < self.frames), self.frames

    @property
    def policy(self) -> FramesPolicy:
        """The chunk policy. If the ramp is "auto", the policy for a stage that is not measured."""
        if isinstance(self.ramp, tuple):
            return FramesPolicy(self.frames, self.ramp, self.left_context_frames)
        ramp = self.sizes_from(self.initial_frames)[:-1] if self.initial_frames else ()
        return FramesPolicy(self.frames, ramp, self.left_context_frames)


Chunk: TypeAlias = Annotated[
    Annotated[Literal["step", "whole"], Tag("(word)")] | Annotated[FramesEntry, Tag("(frames)")],
    Discriminator(lambda value: "(frames)" if isinstance(value, dict | FramesEntry) else "(word)"),
]


class EdgeEntry(Entry, frozen=True):
    """An item of `edges`: the description of an edge."""

    producer: Annotated[str, Field(validation_alias="from", serialization_alias="from")]
    """The stage that produces the packets, or `@input` for input that clients stream."""
    consumer: Annotated[str, Field(validation_alias="to", serialization_alias="to")]
    """The stage that consumes the packets."""
    transform: str | None = None
    """The name of the transform that converts the producer's tensors into those that the consumer accepts."""
    connector: str = AUTO
    """The connector that transfers the tensors. `auto` selects the fastest one that works between two replicas."""
    chunk: Chunk = "step"
    """The policy by which packets are cut into chunks.

    `step` sends each packet as it is, and `whole` sends all packets as one chunk at the end.
    """
    tokens: Literal["all", "last"] = "all"
    """The rows that the edge transfers of each tensor that has one row for each token.

    "all" selects all rows. "last" selects only the last row.
    """
    name: Name | None = None
    """The name of the edge. Needed if two edges connect the same stages. None stands for "from->to"."""
    when: When | None = None
    """The condition on which the edge exists. None if it exists whenever both stages run."""

    @property
    def is_input(self) -> bool:
        """Whether the edge carries the input that a client streams, so that its producer is the orchestrator."""
        return self.producer == INPUT

    @property
    def edge_name(self) -> str:
        """The edge's name in the file, or "from->to" if the file does not name the edge."""
        return self.name or f"{self.producer}->{self.consumer}"

    @property
    def policy(self) -> ChunkPolicy:
        """The chunk policy that `chunk` describes, as the type that the data plane uses."""
        if isinstance(self.chunk, FramesEntry):
            return self.chunk.policy
        return WholePolicy() if self.chunk == "whole" else StepPolicy()


class OutputEntry(Entry, frozen=True):
    """An item of `outputs`: a tensor of a stage, and the file that the stage makes of it.

    An output that is sent as it is may be written as the text of `source` alone.
    """

    source: Annotated[str, Field(validation_alias="from", serialization_alias="from")]
    """The output's origin, written "stage" or "stage.tensor"."""
    media_type: str | None = None
    """The media type in which the stage encodes the output. None if the stage does not encode it."""
    frame_rate: Annotated[Number, Field(gt=0, le=MAX_FRAME_RATE)] | None = None
    """The number of frames per second of a video."""
    stored: Annotated[bool, Field(strict=True)] = False
    """Whether the stage stores the output in the pipeline's object store instead of sending it."""

    @property
    def stage(self) -> str:
        """The name of the stage that produces the output."""
        return self.source.partition(".")[0]

    @property
    def tensor(self) -> str:
        """The name of the stage's tensor. Empty in a file that names only the stage."""
        return self.source.partition(".")[2]

    @model_validator(mode="before")
    @classmethod
    def _from_text(cls, value: object) -> object:
        return {"from": value} if isinstance(value, str) else value

    @model_serializer(mode="wrap")
    def _to_text(self, serialize: SerializerFunctionWrapHandler) -> object:
        return self.source if self.model_fields_set <= {"source"} else serialize(self)


class Bounds(Entry, frozen=True):
    """Limits on the number and the total bytes of running and of waiting requests, and on the number of sessions.

    An omitted limit means unlimited.
    """

    max_in_flight: Positive = sys.maxsize
    """The maximum number of running requests."""
    max_in_flight_bytes: Size = sys.maxsize
    """The maximum number of bytes of running requests."""
    max_queued: Count = sys.maxsize
    """The maximum number of requests that wait for admission."""
    max_queued_bytes: Size = sys.maxsize
    """The maximum number of bytes of requests that wait for admission."""
    max_sessions: Positive = sys.maxsize
    """The maximum number of sessions."""


class Limits(Bounds, frozen=True):
    """The value of `limits`: limits for the whole pipeline and for each caller."""

    max_in_flight: Positive = 64
    max_in_flight_bytes: Size = 4 << 30
    max_queued: Count = 256
    max_queued_bytes: Size = 256 << 20
    max_sessions: Positive = 1000
    per_caller: Annotated[Bounds, _WRITTEN] = Bounds()
    """The limits for each caller."""
    max_choices: Positive = 16
    """The maximum number of choices of a request, each of which counts as a running request."""
    max_unread_bytes: Size = 256 << 20
    """The maximum number of output bytes that a request's callers may leave unread.

    Only the caller that has read the most bytes is considered. The request is stopped if the maximum is exceeded.
    """
    max_session_bytes: Size = 32 << 20
    """The maximum number of bytes of a session's transcript together with the input of its open turn."""

    @property
    def largest_request(self) -> int:
        """The maximum number of choices of a request that the limits on running requests can admit."""
        return min(self.max_choices, self.max_in_flight, self.per_caller.max_in_flight)


def _checked_root(root: str) -> str:
    parse_root(root)
    return root


Root: TypeAlias = Annotated[str, AfterValidator(_checked_root)]
"""A folder or a URL of fsspec below which media files are stored."""


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class MediaEntry(MediaConfig):
    """The value of `media`: where media files are stored, and to which files requests may refer."""

    store: Root = ""
    allowed: tuple[Root, ...] = ()
    storage_options: dict[str, dict[str, JsonValue]] = field(default_factory=dict[str, dict[str, JsonValue]])
    max_file_bytes: Size = MediaConfig.max_file_bytes
    max_uploads: Size = MediaConfig.max_uploads
    max_upload_bytes: Size = MediaConfig.max_upload_bytes
    keep_uploads_s: Annotated[Number, Field(ge=1)] = MediaConfig.keep_uploads_s


class SessionsEntry(Entry, frozen=True):
    """The value of `sessions`: how sessions park, and how their turns are detected."""

    park_s: Annotated[Number, Field(ge=0)] = 60.0
    """The time without events after which the call of an idle session ends, in seconds. 0 if it never ends."""
    turn_detection: Name | None = None
    """The stage that detects turns. None if sessions cannot have their turns detected."""


class PipelineFile(Entry, frozen=True):
    """The content of a pipeline file, with the types of the schema."""

    name: Annotated[Name, Field(validation_alias="pipeline", serialization_alias="pipeline")]
    """The name of the pipeline."""
    stages: Annotated[Mapping[Name, AnyStageEntry], Field(min_length=1)]
    """The stages by their names."""
    edges: tuple[EdgeEntry, ...] = ()
    """The edges between stages."""
    outputs: Annotated[Mapping[OutputName, OutputEntry], Field(min_length=1)]
    """The outputs that requests may want, by their names."""
    options: Mapping[OptionName, OptionEntry] = {}
    """The options that requests may set for use in conditions, by their names. Stages may declare further ones."""
    main_stage: Name | None = None
    """The stage that a request's sampling parameters and adapter mean if the request does not name a stage."""
    limits: Limits = Limits()
    """The limits on requests and sessions, for each orchestrator."""
    sessions: SessionsEntry = SessionsEntry()
    """The behavior of sessions."""
    media: MediaEntry | None = None
    """The object store of the pipeline. None if requests cannot refer to files and no output is stored."""
