"""A request's application for admission, and the ticket that represents the request while it waits and runs."""

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
    """Time on the clock of the admission."""
    input_bytes: int = 0
    kind: Hashable = None
    """Requests of the same kind have similar durations and outputs."""

    @property
    def priority_class(self) -> int:
        """The priority, clipped to the range from LOWEST_PRIORITY to HIGHEST_PRIORITY."""
        return max(LOWEST_PRIORITY, min(HIGHEST_PRIORITY, self.priority))


class Listener(Protocol):
    """Receives the reports about one admission request: any number of `queued`, then `admitted` or `refused`."""

    def queued(self, *, position: int, expected_wait_s: float) -> None:
        """Called when the request waits, with its position from 1 and its expected waiting time."""

    def admitted(self) -> None:
        """Called when the request may run. It may run until its ticket is released."""

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
    """None after the last report. Listeners usually hold the ticket, and a reference cycle would delay freeing both."""
    number: int
    """The position in the order of arrival."""
    size_bytes: int
    """The estimated number of bytes that the request occupies while it runs."""
    latest_start_s: float
    """The last time at which the request can start and meet its deadline."""
    state: TicketState = TicketState.NEW
    admitted_s: float = 0.0
    reported_position: int = 0
    """The position that the listener received last."""
