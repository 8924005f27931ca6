"""In which order those who wait are admitted.

Higher priorities first. Within one priority, callers share: whoever has the least running goes first, of equals whoever
has had fewer turns, and then the earliest deadline and the first to come. Of one caller's requests the earliest
deadline goes first. Every eighth turn is by age: it goes to who has waited longest, whatever stands above, so that one
who found n others waiting is among the next 8 (n + 1) to be admitted.

"The least" is by dominant share (Ghodsi et al., NSDI 2011): of requests or of bytes, whichever is the larger part of
its limit.
"""

from collections.abc import Iterator
from typing import NamedTuple

from stagemesh.orchestrator.admission.caller_queues import (
    HIGHEST_PRIORITY,
    LOWEST_PRIORITY,
    AdmissionRequest,
    Caller,
    CallerQueue,
    Load,
    Ticket,
    TicketState,
    priority_of,
)
from stagemesh.orchestrator.admission.ranking import Ranking
from stagemesh.orchestrator.spec import Limits

TURNS_TO_ONE_BY_AGE = 8
_MOST_REMEMBERED = 4096


class QueuePosition(NamedTuple):
    """Where a ticket stands: from 1 among all, and among its caller's of the same priority."""

    ticket: Ticket
    position: int
    in_lane: int


class _PriorityClass:
    """The lanes of one priority."""

    def __init__(self) -> None:
        self.ready = Ranking[CallerQueue]()
        """Those that have somebody waiting whom their caller's limits allow, by whose turn it is."""
        self.by_length = Ranking[CallerQueue]()
        """Those that have somebody waiting, the longest first."""
        self.waiting = 0
        self._turn = 0
        self._turns: dict[str, int] = {}
        """The next turn of callers that were served in this one, by name: they may have left and come back."""

    def next_turn(self, caller: str) -> int:
        """The round in which a caller that comes now is served."""
        return max(self._turn, self._turns.get(caller, 0))

    def serve(self, lane: CallerQueue, *, by_age: bool) -> None:
        """A lane has had its turn."""
        if lane.turn > self._turn and not by_age:
            self._turn = lane.turn
            self._turns.clear()
        lane.turn += 1
        if len(self._turns) < _MOST_REMEMBERED:
            self._turns[lane.caller.name] = lane.turn


