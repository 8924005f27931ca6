"""The data plane's nouns: what flows over an edge, and what the two ends of a flow offer an engine's runtime.

A flow is one request's traffic over one edge in one attempt, named by its `EdgeKey`. Its producer holds an
`Outlet`, its consumer an `Inlet`.
"""

from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple, Protocol, TypeAlias

from stagemesh.common.connector_descriptors import ConnectorName
from stagemesh.common.errors import StagemeshError
from stagemesh.common.tensors import Tensors

MetadataValue: TypeAlias = int | float | bool | str


class EdgeKey(NamedTuple):
    """Names a flow."""

    request_id: str
    edge: str
    attempt: int


_NO_METADATA: Mapping[str, MetadataValue] = MappingProxyType({})


class Packet:
    """Tensors that belong together, with small facts about them; not to be changed. Views may be read-only."""

    # One is made for every chunk: a frozen dataclass takes four times as long.
    __slots__ = ("metadata", "size_bytes", "tensors")

    def __init__(self, tensors: Tensors, metadata: Mapping[str, MetadataValue] = _NO_METADATA) -> None:
        self.tensors = tensors
        self.metadata = metadata
        size_bytes = 0
        for tensor in tensors.values():
            size_bytes += tensor.nbytes
        self.size_bytes = size_bytes
        """Bytes of all tensors."""


@dataclass(frozen=True)
class StepPolicy:
    """Each emission of the engine is a chunk."""


@dataclass(frozen=True)
class WholePolicy:
    """All emissions, joined along their first axis, are one chunk at the end."""


@dataclass(frozen=True)
class FramesPolicy:
    """Chunks of `frames` along the first axis; see the proto message of this name."""

    frames: int
    initial_frames: int = 0
    left_context_frames: int = 0

    def __post_init__(self) -> None:
        if self.frames < 1 or self.initial_frames < 0 or self.left_context_frames < 0:
            raise ValueError(f"chunk policy needs frames >= 1 and the others >= 0, not {self}")


ChunkPolicy: TypeAlias = StepPolicy | WholePolicy | FramesPolicy


@dataclass(frozen=True)
class FlowUsage:
    """What a flow has carried so far."""

    edge: str
    connector: ConnectorName
    chunks: int
    size_bytes: int


@dataclass(frozen=True)
class FlowStatus:
    """One end of a flow at one moment; see the proto message FlowReport."""

    edge: str
    connector: ConnectorName
    connected: bool
    chunks: int
    waiting_chunks: int
    waiting_bytes: int
    credit_bytes: int
    wanted_bytes: int
    ended: bool


class Outlet(Protocol):
    """The producing end of a flow."""

    async def send(self, packet: Packet) -> None:
        """Hands a packet over; returns when there is credit and arena for it. Raises what broke the flow."""

    async def finish(self) -> None:
        """Sends what the chunk policy holds back and End; returns when the consumer has everything."""

    async def abort(self, error: StagemeshError) -> None:
        """Sends Abort where the flow is still open, and lets go of everything. Never raises."""

    @property
    def usage(self) -> FlowUsage:
        """What was sent."""
        ...

    @property
    def standing(self) -> FlowStatus:
        """Where it stands now."""
        ...


class Inlet(Protocol):
    """The consuming end of a flow."""

    def __aiter__(self) -> AsyncIterator[Packet]:
        """The packets, each once and in order, up to End. Raises what Abort or a lost producer brought."""
        ...

    async def aclose(self, *, lost: bool = False) -> None:
        """Refuses the rest and lets go of everything; `lost`: so that the producer may be given another consumer.

        Closing twice is harmless.
        """

    @property
    def standing(self) -> FlowStatus:
        """Where it stands now."""
        ...
