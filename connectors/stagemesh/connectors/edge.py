"""The basic types of flows: keys, packets, usage and status, and the queue of the flows that are ready to send.

A flow is the traffic of one request over one edge. Each attempt of a flow has its own `EdgeKey`. The producer sends
through an `Outlet`, and the consumer receives through an `Inlet`.
"""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Generic, NamedTuple, TypeAlias, TypeVar, cast

import numpy as np

from stagemesh.common.connector_descriptors import ConnectorName
from stagemesh.common.errors import CancelledRequestError, StagemeshError, UnavailableError
from stagemesh.common.tensors import Tensors
from stagemesh.common.typed_values import Value
from stagemesh.common.user_errors import is_list
from stagemesh.connectors.tickets import Ticket

MetadataValue: TypeAlias = Value

REBIND_S = 15.0
"""Time limit, in seconds, for the replacement of a flow's unreachable producer or consumer."""

NOT_READ = "NOT_READ"
"""The reason of a flow's error if the consumer's step failed or paused, so that no other consumer can help."""
_REPLICA_REASONS = frozenset({"UNKNOWN_FLOW", "STALE_ATTEMPT", "STALE_INCARNATION"})


class EdgeKey(NamedTuple):
    """The identifier of one attempt of a flow."""

    request_id: str
    edge: str
    attempt: int


_NO_METADATA: Mapping[str, MetadataValue] = MappingProxyType({})
NO_TICKETS: Mapping[str, Ticket] = MappingProxyType({})


class Packet:
    """Tensors, tickets and metadata values that are sent together. Immutable. The tensors may be read-only."""

    # Not a frozen dataclass, because a packet is created for every chunk and a dataclass would be four times slower.
    __slots__ = ("metadata", "size_bytes", "tensors", "tickets")

    def __init__(
        self,
        tensors: Tensors,
        metadata: Mapping[str, MetadataValue] = _NO_METADATA,
        tickets: Mapping[str, Ticket] = NO_TICKETS,
    ) -> None:
        self.tensors = tensors
        self.metadata = metadata
        self.tickets = tickets
        """The tickets for state that engines hand over themselves, by name. No tensor has the same name.

        The tickets of a packet are accepted and released together. Their state does not count in `size_bytes`.
        """
        size_bytes = 0
        for tensor in tensors.values():
            size_bytes += tensor.nbytes
        self.size_bytes = size_bytes
        """The total number of bytes of the packet's tensors."""


@dataclass(frozen=True)
class FlowUsage:
    """The numbers of data chunks and of payload bytes that a flow has sent."""

    edge: str
    connector: ConnectorName
    chunks: int
    size_bytes: int
    handed_over_bytes: int = 0
    """The size of the state for which the flow has sent tickets, in bytes."""


@dataclass(frozen=True)
class FlowStatus:
    """A snapshot of the progress of an outlet or inlet. The proto message FlowReport describes the fields."""

    edge: str
    connector: ConnectorName
    connected: bool
    chunks: int
    waiting_chunks: int
    waiting_bytes: int
    credit_bytes: int
    wanted_bytes: int
    ended: bool
    handed_over_bytes: int


def is_recoverable(error: StagemeshError) -> bool:
    """Returns whether a flow that failed with `error` can continue with another producer or consumer.

    An error about the request itself is not recoverable, because another replica would report the same error.
    """
    if error.reason in _REPLICA_REASONS or isinstance(error, UnavailableError):
        return True
    return isinstance(error, CancelledRequestError) and error.reason != NOT_READ


_Flow = TypeVar("_Flow")


class ReadyQueue(Generic[_Flow]):
    """The flows of one stream that have messages to send, in the order in which they became ready.

    Flows add themselves to the queue. The callback `pull` removes flows from the queue and sends their messages. The
    event loop calls `pull` at most once in each iteration.
    """

    def __init__(self, pull: Callable[[], None]) -> None:
        self._pull = pull
        self._flows: dict[_Flow, None] = {}
        self._loop = asyncio.get_running_loop()
        self._is_scheduled = False

    def add(self, flow: _Flow) -> None:
        """Schedules `pull`, and appends the flow unless the queue already contains it."""
        self._flows[flow] = None
        self.wake()

    def wake(self) -> None:
        """Schedules a call of `pull` in the next iteration of the event loop, unless a call is already scheduled."""
        if not self._is_scheduled:
            self._is_scheduled = True
            self._loop.call_soon(self._run)

    def discard(self, flow: _Flow) -> None:
        """Removes a flow from the queue. Does nothing if the flow is not in the queue."""
        self._flows.pop(flow, None)

    def first(self) -> _Flow | None:
        """Returns the first flow without removing it, or None if the queue is empty."""
        return next(iter(self._flows), None)

    def rotate(self, flow: _Flow) -> None:
        """Moves a flow to the end of the queue. Adds the flow if it is not in the queue."""
        self._flows.pop(flow, None)
        self._flows[flow] = None

    def take_all(self) -> list[_Flow]:
        """Removes all flows from the queue and returns them in order."""
        flows = list(self._flows)
        self._flows.clear()
        return flows

    def _run(self) -> None:
        self._is_scheduled = False
        self._pull()


def packets_problem(made: object) -> str:
    """Returns what is wrong with the result of user code that must be a list of packets, or "" if it is one.

    The problem is a noun phrase such as "a list with ndarray".
    """
    if not is_list(made):
        return type(made).__name__
    return next((problem for each in made if (problem := _packet_problem(each))), "")


def _packet_problem(packet: object) -> str:
    if not isinstance(packet, Packet):
        return f"a list with {type(packet).__name__}; it must consist of Packets"
    for name, tensor in packet.tensors.items():
        if not isinstance(cast("object", tensor), np.ndarray):
            return f"tensor {name!r} as {type(tensor).__name__}; it must be a numpy array"
    return ""