class AdmissionQueue:
    """Those who wait, by whose turn it is; it also counts what their lanes have running. O(log n) a change."""

    def __init__(self, limits: Limits) -> None:
        self.load = Load()
        """All who wait."""
        self._limits = limits
        self._callers: dict[str, Caller] = {}
        priorities = range(HIGHEST_PRIORITY, LOWEST_PRIORITY - 1, -1)
        self._classes = {priority: _PriorityClass() for priority in priorities}
        """The highest first."""
        self._by_age = Ranking[CallerQueue]()
        self._turns = 0

    @property
    def callers(self) -> tuple[Caller, ...]:
        """Those who have something here."""
        return tuple(self._callers.values())

    def __iter__(self) -> Iterator[Ticket]:
        for caller in self.callers:
            for lane in tuple(caller.lanes.values()):
                yield from tuple(lane)

    def caller(self, name: str) -> Caller:
        """A caller by its name; one that has nothing here is not remembered."""
        return self._callers.get(name) or Caller(name)

    def position(self, claim: AdmissionRequest) -> int:
        """About where it would stand, from 1: as if its caller's neighbours had as many before it as its own has."""
        priority = priority_of(claim)
        lane = self.caller(claim.caller).lanes.get(priority)
        within = self._classes[priority]
        lanes, before = len(within.by_length), 0
        if lane is not None and lane.waiting.requests:
            before = lane.ahead_of(claim)
        else:
            lanes += 1
        higher = sum(self._classes[other].waiting for other in range(priority + 1, HIGHEST_PRIORITY + 1))
        return higher + min(within.waiting + 1, (before + 1) * lanes)

    def standings(self) -> Iterator[QueuePosition]:
        """Where everybody stands, the first one first, as if nobody came or went. O(n log n)."""
        unit = 1 / self._limits.max_in_flight
        position = 0
        for priority, within in self._classes.items():
            if not within.waiting:
                continue
            order: list[tuple[float, int, float, int, int, Ticket]] = []
            for caller in self._callers.values():
                lane = caller.lanes.get(priority)
                share = self._running_share(lane) if lane is not None else 0.0
                for i, ticket in enumerate(lane or ()):
                    turn = caller.lanes[priority].turn + i
                    order.append((share + i * unit, turn, ticket.claim.deadline_s, ticket.number, i + 1, ticket))
            order.sort()
            for *_, in_lane, ticket in order:
                position += 1
                yield QueuePosition(ticket, position, in_lane)

    def next(self) -> Ticket | None:
        """Who is to be admitted next, of those whom their caller's limits allow."""
        if self._is_by_age and (lane := self._by_age.first()) is not None:
            return lane.oldest
        for within in self._classes.values():
            if (lane := within.ready.first()) is not None:
                return lane.next
        return None

    def add(self, ticket: Ticket) -> None:
        """One more waits."""
        lane = self._lane(ticket)
        lane.add(ticket)
        for load in (self.load, lane.caller.waiting):
            load.add(ticket.claim.input_bytes)
        self._classes[lane.priority].waiting += 1
        self._rank(lane)

    def remove(self, ticket: Ticket) -> None:
        """One waits no longer."""
        lane = self._lane(ticket)
        self._take_out(ticket, lane)
        self._rank(lane)
        self._forget(lane)

    def run(self, ticket: Ticket) -> None:
        """It is admitted, from the queue or past it."""
        lane = self._lane(ticket)
        for load in (lane.running, lane.caller.running):
            load.add(ticket.size_bytes)
        if ticket.state is TicketState.WAITING:
            self._classes[lane.priority].serve(lane, by_age=self._is_by_age)
            self._turns += 1
            self._take_out(ticket, lane)
        self._rank_all(lane.caller)

    def end(self, ticket: Ticket) -> None:
        """It runs no longer."""
        lane = self._lane(ticket)
        for load in (lane.running, lane.caller.running):
            load.take(ticket.size_bytes)
        self._rank_all(lane.caller)
        self._forget(lane)

    def who_gives_way(self, claim: AdmissionRequest) -> Ticket | None:
        """Whom a newcomer pushes out of a full queue: the last of the longest lane, of the lowest priority.

        None where the newcomer's priority is lower, or its own lane would be as long.
        """
        priority = priority_of(claim)
        for other in range(LOWEST_PRIORITY, priority + 1):
            longest = self._classes[other].by_length.first()
            if longest is not None:
                shorter = other < priority or self._waiting_share(claim) < self._length(longest)
                return longest.last if shorter else None
        return None

    # -- inner workings

    @property
    def _is_by_age(self) -> bool:
        return self._turns % TURNS_TO_ONE_BY_AGE == TURNS_TO_ONE_BY_AGE - 1

    def _lane(self, ticket: Ticket) -> CallerQueue:
        caller = self._callers.get(ticket.claim.caller)
        if caller is None:
            caller = self._callers[ticket.claim.caller] = Caller(ticket.claim.caller)
        priority = priority_of(ticket.claim)
        lane = caller.lanes.get(priority)
        if lane is None:
            turn = self._classes[priority].next_turn(caller.name)
            lane = caller.lanes[priority] = CallerQueue(caller, priority, turn=turn)
        return lane

    def _take_out(self, ticket: Ticket, lane: CallerQueue) -> None:
        lane.remove(ticket)
        for load in (self.load, lane.caller.waiting):
            load.take(ticket.claim.input_bytes)
        self._classes[lane.priority].waiting -= 1

    def _forget(self, lane: CallerQueue) -> None:
        if lane.idle:
            del lane.caller.lanes[lane.priority]
            if not lane.caller.lanes:
                del self._callers[lane.caller.name]

    def _rank_all(self, caller: Caller) -> None:
        for lane in caller.lanes.values():
            self._rank(lane)

    def _rank(self, lane: CallerQueue) -> None:
        within = self._classes[lane.priority]
        if not lane.waiting.requests:
            for ranking in (within.by_length, within.ready, self._by_age):
                ranking.discard(lane)
            return
        within.by_length.put(lane, -self._length(lane))
        bounds, first, oldest = self._limits.per_caller, lane.next, lane.oldest
        if lane.caller.may_run(first, bounds):
            within.ready.put(lane, (self._running_share(lane), lane.turn, first.claim.deadline_s, first.number))
        else:
            within.ready.discard(lane)
        if lane.caller.may_run(oldest, bounds):
            self._by_age.put(lane, oldest.number)
        else:
            self._by_age.discard(lane)

    def _running_share(self, lane: CallerQueue) -> float:
        return lane.running.share(most=self._limits.max_in_flight, most_bytes=self._limits.max_in_flight_bytes)

    def _length(self, lane: CallerQueue) -> float:
        return lane.waiting.share(most=self._limits.max_queued, most_bytes=self._limits.max_queued_bytes)

    def _waiting_share(self, claim: AdmissionRequest) -> float:
        """That of the claim's lane, once it has joined."""
        lane = self.caller(claim.caller).lanes.get(priority_of(claim))
        there = lane.waiting if lane is not None else Load()
        joined = Load(there.requests + 1, there.size_bytes + claim.input_bytes)
        return joined.share(most=self._limits.max_queued, most_bytes=self._limits.max_queued_bytes)
