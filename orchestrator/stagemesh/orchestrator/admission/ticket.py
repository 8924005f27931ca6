"""The input of admission control (AdmissionRequest) and its output (Ticket)."""

import math
from collections.abc import Hashable
from dataclasses import dataclass
from enum import Enum, auto
from typing import Protocol

from stagemesh.common.errors import StagemeshError


@dataclass(frozen=True)
class AdmissionRequest:
    """The properties of a client's request on which its admission depends."""

    request_id: str
    caller: str = ""
    priority: int = 0
    """The priority, from -10 (lowest) to 10 (highest). Values outside this range are clamped."""
    deadline_s: float = math.inf
    """The time by which the request must end, in seconds on the clock of `Admission`.

    Infinite if there is no deadline.
    """
    choices: int = 1
    """The number of choices. The request counts as this number of running requests."""
    input_bytes: int = 0
    """The size of the input in bytes. Each choice has a copy of the input while it runs."""
    kind: Hashable = None
    """The kind of the request: any hashable key. Requests of one kind have similar durations and output sizes."""


class Listener(Protocol):
    """Receives notifications about one admission request.

    `queued` is called any number of times, and then either `admitted` or `refused` is called once.
    """

    def queued(self, *, position: int, expected_wait_s: float) -> None:
        """Called when the request is queued or its position changes.

        `position` is the position in the queue, from 1. `expected_wait_s` is the expected wait in seconds.
        """

    def admitted(self) -> None:
        """Called when the request is admitted. The request may then run until its ticket is released."""

    def refused(self, error: StagemeshError) -> None:
        """Called when the request is removed from the queue without being admitted. `error` is the reason."""


class TicketState(Enum):
    """The state of a ticket. GONE means that its request was rejected, withdrawn or released."""

    NEW = auto()
    WAITING = auto()
    RUNNING = auto()
    GONE = auto()


@dataclass(eq=False)
class Ticket:
    """An admission request that is waiting or running. Only the `Admission` that created the ticket modifies it."""

    request: AdmissionRequest
    listener: Listener | None
    """The listener of the request, or None after the listener was called for the last time.

    Listeners usually refer to the ticket, and a reference cycle would delay the release of both.
    """
    number: int
    """The number of tickets that were created before this ticket."""
    size_bytes: int
    """The estimated number of bytes that the request occupies while it runs."""
    latest_start_s: float
    """The latest time at which the request can start and still meet its deadline, in seconds on Admission's clock."""
    state: TicketState = TicketState.NEW
    admitted_s: float = 0.0
    reported_position: int = 0
    """The queue position that was last reported to the listener, or 0 if none was reported."""
