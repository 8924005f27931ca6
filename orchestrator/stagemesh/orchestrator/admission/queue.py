"""The queue of waiting requests, and the order in which they are admitted.

A request of a higher priority is admitted before a request of a lower priority. Within a priority, callers share the
pipeline. The next request comes from the caller with the smallest share of the running requests. Ties are resolved by
the caller's number of turns, then by the earliest deadline, then by the earliest arrival. The requests of one caller
are ordered by deadline.

Every eighth turn admits the request that has waited longest, regardless of this order. A request that finds n other
requests waiting is therefore among the next 8 (n + 1) requests to be admitted.

A caller's share is its dominant share (Ghodsi et al., NSDI 2011): the larger of the used fractions of the limit on
requests and of the limit on bytes.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

from sortedcontainers import SortedKeyList

from stagemesh.orchestrator.admission.caller_queues import Caller, CallerQueue, Load
from stagemesh.orchestrator.admission.ticket import (
    HIGHEST_PRIORITY,
    LOWEST_PRIORITY,
    AdmissionRequest,
    Ticket,
    TicketState,
)
from stagemesh.orchestrator.spec import Limits

TURNS_TO_ONE_BY_AGE = 8
_MAX_RECORDED_TURNS = 4096


class QueuePosition(NamedTuple):
    """The position of a ticket in the order of admission and within the queue of its caller. Both start at 1."""

    ticket: Ticket
    position: int
    in_caller_queue: int


class _Ranking:
    """A sorted set of caller queues. Each queue has a key that can change. The smallest key is first."""

    def __init__(self) -> None:
        self._keys: dict[CallerQueue, Any] = {}
        self._queues = SortedKeyList[CallerQueue](key=self._keys.__getitem__)

    def __len__(self) -> int:
        return len(self._queues)

    def put(self, queue: CallerQueue, key: object) -> None:
        """Adds a queue with this key, or changes the key of a queue that is present."""
        if self._keys.get(queue) != key:
            self.discard(queue)
            self._keys[queue] = key
            self._queues.add(queue)

    def discard(self, queue: CallerQueue) -> None:
        if queue in self._keys:
            self._queues.remove(queue)
            del self._keys[queue]

    def first(self) -> CallerQueue | None:
        """Returns the queue with the smallest key, or None if there are no queues."""
        return self._queues[0] if self._queues else None


class _PriorityClass:
    """The queues of all callers for one priority."""

    def __init__(self) -> None:
        self.ready = _Ranking()
        """The queues whose next ticket may run under the limits per caller, in the order of admission."""
        self.by_length = _Ranking()
        """The queues that have waiting tickets, longest queue first."""
        self.waiting = 0
        self._turn = 0
        self._turns: dict[str, int] = {}
        """The next round-robin round of each caller that has already been served in the current round.

        An entry is retained when the caller's queue becomes empty, because the caller may send further requests.
        """

    def next_turn(self, caller: str) -> int:
        """Returns the round-robin round in which a new queue of the caller is served first."""
        return max(self._turn, self._turns.get(caller, 0))

    def serve(self, queue: CallerQueue, *, by_age: bool) -> None:
        """Moves a queue to the next round-robin round after one of its tickets was admitted.

        `by_age` is True if the ticket was admitted because it had waited longest.
        """
        if queue.turn > self._turn and not by_age:
            self._turn = queue.turn
            self._turns.clear()
        queue.turn += 1
        if len(self._turns) < _MAX_RECORDED_TURNS:
            self._turns[queue.caller.name] = queue.turn


class AdmissionQueue:
    """Contains the waiting tickets in the order of admission, and counts the running requests of each caller.

    Adding or removing a ticket takes O(log n) time.
    """

    def __init__(self, limits: Limits) -> None:
        self.load = Load()
        """The number and the input bytes of all waiting requests."""
        self._limits = limits
        self._callers: dict[str, Caller] = {}
        priorities = range(HIGHEST_PRIORITY, LOWEST_PRIORITY - 1, -1)
        self._classes = {priority: _PriorityClass() for priority in priorities}
        """The queues of each priority, by priority. The highest priority is first."""
        self._by_age = _Ranking()
        self._turns = 0

    @property
    def callers(self) -> tuple[Caller, ...]:
        """The callers that have waiting or running requests."""
        return tuple(self._callers.values())

    def __iter__(self) -> Iterator[Ticket]:
        for caller in self.callers:
            for queue in tuple(caller.queues.values()):
                yield from tuple(queue)

    def caller(self, name: str) -> Caller:
        """Returns the caller with this name. A caller without requests is new and is not stored."""
        return self._callers.get(name) or Caller(name)

    def position(self, request: AdmissionRequest) -> int:
        """Returns an estimate of the position at which a new request would be queued, starting at 1.

        Assumes that every other caller of the same priority has as many tickets before the request as the request's own
        caller.
        """
        queue = self.caller(request.caller).queues.get(request.priority_class)
        within = self._classes[request.priority_class]
        queues, before = len(within.by_length), 0
        if queue is not None and queue.waiting.requests:
            before = queue.ahead_of(request)
        else:
            queues += 1
        higher = sum(self._classes[other].waiting for other in range(request.priority_class + 1, HIGHEST_PRIORITY + 1))
        return higher + min(within.waiting + 1, (before + 1) * queues)

    def positions(self) -> Iterator[QueuePosition]:
        """Yields the position of every waiting ticket in the order of admission. Takes O(n log n) time.

        Assumes that no ticket is added or removed before all of these tickets are admitted.
        """
        unit = 1 / self._limits.max_in_flight
        position = 0
        for priority, within in self._classes.items():
            if not within.waiting:
                continue
            order: list[tuple[float, int, float, int, int, Ticket]] = []
            for caller in self._callers.values():
                queue = caller.queues.get(priority)
                share = self._running_share(queue) if queue is not None else 0.0
                for i, ticket in enumerate(queue or ()):
                    turn = caller.queues[priority].turn + i
                    order.append((share + i * unit, turn, ticket.request.deadline_s, ticket.number, i + 1, ticket))
            order.sort()
            for *_, in_caller_queue, ticket in order:
                position += 1
                yield QueuePosition(ticket, position, in_caller_queue)

    def next(self) -> Ticket | None:
        """Returns the ticket to admit next, or None if the limits per caller allow no waiting ticket to run."""
        if self._is_by_age and (queue := self._by_age.first()) is not None:
            return queue.oldest
        for within in self._classes.values():
            if (queue := within.ready.first()) is not None:
                return queue.next
        return None

    def add(self, ticket: Ticket) -> None:
        queue = self._queue_of(ticket)
        queue.add(ticket)
        for load in (self.load, queue.caller.waiting):
            load.add(ticket.request.input_bytes)
        self._classes[queue.priority].waiting += 1
        self._rank(queue)

    def remove(self, ticket: Ticket) -> None:
        queue = self._queue_of(ticket)
        self._remove_from(queue, ticket)
        self._rank(queue)
        self._drop_if_idle(queue)

    def run(self, ticket: Ticket) -> None:
        """Counts a ticket as running, and removes it from the queue if it was waiting."""
        queue = self._queue_of(ticket)
        for load in (queue.running, queue.caller.running):
            load.add(ticket.size_bytes)
        if ticket.state is TicketState.WAITING:
            self._classes[queue.priority].serve(queue, by_age=self._is_by_age)
            self._turns += 1
            self._remove_from(queue, ticket)
        self._rank_all(queue.caller)

    def end(self, ticket: Ticket) -> None:
        """Stops counting a ticket as running."""
        queue = self._queue_of(ticket)
        for load in (queue.running, queue.caller.running):
            load.subtract(ticket.size_bytes)
        self._rank_all(queue.caller)
        self._drop_if_idle(queue)

    def displaced_by(self, request: AdmissionRequest) -> Ticket | None:
        """Returns the ticket that must leave a full queue to make space for a new request, or None if there is none.

        This is the last ticket in the longest caller queue of the lowest priority. A request displaces no ticket of a
        higher priority. It displaces no ticket of its own priority if its caller's queue would become as long as the
        longest queue.
        """
        for priority in range(LOWEST_PRIORITY, request.priority_class + 1):
            longest = self._classes[priority].by_length.first()
            if longest is not None:
                shorter = priority < request.priority_class or self._length_with(request) < self._length(
                    longest.waiting
                )
                return longest.last if shorter else None
        return None

    @property
    def _is_by_age(self) -> bool:
        return self._turns % TURNS_TO_ONE_BY_AGE == TURNS_TO_ONE_BY_AGE - 1

    def _queue_of(self, ticket: Ticket) -> CallerQueue:
        name, priority = ticket.request.caller, ticket.request.priority_class
        caller = self._callers.setdefault(name, self.caller(name))
        if priority not in caller.queues:
            caller.queues[priority] = CallerQueue(caller, priority, turn=self._classes[priority].next_turn(name))
        return caller.queues[priority]

    def _remove_from(self, queue: CallerQueue, ticket: Ticket) -> None:
        queue.remove(ticket)
        for load in (self.load, queue.caller.waiting):
            load.subtract(ticket.request.input_bytes)
        self._classes[queue.priority].waiting -= 1

    def _drop_if_idle(self, queue: CallerQueue) -> None:
        if queue.idle:
            del queue.caller.queues[queue.priority]
            if not queue.caller.queues:
                del self._callers[queue.caller.name]

    def _rank_all(self, caller: Caller) -> None:
        for queue in caller.queues.values():
            self._rank(queue)

    def _rank(self, queue: CallerQueue) -> None:
        within = self._classes[queue.priority]
        if not queue.waiting.requests:
            for ranking in (within.by_length, within.ready, self._by_age):
                ranking.discard(queue)
            return
        within.by_length.put(queue, -self._length(queue.waiting))
        bounds, first, oldest = self._limits.per_caller, queue.next, queue.oldest
        if queue.caller.may_run(first, bounds):
            within.ready.put(queue, (self._running_share(queue), queue.turn, first.request.deadline_s, first.number))
        else:
            within.ready.discard(queue)
        if queue.caller.may_run(oldest, bounds):
            self._by_age.put(queue, oldest.number)
        else:
            self._by_age.discard(queue)

    def _running_share(self, queue: CallerQueue) -> float:
        return queue.running.share(most=self._limits.max_in_flight, most_bytes=self._limits.max_in_flight_bytes)

    def _length(self, waiting: Load) -> float:
        return waiting.share(most=self._limits.max_queued, most_bytes=self._limits.max_queued_bytes)

    def _length_with(self, request: AdmissionRequest) -> float:
        """Returns the length of the caller's queue if the request is added to it, as a fraction of the limits."""
        queue = self.caller(request.caller).queues.get(request.priority_class)
        waiting = queue.waiting if queue is not None else Load()
        return self._length(Load(waiting.requests + 1, waiting.size_bytes + request.input_bytes))
