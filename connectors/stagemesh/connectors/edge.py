"""The basic types of flows: keys, packets, chunk policies with the chunker that applies them, and flow states.

A flow is the traffic of one request over one edge. Each attempt of a flow has its own `EdgeKey`. The producer sends
through an `Outlet`, and the consumer receives through an `Inlet`.
"""

import asyncio
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Generic, NamedTuple, TypeAlias, TypeVar

import numpy as np

from stagemesh.common.connector_descriptors import ConnectorName
from stagemesh.common.errors import CancelledRequestError, InvalidChunkError, StagemeshError, UnavailableError
from stagemesh.common.tensors import Array, Tensors

MetadataValue: TypeAlias = int | float | bool | str

REBIND_S = 15.0
"""The number of seconds for which a flow that has lost its producer or consumer waits for a replacement."""

NOT_READ = "NOT_READ"
"""The error reason for a flow whose consumer deliberately stopped reading."""
PEER_LOST = "PEER_LOST"
"""The error reason for a flow whose consumer was lost before the flow ended."""
_REPLICA_REASONS = frozenset({"UNKNOWN_FLOW", "STALE_ATTEMPT", "STALE_INCARNATION"})


class EdgeKey(NamedTuple):
    """Identifies one attempt of a flow."""

    request_id: str
    edge: str
    attempt: int


_NO_METADATA: Mapping[str, MetadataValue] = MappingProxyType({})


class Packet:
    """A group of tensors and a few metadata values that are sent together. Immutable. The tensors may be read-only."""

    # Not a frozen dataclass, because a packet is created for every chunk and a dataclass would be four times slower.
    __slots__ = ("metadata", "size_bytes", "tensors")

    def __init__(self, tensors: Tensors, metadata: Mapping[str, MetadataValue] = _NO_METADATA) -> None:
        self.tensors = tensors
        self.metadata = metadata
        size_bytes = 0
        for tensor in tensors.values():
            size_bytes += tensor.nbytes
        self.size_bytes = size_bytes
        """The total number of bytes of all tensors."""


@dataclass(frozen=True)
class StepPolicy:
    """The chunk policy that sends each packet of the engine as one chunk."""


@dataclass(frozen=True)
class WholePolicy:
    """The chunk policy that joins all packets of a flow along their first axis into one chunk, which is sent last."""


@dataclass(frozen=True)
class FramesPolicy:
    """The chunk policy that cuts a flow's packets along their first axis into chunks of `frames` rows."""

    frames: int
    initial_frames: int = 0
    """The number of rows of the first chunk. 0 means `frames`."""
    left_context_frames: int = 0
    """The maximum number of preceding rows that are repeated at the front of each chunk. The first chunk has none."""

    def __post_init__(self) -> None:
        if self.frames < 1 or self.initial_frames < 0 or self.left_context_frames < 0:
            raise ValueError(f"chunk policy needs frames >= 1 and other values >= 0, not {self}")


ChunkPolicy: TypeAlias = StepPolicy | WholePolicy | FramesPolicy


class Chunker:
    """Applies a chunk policy to the packets of one flow. Retains rows until they fill a chunk."""

    def __init__(self, policy: FramesPolicy | WholePolicy) -> None:
        # No number of rows completes a chunk of a WholePolicy before the flow ends.
        self._policy = policy if isinstance(policy, FramesPolicy) else FramesPolicy(frames=sys.maxsize)
        self._wanted_frames = self._policy.initial_frames or self._policy.frames
        self._waiting: list[Packet] = []
        self._waiting_frames = 0
        self._context: dict[str, Array] = {}

    def push(self, packet: Packet) -> list[Packet]:
        """Adds a packet and returns the chunks that it completes.

        Raises InvalidChunkError if the packet's tensors have unequal lengths or do not match the tensors of earlier
        packets.
        """
        frames = _frames(packet)
        self._waiting.append(packet)
        self._waiting_frames += frames
        chunks: list[Packet] = []
        if self._waiting_frames < self._wanted_frames:
            return chunks
        joined, start, total = _join(self._waiting), 0, self._waiting_frames
        while total - start >= self._wanted_frames:
            end = start + self._wanted_frames
            chunks.append(self._with_context(_slice(joined, start, end)))
            start, self._wanted_frames = end, self._policy.frames
        self._waiting, self._waiting_frames = [_slice(joined, start, total)] if total > start else [], total - start
        return chunks

    def finish(self) -> list[Packet]:
        """Returns the last chunk, which contains the remaining rows, or an empty list if no rows remain."""
        if not self._waiting_frames:
            return []
        joined = _join(self._waiting)
        self._waiting, self._waiting_frames = [], 0
        return [self._with_context(joined)]

    def _with_context(self, chunk: Packet) -> Packet:
        if not self._policy.left_context_frames:
            return chunk
        context = len(next(iter(self._context.values()))) if self._context else 0
        tensors = {
            name: np.concatenate([self._context[name], tensor]) if context else tensor
            for name, tensor in chunk.tensors.items()
        }
        self._context = {name: tensor[-self._policy.left_context_frames :] for name, tensor in tensors.items()}
        metadata: Mapping[str, MetadataValue] = {**chunk.metadata, "context_frames": context}
        return Packet(tensors, metadata)


