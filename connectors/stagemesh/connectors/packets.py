"""The basic types of flows: packets, their tickets and keys.

A flow is the traffic of one request over one edge. Each attempt of a flow has its own `EdgeKey`. The producer sends
through an `Outlet`, and the consumer receives through an `Inlet`. A ticket stands for state that engines hand over to
each other by a transport of their own, such as pages of a KV cache. The data plane carries only the kind of the state
and the descriptor by which the consumer's engine reads it. The state remains in the memory of the producer's engine
until it is released there, which happens exactly once.
"""

import asyncio
import logging
import weakref
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple, Protocol, TypeAlias, TypeGuard, cast

import numpy as np

from stagemesh.common.errors import InvalidChunkError, UnavailableError
from stagemesh.common.wire.tensors import Tensors, Value, is_ticket_kind
from stagemesh.connectors import peer_timeouts
from stagemesh.v1 import tensor_pb2

MAX_DESCRIPTOR_BYTES = 64 << 10
"""The maximum size of a ticket's descriptor in bytes."""
_READING_FRACTION = 0.99
"""The fraction of the time limit for which a consumer reads, because the clocks of two hosts may differ in speed."""

_log = logging.getLogger(__name__)


class Ticket(ABC):
    """The right to read state that the engine of a producing replica keeps. Use it on the replica's event loop."""

    def __init__(self, kind: str, descriptor: bytes, *, size_bytes: int, time_limit_s: float) -> None:
        self.kind = kind
        """The name of the kind of state and of the engines' transport, such as "vllm.kv"."""
        self.descriptor = descriptor
        """The data by which the consumer's engine finds the state, in the format of the kind. Not trusted."""
        self.size_bytes = size_bytes
        """The memory that the state occupies at its producer, in bytes."""
        self.time_limit_s = time_limit_s
        """The time for which the producer keeps the state after the offer and after each acceptance, in seconds."""

    @abstractmethod
    async def accept(self) -> float:
        """Asks the producer to keep the state. Returns the time by which reading must have ended.

        Call this method before the state is read, and again before the returned time to continue to read after it. The
        time is on the event loop's clock, at most `time_limit_s` seconds after the call.

        Raises UnavailableError: TICKET_EXPIRED if the state has been released, TICKET_LOST if the producer terminated
        or does not answer.
        """

    @abstractmethod
    def release(self) -> None:
        """Ends the use of the state, so that its producer can free it."""


class OfferedTicket(Ticket):
    """A ticket as the producer's engine emits it in `Packet.tickets`.

    References to the ticket are counted. The engine's own reference goes to the step with the emission; an engine that
    does not emit the ticket releases it.
    """

    def __init__(
        self, kind: str, descriptor: bytes, *, size_bytes: int, time_limit_s: float, on_release: Callable[[], None]
    ) -> None:
        """Offers state that is ready to be read. Call it on the event loop.

        `on_release` frees the state. It is called exactly once, on the event loop, when the last reference is released
        or the time limit has passed. It must not raise an error.

        Raises InvalidChunkError if the kind is not a name, if the descriptor has more than MAX_DESCRIPTOR_BYTES bytes,
        or if the time limit is not above 0.
        """
        if not is_ticket_kind(kind) or len(descriptor) > MAX_DESCRIPTOR_BYTES or not time_limit_s > 0:
            raise InvalidChunkError(
                f"a ticket of kind {kind!r} with a descriptor of {len(descriptor)} bytes and a time limit of "
                f"{time_limit_s:g} s cannot be sent; the kind must be a name such as vllm.kv, the descriptor at most "
                f"{MAX_DESCRIPTOR_BYTES} bytes, and the limit above 0"
            )
        super().__init__(kind, descriptor, size_bytes=size_bytes, time_limit_s=time_limit_s)
        self.is_released = False
        """Whether the state has been released, so that the ticket cannot be accepted any more."""
        self._on_release, self._holders = on_release, 1
        self._timer = self._start_timer()

    async def accept(self) -> float:
        """Keeps the state for another `time_limit_s` seconds. Returns the time at which it is released."""
        if self.is_released:
            raise expired_error(self.kind)
        self.renew()
        return self._timer.when()

    def renew(self) -> None:
        """Restarts the time limit of state that has not been released."""
        assert not self.is_released, "released state cannot be kept"
        self._timer.cancel()
        self._timer = self._start_timer()

    def retain(self) -> None:
        """Adds a reference to the ticket."""
        assert self._holders > 0, "a ticket without references cannot be retained"
        self._holders += 1

    def release(self) -> None:
        """Releases one reference. Releases the state if it was the last one."""
        assert self._holders > 0, "release a ticket once for each reference"
        self._holders -= 1
        if self._holders == 0:
            self._end()

    def _start_timer(self) -> asyncio.TimerHandle:
        return asyncio.get_running_loop().call_later(self.time_limit_s, self._expire)

    def _expire(self) -> None:
        _log.info("the state of a ticket of kind %s is released after %g s without use", self.kind, self.time_limit_s)
        self._end()

    def _end(self) -> None:
        if not self.is_released:
            self.is_released = True
            self._timer.cancel()
            self._on_release()


