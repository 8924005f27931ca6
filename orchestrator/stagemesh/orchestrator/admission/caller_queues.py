"""Counts and queues the requests of each caller."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

from sortedcontainers import SortedKeyList

from stagemesh.orchestrator.admission.ticket import AdmissionRequest, Ticket
from stagemesh.orchestrator.spec import Bounds


@dataclass
class Load:
    """A number of requests, and the sum of their sizes in bytes."""

    requests: int = 0
    size_bytes: int = 0

    def add(self, size_bytes: int) -> None:
        """Counts a request of `size_bytes`."""
        self.requests += 1
        self.size_bytes += size_bytes

    def subtract(self, size_bytes: int) -> None:
        """Stops counting a request of `size_bytes`."""
        self.requests -= 1
        self.size_bytes -= size_bytes

    def fits(self, size_bytes: int, *, most: int, most_bytes: int) -> bool:
        """Returns whether a request can be added without exceeding `most` requests or `most_bytes` bytes.

        The limit on bytes is ignored if there is no other request, so that large requests can run alone.
        """
        return self.requests < most and (not self.requests or self.size_bytes + size_bytes <= most_bytes)

    def share(self, *, most: int, most_bytes: int) -> float:
        """Returns the larger of two fractions: the used part of `most` requests, and of `most_bytes` bytes."""
        return max(self.requests / max(1, most), self.size_bytes / most_bytes)


@dataclass(eq=False)
class Caller:
    """The running and waiting requests of one caller, over all priorities."""

    name: str
    running: Load = field(default_factory=Load)
    waiting: Load = field(default_factory=Load)
    queues: dict[int, "CallerQueue"] = field(default_factory=dict[int, "CallerQueue"])
    """The caller's queue for each priority that has requests, by priority."""

    def may_run(self, ticket: Ticket, bounds: Bounds) -> bool:
        """Returns whether the caller may run this request in addition to its running requests."""
        return self.running.fits(ticket.size_bytes, most=bounds.max_in_flight, most_bytes=bounds.max_in_flight_bytes)

    def may_wait(self, ticket: Ticket, bounds: Bounds, *, reserved: int) -> bool:
        """Returns whether the caller may queue this request and still leave `reserved` of its queue slots free."""
        return self.waiting.fits(
            ticket.request.input_bytes, most=bounds.max_queued - reserved, most_bytes=bounds.max_queued_bytes
        )


def _by_deadline(ticket: Ticket) -> tuple[float, int]:
    return ticket.request.deadline_s, ticket.number


def _by_number(ticket: Ticket) -> int:
    return ticket.number


class CallerQueue:
    """The requests of one caller with one priority. Waiting requests are ordered by deadline and then by arrival."""

    def __init__(self, caller: Caller, priority: int, *, turn: int) -> None:
        self.caller, self.priority = caller, priority
        self.turn = turn
        """The round-robin round in which a request of this queue is admitted next."""
        self.running, self.waiting = Load(), Load()
        self._tickets = SortedKeyList[Ticket](key=_by_deadline)
        self._by_age = SortedKeyList[Ticket](key=_by_number)

    def __iter__(self) -> Iterator[Ticket]:
        return iter(self._tickets)

    @property
    def idle(self) -> bool:
        """Whether the queue has neither waiting nor running requests."""
        return not self.running.requests and not self.waiting.requests

    @property
    def next(self) -> Ticket:
        """The waiting ticket with the earliest deadline. The queue must not be empty."""
        return self._tickets[0]

    @property
    def last(self) -> Ticket:
        """The waiting ticket with the latest deadline. The queue must not be empty."""
        return self._tickets[-1]

    @property
    def oldest(self) -> Ticket:
        """The ticket that has waited longest. The queue must not be empty."""
        return self._by_age[0]

    def add(self, ticket: Ticket) -> None:
        self._tickets.add(ticket)
        self._by_age.add(ticket)
        self.waiting.add(ticket.request.input_bytes)

    def remove(self, ticket: Ticket) -> None:
        self._tickets.remove(ticket)
        self._by_age.remove(ticket)
        self.waiting.subtract(ticket.request.input_bytes)

    def ahead_of(self, request: AdmissionRequest) -> int:
        """Returns the number of waiting tickets that would be admitted before a new request."""
        return self._tickets.bisect_key_right((request.deadline_s, math.inf))
