"""The data plane's nouns: the packets that cross an edge, chunk policies, and what both ends of a flow share.

A flow is the traffic of one request over one edge. It has an `EdgeKey` for each attempt. Its producer uses an `Outlet`,
its consumer an `Inlet`.
"""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Generic, NamedTuple, TypeAlias, TypeVar

from stagemesh.common.connector_descriptors import ConnectorName
from stagemesh.common.errors import CancelledRequestError, StagemeshError, UnavailableError
from stagemesh.common.tensors import Tensors

MetadataValue: TypeAlias = int | float | bool | str

REBIND_S = 15.0
"""How long an end of a replaceable flow waits for another replica after it has lost its peer."""

NOT_READ = "NOT_READ"
"""Error reason: the consumer stopped reading by its own decision."""
PEER_LOST = "PEER_LOST"
"""Error reason: the consumer ended before its flow did."""
_REPLICA_REASONS = frozenset({"UNKNOWN_FLOW", "STALE_ATTEMPT", "STALE_INCARNATION"})


class EdgeKey(NamedTuple):
    """Identifies one attempt of a flow."""

    request_id: str
    edge: str
    attempt: int


_NO_METADATA: Mapping[str, MetadataValue] = MappingProxyType({})


class Packet:
    """Tensors that belong together, and a few metadata values about them. Immutable; views may be read-only."""

    # One is created for every chunk: a frozen dataclass takes four times as long.
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
    """Sends each emission of the engine as one chunk."""


@dataclass(frozen=True)
class WholePolicy:
    """Joins all emissions along their first axis and sends them as one chunk at the end."""


@dataclass(frozen=True)
class FramesPolicy:
    """Cuts chunks of `frames` rows along the first axis; the proto message of this name describes the fields."""

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
    """The state of one end of a flow at one moment; the proto message FlowReport describes the fields."""

    edge: str
    connector: ConnectorName
    connected: bool
    chunks: int
    waiting_chunks: int
    waiting_bytes: int
    credit_bytes: int
    wanted_bytes: int
    ended: bool


def is_recoverable(error: StagemeshError) -> bool:
    """Returns whether another replica at the other end can continue a flow that ended with `error`.

    An error that a stage reports about the request itself is not recoverable: another replica would report it again.
    """
    if error.reason in _REPLICA_REASONS or isinstance(error, UnavailableError):
        return True
    return isinstance(error, CancelledRequestError) and error.reason != NOT_READ


_Flow = TypeVar("_Flow")


class ReadyQueue(Generic[_Flow]):
    """The flows that have something to send over one stream, in the order in which they became ready.

    A flow only adds itself. The stream takes flows out and pulls their messages in `pull`, which runs at most once in
    each turn of the event loop.
    """

    def __init__(self, pull: Callable[[], None]) -> None:
        self._pull = pull
        self._flows: dict[_Flow, None] = {}
        self._loop = asyncio.get_running_loop()
        self._is_scheduled = False

    def add(self, flow: _Flow) -> None:
        """Adds a flow at the end, unless it is in the queue, and schedules the pull."""
        self._flows[flow] = None
        self.wake()

    def wake(self) -> None:
        """Schedules the pull."""
        if not self._is_scheduled:
            self._is_scheduled = True
            self._loop.call_soon(self._run)

    def discard(self, flow: _Flow) -> None:
        """Removes a flow that is over or that another stream carries."""
        self._flows.pop(flow, None)

    def first(self) -> _Flow | None:
        """Returns the flow whose turn it is, or None if no flow is ready."""
        return next(iter(self._flows), None)

    def rotate(self, flow: _Flow) -> None:
        """Moves a flow to the end."""
        self._flows.pop(flow, None)
        self._flows[flow] = None

    def take_all(self) -> list[_Flow]:
        """Takes all flows out."""
        flows = list(self._flows)
        self._flows.clear()
        return flows

    def _run(self) -> None:
        self._is_scheduled = False
        self._pull()
