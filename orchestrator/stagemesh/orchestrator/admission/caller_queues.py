"""Who asks for admission, and what each caller has waiting and running."""

import math
from bisect import bisect_left, insort
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import NamedTuple, Protocol

from stagemesh.common.errors import StagemeshError
from stagemesh.orchestrator.admission.ranking import Ranking
from stagemesh.orchestrator.spec import Bounds

LOWEST_PRIORITY, HIGHEST_PRIORITY = -10, 10


@dataclass(frozen=True)
class AdmissionRequest:
    """What a request asks for."""

    request_id: str
    caller: str = ""
    priority: int = 0
    deadline_s: float = math.inf
    """By the clock of the admission."""
    input_bytes: int = 0
    kind: Hashable = None
    """Requests of one kind take and make about the same."""


class Listener(Protocol):
    """Whoever made a claim hears of it, once it was taken: any number of `queued`, then one of the others."""

    def queued(self, *, position: int, expected_wait_s: float) -> None:
        """It waits, at this place, from 1, and for about so long."""

    def admitted(self) -> None:
        """It may run, until it is released."""

    def refused(self, error: StagemeshError) -> None:
        """It will not run."""


class TicketState(Enum):
    """Where a claim stands."""

    NEW = auto()
    WAITING = auto()
    RUNNING = auto()
    GONE = auto()


@dataclass(eq=False)
class Ticket:
    """A claim that was taken. Only the admission that made it changes it."""

    claim: AdmissionRequest
    listener: Listener | None
    """None once it has heard the last: it holds the ticket, mostly, and a circle would outlive both."""
    number: int
    """In the order of arrival."""
    size_bytes: int
    """What it takes while it runs."""
    hopeless_s: float
    """When it can no longer make its deadline, by the clock."""
    state: TicketState = TicketState.NEW
    admitted_s: float = 0.0
    told: int = 0
    """The position that it last heard."""

    @property
    def place(self) -> "Place":
        """Where it stands in its lane."""
        return Place(-self.claim.deadline_s, -self.number, self)


class Place(NamedTuple):
    """A ticket in its lane's order, which is kept from the last to the next, as lists grow and shrink at their ends."""

    minus_deadline_s: float
    minus_number: int
    ticket: Ticket


@dataclass
class Load:
    """Requests and their bytes."""

    requests: int = 0
    size_bytes: int = 0

    def add(self, size_bytes: int) -> None:
        """One more."""
        self.requests += 1
        self.size_bytes += size_bytes

    def take(self, size_bytes: int) -> None:
        """One less."""
        self.requests -= 1
        self.size_bytes -= size_bytes

    def fits(self, size_bytes: int, *, most: int, most_bytes: int) -> bool:
        """Whether one more stays within the limits. Bytes never refuse one that would be alone."""
        return self.requests < most and (not self.requests or self.size_bytes + size_bytes <= most_bytes)

    def share(self, *, most: int, most_bytes: int) -> float:
        """The part of the limits that it takes, of requests or of bytes, whichever is more."""
        return max(self.requests / max(1, most), self.size_bytes / most_bytes)


@dataclass(eq=False)
class Caller:
    """What one caller has here."""

    name: str
    running: Load = field(default_factory=Load)
    waiting: Load = field(default_factory=Load)
    lanes: dict[int, "CallerQueue"] = field(default_factory=dict[int, "CallerQueue"])
    """By priority."""

    def may_run(self, ticket: Ticket, bounds: Bounds) -> bool:
        """Whether the caller's own limits leave room."""
        return self.running.fits(ticket.size_bytes, most=bounds.max_in_flight, most_bytes=bounds.max_in_flight_bytes)

    def may_wait(self, ticket: Ticket, bounds: Bounds, *, held: int) -> bool:
        """Whether the caller's own limits leave room in the queue, where some of it is held for others."""
        return self.waiting.fits(
            ticket.claim.input_bytes, most=bounds.max_queued - held, most_bytes=bounds.max_queued_bytes
        )


class CallerQueue:
    """One caller's requests of one priority: the earliest deadline first, then in the order of arrival."""

    def __init__(self, caller: Caller, priority: int, *, turn: int) -> None:
        self.caller, self.priority = caller, priority
        self.turn = turn
        """In which round of its priority it is served next."""
        self.running, self.waiting = Load(), Load()
        self._places: list[Place] = []
        self._by_age = Ranking[Ticket]()

    def __iter__(self) -> Iterator[Ticket]:
        return (place.ticket for place in reversed(self._places))

    @property
    def idle(self) -> bool:
        """Whether nothing waits or runs."""
        return not self.running.requests and not self.waiting.requests

    @property
    def next(self) -> Ticket:
        """Whose turn is next. There must be one."""
        return self._places[-1].ticket

    @property
    def last(self) -> Ticket:
        """Whose turn is last."""
        return self._places[0].ticket

    @property
    def oldest(self) -> Ticket:
        """Who has waited longest. There must be one."""
        oldest = self._by_age.first()
        assert oldest is not None, "somebody waits"
        return oldest

    def add(self, ticket: Ticket) -> None:
        """One more waits."""
        insort(self._places, ticket.place)
        self._by_age.put(ticket, ticket.number)
        self.waiting.add(ticket.claim.input_bytes)

    def remove(self, ticket: Ticket) -> None:
        """One waits no longer."""
        del self._places[bisect_left(self._places, ticket.place)]
        self._by_age.discard(ticket)
        self.waiting.take(ticket.claim.input_bytes)

    def ahead_of(self, claim: AdmissionRequest) -> int:
        """How many that wait here go before one that comes now."""
        return len(self._places) - bisect_left(
            self._places, -claim.deadline_s, key=lambda place: place.minus_deadline_s
        )


def priority_of(claim: AdmissionRequest) -> int:
    """The claim's priority among those that are told apart."""
    return max(LOWEST_PRIORITY, min(HIGHEST_PRIORITY, claim.priority))