class ReceivedTicket(Ticket):
    """A ticket as the consumer's engine receives it in `Packet.tickets`.

    The lease on the state ends when every ticket of the packet was released, or deleted without that.
    """

    def __init__(
        self, offer: tensor_pb2.Handover, *, accept: Callable[[], Awaitable[None]], on_release: Callable[[], None]
    ) -> None:
        """`offer` is the producer's description of the ticket.

        `accept` returns when the producer has accepted the lease, and raises an error if it has not. `on_release` is
        called once, on the thread that releases or deletes the ticket.
        """
        super().__init__(
            offer.kind, offer.state_descriptor, size_bytes=offer.size_bytes, time_limit_s=offer.time_limit_s
        )
        self._accept = accept
        self._end = weakref.finalize(self, on_release)
        # At the end of the process, its leases end with it.
        self._end.atexit = False

    async def accept(self) -> float:
        """Asks the producer to keep the state, as described by `Ticket.accept`."""
        if not self._end.alive:
            raise expired_error(self.kind)
        now_s = asyncio.get_running_loop().time()
        # The time counts from before the producer receives the acceptance, so that its own time ends later.
        until_s = now_s + _READING_FRACTION * self.time_limit_s
        try:
            async with asyncio.timeout_at(min(until_s, now_s + peer_timeouts.TICKET_ANSWER_S)):
                await self._accept()
        except TimeoutError:
            if until_s < now_s + peer_timeouts.TICKET_ANSWER_S:
                raise expired_error(self.kind) from None
            raise UnavailableError(
                f"the producer of a ticket of kind {self.kind!r} did not answer in time", reason="TICKET_LOST"
            ) from None
        return until_s

    def release(self) -> None:
        """Ends the use of the state. Idempotent. May be called on any thread."""
        self._end()


def expired_error(kind: str = "") -> UnavailableError:
    """Returns the error for a ticket whose state has been released at its producer."""
    of_kind = f" of kind {kind!r}" if kind else ""
    return UnavailableError(
        f"the state of a ticket{of_kind} was released at its producer, because the ticket was accepted too late or its "
        "flow has ended",
        reason="TICKET_EXPIRED",
    )


MetadataValue: TypeAlias = Value
CONTEXT, TOKEN_START = "context_frames", "token_start"
"""Metadata keys of a packet.

CONTEXT is the key for the number of repeated rows at the front of the packet. TOKEN_START is the key for the index of
the token to which the packet's first row belongs.
"""


class EdgeKey(NamedTuple):
    """The identifier of one attempt of a flow."""

    request_id: str
    edge: str
    attempt: int


class ConsumerAddress(NamedTuple):
    """The replica that receives a flow, and how its data plane is reached."""

    replica: str
    endpoint: str
    """The replica's gRPC address."""
    server_name: str = ""
    """The name in the replica's TLS certificate, or empty if it is the host in `endpoint`."""

    def __str__(self) -> str:
        return f"replica {self.replica} at {self.endpoint}"


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


class Transform(Protocol):
    """The interface of a transform, which converts an edge's packets into packets that the consuming stage accepts.

    Each flow of packets has its own instance of the transform. A transform has no side effects.
    """

    def push(self, packet: Packet) -> Sequence[Packet]:
        """Accepts one packet of the edge. Returns the output packets that are now complete. The list may be empty."""
        ...

    def finish(self) -> Sequence[Packet]:
        """Returns the remaining output packets. Called once, after the flow's last packet."""
        ...


FirstRows: TypeAlias = Sequence[int]
"""The number of rows that precede a packet on its edge, for each of its tensors and then of its tickets."""


def rows_of(packet: Packet) -> list[tuple[str, int]]:
    """Returns the name and the number of rows of each tensor of a packet, and then of each ticket.

    The number of rows of a tensor is its length along the first axis, or 1 if it has no axes. A ticket is one row.
    """
    rows = [(name, tensor.shape[0] if tensor.ndim else 1) for name, tensor in packet.tensors.items()]
    return rows + [(name, 1) for name in packet.tickets] if packet.tickets else rows


class RowCounter:
    """Counts the rows of the packets of an edge. `counted` is the number of rows that precede the first packet."""

    def __init__(self, counted: Mapping[str, int]) -> None:
        self._counted = dict(counted)

    def add(self, rows: Sequence[tuple[str, int]], *, context: int = 0) -> FirstRows:
        """Counts the rows of a packet, as `rows_of` returns them. Returns the numbers of rows that precede the packet.

        `context` is the number of its first rows that repeat the last rows of the packet before it.
        """
        counted, first_rows = self._counted, list[int]()
        for name, count in rows:
            first_row = counted.get(name, 0) - context
            first_rows.append(first_row)
            counted[name] = first_row + count
        return first_rows


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


def is_list(made: object) -> TypeGuard[Sequence[object]]:
    """Returns whether the result of user code is a list or another sequence that is not text."""
    return isinstance(made, Sequence) and not isinstance(made, str | bytes)