@dataclass(frozen=True)
class FlowUsage:
    """The number of data chunks and payload bytes that a flow has sent."""

    edge: str
    connector: ConnectorName
    chunks: int
    size_bytes: int


@dataclass(frozen=True)
class FlowStatus:
    """A snapshot of the state of an outlet or inlet. The proto message FlowReport describes the fields."""

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
    """Returns whether a flow that failed with `error` can continue after its producer or consumer is replaced.

    An error that a stage reports about the request itself is not recoverable, because another replica would report the
    same error.
    """
    if error.reason in _REPLICA_REASONS or isinstance(error, UnavailableError):
        return True
    return isinstance(error, CancelledRequestError) and error.reason != NOT_READ


_Flow = TypeVar("_Flow")


class ReadyQueue(Generic[_Flow]):
    """The flows of one stream that have messages to send, in the order in which they became ready.

    Flows add themselves. The `pull` callback removes flows and sends the messages of these flows. `pull` is called at
    most once in each iteration of the event loop.
    """

    def __init__(self, pull: Callable[[], None]) -> None:
        self._pull = pull
        self._flows: dict[_Flow, None] = {}
        self._loop = asyncio.get_running_loop()
        self._is_scheduled = False

    def add(self, flow: _Flow) -> None:
        """Appends a flow, unless the queue already contains the flow, and schedules `pull`."""
        self._flows[flow] = None
        self.wake()

    def wake(self) -> None:
        """Schedules `pull` unless it is already scheduled."""
        if not self._is_scheduled:
            self._is_scheduled = True
            self._loop.call_soon(self._run)

    def discard(self, flow: _Flow) -> None:
        """Removes a flow that has ended or has moved to another stream. Does nothing for a flow that is not queued."""
        self._flows.pop(flow, None)

    def first(self) -> _Flow | None:
        """Returns the flow at the front without removing the flow, or None if the queue is empty."""
        return next(iter(self._flows), None)

    def rotate(self, flow: _Flow) -> None:
        """Moves a flow to the end of the queue."""
        self._flows.pop(flow, None)
        self._flows[flow] = None

    def take_all(self) -> list[_Flow]:
        """Removes and returns all flows."""
        flows = list(self._flows)
        self._flows.clear()
        return flows

    def _run(self) -> None:
        self._is_scheduled = False
        self._pull()


def _frames(packet: Packet) -> int:
    lengths = {tensor.shape[0] if tensor.ndim else -1 for tensor in packet.tensors.values()}
    if len(lengths) != 1 or -1 in lengths:
        shapes = {name: list(tensor.shape) for name, tensor in packet.tensors.items()}
        raise InvalidChunkError(f"tensors that are cut along their first axis must have equal lengths, not {shapes}")
    return lengths.pop()


def _join(packets: list[Packet]) -> Packet:
    if len(packets) == 1:
        return packets[0]
    names = packets[0].tensors.keys()
    if any(packet.tensors.keys() != names for packet in packets):
        raise InvalidChunkError("packets that are joined into one chunk must have the same tensors")
    tensors = {name: np.concatenate([packet.tensors[name] for packet in packets]) for name in names}
    metadata = {key: value for packet in packets for key, value in packet.metadata.items()}
    return Packet(tensors, metadata)


def _slice(packet: Packet, start: int, end: int) -> Packet:
    return Packet({name: tensor[start:end] for name, tensor in packet.tensors.items()}, packet.metadata)
