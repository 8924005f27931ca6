"""The waiting and running requests of each caller."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

from sortedcontainers import SortedKeyList

from stagemesh.orchestrator.admission.ticket import AdmissionRequest, Ticket
from stagemesh.orchestrator.spec import Bounds


@dataclass
class Load:
    """A number of requests, and the sum of their bytes."""

    requests: int = 0
    size_bytes: int = 0

    def add(self, size_bytes: int) -> None:
        """Adds one request of this size."""
        self.requests += 1
        self.size_bytes += size_bytes

    def subtract(self, size_bytes: int) -> None:
        """Subtracts one request of this size."""
        self.requests -= 1
        self.size_bytes -= size_bytes

    def fits(self, size_bytes: int, *, most: int, most_bytes: int) -> bool:
        """Returns whether another request stays within the limits.

        A request that would be the only one always stays within the limit on bytes.
        """
        return self.requests < most and (not self.requests or self.size_bytes + size_bytes <= most_bytes)

    def share(self, *, most: int, most_bytes: int) -> float:
        """Returns the used fraction of the limit on requests or of the limit on bytes, whichever is larger."""
        return max(self.requests / max(1, most), self.size_bytes / most_bytes)


@dataclass(eq=False)
class Caller:
    """The requests of one caller, over all priorities."""

    name: str
    running: Load = field(default_factory=Load)
    waiting: Load = field(default_factory=Load)
    queues: dict[int, "CallerQueue"] = field(default_factory=dict[int, "CallerQueue"])
    """The caller's queues by priority."""

    def may_run(self, ticket: Ticket, bounds: Bounds) -> bool:
        """Returns whether the limits per caller allow the request to run."""
        return self.running.fits(ticket.size_bytes, most=bounds.max_in_flight, most_bytes=bounds.max_in_flight_bytes)

    def may_wait(self, ticket: Ticket, bounds: Bounds, *, reserved: int) -> bool:
        """Returns whether the limits per caller allow the request to wait while `reserved` slots remain free."""
        return self.waiting.fits(
            ticket.request.input_bytes, most=bounds.max_queued - reserved, most_bytes=bounds.max_queued_bytes
        )


def _by_deadline(ticket: Ticket) -> tuple[float, int]:
    return ticket.request.deadline_s, ticket.number


def _by_number(ticket: Ticket) -> int:
    return ticket.number


class CallerQueue:
    """The requests of one caller with one priority, ordered by deadline and then by arrival."""

    def __init__(self, caller: Caller, priority: int, *, turn: int) -> None:
        self.caller, self.priority = caller, priority
        self.turn = turn
        """The round of the priority class in which the queue is served next."""
        self.running, self.waiting = Load(), Load()
        self._tickets = SortedKeyList[Ticket](key=_by_deadline)
        self._by_age = SortedKeyList[Ticket](key=_by_number)

    def __iter__(self) -> Iterator[Ticket]:
        return iter(self._tickets)

    @property
    def idle(self) -> bool:
        """Whether the caller has neither waiting nor running requests of this priority."""
        return not self.running.requests and not self.waiting.requests

    @property
    def next(self) -> Ticket:
        """The first ticket of the queue, which must not be empty."""
        return self._tickets[0]

    @property
    def last(self) -> Ticket:
        """The last ticket of the queue, which must not be empty."""
        return self._tickets[-1]

    @property
    def oldest(self) -> Ticket:
        """The ticket that has waited longest in the queue, which must not be empty."""
        return self._by_age[0]

    def add(self, ticket: Ticket) -> None:
        """Adds a waiting ticket."""
        self._tickets.add(ticket)
        self._by_age.add(ticket)
        self.waiting.add(ticket.request.input_bytes)

    def remove(self, ticket: Ticket) -> None:
        """Removes a waiting ticket."""
        self._tickets.remove(ticket)
        self._by_age.remove(ticket)
        self.waiting.subtract(ticket.request.input_bytes)

    def ahead_of(self, request: AdmissionRequest) -> int:
        """Returns the number of waiting tickets that would precede a new request."""
        return self._tickets.bisect_key_right((request.deadline_s, math.inf))
