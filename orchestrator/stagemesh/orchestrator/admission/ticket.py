"""The admission request of a client's request, and the ticket that represents it while it waits and runs."""

import math
from collections.abc import Hashable
from dataclasses import dataclass
from enum import Enum, auto
from typing import Protocol

from stagemesh.common.errors import StagemeshError

LOWEST_PRIORITY, HIGHEST_PRIORITY = -10, 10


@dataclass(frozen=True)
class AdmissionRequest:
    """The properties of a request that admission considers."""

    request_id: str
    caller: str = ""
    priority: int = 0
    deadline_s: float = math.inf
    """The deadline in seconds on the admission's clock. Infinite if there is no deadline."""
    input_bytes: int = 0
    kind: Hashable = None
    """The kind of the request. Requests of the same kind have similar durations and output sizes."""

    @property
    def priority_class(self) -> int:
        """The priority, limited to the range from LOWEST_PRIORITY to HIGHEST_PRIORITY."""
        return max(LOWEST_PRIORITY, min(HIGHEST_PRIORITY, self.priority))


class Listener(Protocol):
    """Receives the reports about one admission request: any number of `queued`, then `admitted` or `refused`."""

    def queued(self, *, position: int, expected_wait_s: float) -> None:
        """Called when the request waits. Receives its position from 1 and its expected wait in seconds."""

    def admitted(self) -> None:
        """Called when the request may run. The permission ends when its ticket is released."""

    def refused(self, error: StagemeshError) -> None:
        """Called when the request leaves the queue without being admitted."""


class TicketState(Enum):
    """The state of an admission request."""

    NEW = auto()
    WAITING = auto()
    RUNNING = auto()
    GONE = auto()


@dataclass(eq=False)
class Ticket:
    """An admission request that was accepted. Only the admission that created it changes it."""

    request: AdmissionRequest
    listener: Listener | None
    """The listener of the request. None after the last report.

    Listeners usually refer to the ticket, and a reference cycle would delay freeing both.
    """
    number: int
    """The rank of the ticket in the order of arrival, from 0."""
    size_bytes: int
    """The estimated number of bytes that the request occupies while it runs."""
    latest_start_s: float
    """The latest time on the admission's clock at which the request can start and still meet its deadline."""
    state: TicketState = TicketState.NEW
    admitted_s: float = 0.0
    reported_position: int = 0
    """The position that was last reported to the listener. 0 if none was reported."""
