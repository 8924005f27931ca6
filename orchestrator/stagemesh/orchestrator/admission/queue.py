"""The entries of requests that wait for admission, and the order in which they are admitted.

`AdmissionRequest` is the input of admission control, and `AdmissionEntry` its output.
"""

import math
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from enum import Enum, auto
from operator import attrgetter
from typing import Any, NamedTuple, Protocol

from sortedcontainers import SortedKeyList

from stagemesh.common.errors import StagemeshError
from stagemesh.pipeline import Bounds, Limits

TURNS_TO_ONE_BY_AGE = 8
"""The number of admissions from the queue of which one admits the entry that has waited longest."""
_LOWEST_PRIORITY, _HIGHEST_PRIORITY = -10, 10
_MAX_RECORDED_TURNS = 4096


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

    @property
    def retry_key(self) -> str:
        """The key of the request's retry time. A request of another caller with the same id has another key."""
        return f"{self.caller} {self.request_id}"


class Listener(Protocol):
    """Receives notifications about one admission request.

    `queued` is called any number of times, and then either `admitted` or `refused` is called once.
    """

    def queued(self, *, position: int, expected_wait_s: float) -> None:
        """Called when the request is queued or its position changes.

        `position` is the position in the queue, from 1. `expected_wait_s` is the expected wait in seconds.
        """

    def admitted(self) -> None:
        """Called when the request is admitted. The request may then run until its entry is released."""

    def refused(self, error: StagemeshError) -> None:
        """Called when the request is removed from the queue without being admitted. `error` is the reason."""


class EntryState(Enum):
    """The state of an entry. GONE means that its request was rejected, withdrawn or released."""

    NEW = auto()
    WAITING = auto()
    RUNNING = auto()
    GONE = auto()


@dataclass(eq=False)
class AdmissionEntry:
    """An admission request that is waiting or running. Only the `Admission` that created the entry modifies it."""

    request: AdmissionRequest
    listener: Listener | None
    """The listener of the request, or None after the listener was called for the last time.

    Listeners usually refer to the entry, and a reference cycle would delay the release of both.
    """
    number: int
    """The number of entries that were created before this entry."""
    size_bytes: int
    """The estimated number of bytes that the request occupies while it runs."""
    latest_start_s: float
    """The latest time at which the request can start and still meet its deadline, in seconds on Admission's clock."""
    state: EntryState = EntryState.NEW
    admitted_s: float = 0.0
    reported_position: int = 0
    """The queue position that was last reported to the listener, or 0 if none was reported."""


@dataclass
class Load:
    """A number of requests, the number of their choices that the limits count, and their total size in bytes."""

    requests: int = 0
    choices: int = 0
    size_bytes: int = 0

    def add(self, size_bytes: int, choices: int = 1) -> None:
        """Adds a request of `size_bytes` bytes that counts as `choices` requests."""
        self.requests += 1
        self.choices += choices
        self.size_bytes += size_bytes

    def subtract(self, size_bytes: int, choices: int = 1) -> None:
        """Subtracts a request of `size_bytes` bytes that counts as `choices` requests."""
        self.requests -= 1
        self.choices -= choices
        self.size_bytes -= size_bytes

    def fits(self, size_bytes: int, choices: int = 1, *, most: int, most_bytes: int) -> bool:
        """Returns whether a request can be added without exceeding `most` choices or `most_bytes` bytes.

        If no other request is counted, the limit on bytes is ignored, so that a large request can run alone.
        """
        return self.choices + choices <= most and (not self.requests or self.size_bytes + size_bytes <= most_bytes)

    def share(self, *, most: int, most_bytes: int) -> float:
        """Returns the larger of the fractions `choices` / `most` and `size_bytes` / `most_bytes`."""
        return max(self.choices / max(1, most), self.size_bytes / most_bytes)


@dataclass(eq=False)
class Loads:
    """Counts of the running and waiting requests of the pipeline, of one priority, of one caller, or of one queue."""

    running: Load = field(default_factory=Load)
    """The number of running requests and of their choices, and their total estimated size in bytes."""
    waiting: Load = field(default_factory=Load)
    """The number of waiting requests, and their total input size in bytes. Each counts once."""

    def may_run(self, entry: AdmissionEntry, bounds: Bounds) -> bool:
        """Returns whether the entry's request may run in addition to the running requests within `bounds`."""
        return self.running.fits(
            entry.size_bytes, entry.request.choices, most=bounds.max_in_flight, most_bytes=bounds.max_in_flight_bytes
        )

    def may_wait(self, request: AdmissionRequest, bounds: Bounds, *, reserved: int) -> bool:
        """Returns whether the request may be queued and still leave `reserved` slots of the queue free."""
        return self.waiting.fits(
            request.input_bytes, most=bounds.max_queued - reserved, most_bytes=bounds.max_queued_bytes
        )


class Caller(Loads):
    """The running and waiting requests of one caller, over all priorities.

    All requests without a caller name belong to the caller "".
    """

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.queues: dict[int, _CallerQueue] = {}
        """The caller's queues, by priority. Contains only priorities for which the caller has requests."""


class QueuePosition(NamedTuple):
    """The position of an entry in the order of admission and within the queue of its caller. Both start at 1."""

    entry: AdmissionEntry
    position: int
    in_caller_queue: int


class _CallerQueue(Loads):
    """The waiting and running requests of one caller with one priority."""

    def __init__(self, caller: Caller, within: "_PriorityClass") -> None:
        super().__init__()
        self.caller, self.within = caller, within
        self.turn = within.next_turn(caller.name)
        """The number of the round-robin round in which this queue's next request can be admitted."""
        self.by_deadline = SortedKeyList[AdmissionEntry](key=attrgetter("request.deadline_s", "number"))
        """The waiting entries, ordered by deadline. The earliest deadline is first."""
        self.by_age = SortedKeyList[AdmissionEntry](key=attrgetter("number"))
        """The waiting entries, ordered by age. The entry that has waited longest is first."""


class _Ranking:
    """A set of caller queues, sorted by a key of each queue. The smallest key is first. Keys can change."""

    def __init__(self) -> None:
        self._keys: dict[_CallerQueue, Any] = {}
        self._queues = SortedKeyList[_CallerQueue](key=self._keys.__getitem__)

    def __len__(self) -> int:
        return len(self._queues)

    def put(self, queue: _CallerQueue, key: object | None) -> None:
        """Adds a queue with this key, or changes the key of the queue. Removes the queue if `key` is None."""
        old = self._keys.get(queue)
        if old == key:
            return
        if old is not None:
            self._queues.remove(queue)
            del self._keys[queue]
        if key is not None:
            self._keys[queue] = key
            self._queues.add(queue)

    def first(self) -> _CallerQueue | None:
        """Returns the queue with the smallest key, or None if the set is empty."""
        return self._queues[0] if self._queues else None


class _PriorityClass(Loads):
    """The requests of one priority, with one queue for each caller."""

    def __init__(self, priority: int) -> None:
        super().__init__()
        self.priority = priority
        self.ready = _Ranking()
        """The queues whose next entry may run under the caller's limits, in the order of admission."""
        self.by_length = _Ranking()
        """The queues that have waiting entries. The longest queue is first."""
        self._turn = 0
        self._turns: dict[str, int] = {}
        """The next round-robin round of each caller that was already served in the current round, by caller name.

        A round is retained when the caller's queue becomes empty, because the caller may send further requests.
        """

    def next_turn(self, caller: str) -> int:
        """Returns the first round-robin round that serves a new queue of the caller."""
        return max(self._turn, self._turns.get(caller, 0))

    def serve(self, queue: _CallerQueue, *, by_age: bool) -> None:
        """Moves a queue to the next round-robin round after an entry of the queue was admitted.

        `by_age` is True if the entry was admitted because it had waited longest.
        """
        if queue.turn > self._turn and not by_age:
            self._turn = queue.turn
            self._turns.clear()
        queue.turn += 1
        if len(self._turns) < _MAX_RECORDED_TURNS:
            self._turns[queue.caller.name] = queue.turn


class AdmissionQueue:
    """The waiting entries in the order of admission, and the counts of running and waiting requests.

    Adding or removing an entry takes O(log n) time.
    """

    def __init__(self, limits: Limits) -> None:
        self.loads = Loads()
        """Counts of the running and waiting requests of all callers."""
        self._limits = limits
        self._callers: dict[str, Caller] = {}
        priorities = range(_HIGHEST_PRIORITY, _LOWEST_PRIORITY - 1, -1)
        self._classes = {priority: _PriorityClass(priority) for priority in priorities}
        """The queues of each priority, by priority. The highest priority is first."""
        self._by_age = _Ranking()
        self._turns = 0

    @property
    def callers(self) -> tuple[Caller, ...]:
        """The callers that have waiting or running requests."""
        return tuple(self._callers.values())

    def caller(self, name: str) -> Caller:
        """Returns the caller with this name. If the caller has no requests, returns a new Caller that is not stored."""
        return self._callers.get(name) or Caller(name)

    def position(self, request: AdmissionRequest) -> int:
        """Returns an estimate of the position at which a new request would be queued, starting at 1.

        Assumes that every other caller of the same priority has as many entries before the request as the request's own
        caller.
        """
        priority = _priority_of(request)
        queue = self.caller(request.caller).queues.get(priority)
        within = self._classes[priority]
        queues, before = len(within.by_length), 0
        if queue is not None and queue.waiting.requests:
            before = queue.by_deadline.bisect_key_right((request.deadline_s, math.inf))
        else:
            queues += 1
        higher = sum(self._classes[other].waiting.requests for other in range(priority + 1, _HIGHEST_PRIORITY + 1))
        return higher + min(within.waiting.requests + 1, (before + 1) * queues)

    def positions(self) -> Iterator[QueuePosition]:
        """Yields the position of every waiting entry in the order of admission. Takes O(n log n) time.

        Assumes that no entry is added or removed before all of these entries are admitted.
        """
        unit = 1 / self._limits.max_in_flight
        position = 0
        for within in self._classes.values():
            if not within.waiting.requests:
                continue
            order: list[tuple[float, int, float, int, int, AdmissionEntry]] = []
            for caller in self._callers.values():
                queue = caller.queues.get(within.priority)
                if queue is None:
                    continue
                share = self._running_share(queue)
                for i, entry in enumerate(queue.by_deadline):
                    key = share, queue.turn + i, entry.request.deadline_s, entry.number
                    order.append((*key, i + 1, entry))
                    share += entry.request.choices * unit
            order.sort()
            for *_, in_caller_queue, entry in order:
                position += 1
                yield QueuePosition(entry, position, in_caller_queue)

    def next(self) -> AdmissionEntry | None:
        """Returns the entry to admit next, or None if no entry waits that may run under the limits per caller."""
        if self._is_by_age and (queue := self._by_age.first()) is not None:
            return queue.by_age[0]
        for within in self._classes.values():
            if (queue := within.ready.first()) is not None:
                return queue.by_deadline[0]
        return None

    def add(self, entry: AdmissionEntry) -> None:
        queue = self._queue_of(entry)
        queue.by_deadline.add(entry)
        queue.by_age.add(entry)
        for loads in self._loads_of(queue):
            loads.waiting.add(entry.request.input_bytes)
        self._rank(queue)

    def remove(self, entry: AdmissionEntry) -> None:
        queue = self._queue_of(entry)
        self._remove_from(queue, entry)
        self._rank(queue)
        self._drop_if_idle(queue)

    def run(self, entry: AdmissionEntry) -> None:
        """Counts an entry as running, and removes it from the queue if it was waiting."""
        queue = self._queue_of(entry)
        for loads in self._loads_of(queue):
            loads.running.add(entry.size_bytes, entry.request.choices)
        if entry.state is EntryState.WAITING:
            queue.within.serve(queue, by_age=self._is_by_age)
            self._turns += 1
            self._remove_from(queue, entry)
        self._rank_all(queue.caller)

    def end(self, entry: AdmissionEntry) -> None:
        """Stops counting an entry as running."""
        queue = self._queue_of(entry)
        for loads in self._loads_of(queue):
            loads.running.subtract(entry.size_bytes, entry.request.choices)
        self._rank_all(queue.caller)
        self._drop_if_idle(queue)

    def displaced_by(self, request: AdmissionRequest) -> AdmissionEntry | None:
        """Returns the entry that must leave a full queue to make space for a new request, or None if there is none.

        This is the last entry in the longest caller queue of the lowest priority. A request displaces no entry of a
        higher priority. A request displaces no entry of its own priority if its caller's queue would become as long as
        the longest queue.
        """
        highest = _priority_of(request)
        for priority in range(_LOWEST_PRIORITY, highest + 1):
            longest = self._classes[priority].by_length.first()
            if longest is not None:
                shorter = priority < highest or self._length_with(request) < self._length(longest.waiting)
                return longest.by_deadline[-1] if shorter else None
        return None

    @property
    def _is_by_age(self) -> bool:
        return self._turns % TURNS_TO_ONE_BY_AGE == TURNS_TO_ONE_BY_AGE - 1

    def _queue_of(self, entry: AdmissionEntry) -> _CallerQueue:
        name, priority = entry.request.caller, _priority_of(entry.request)
        caller = self._callers.setdefault(name, self.caller(name))
        if priority not in caller.queues:
            caller.queues[priority] = _CallerQueue(caller, self._classes[priority])
        return caller.queues[priority]

    def _loads_of(self, queue: _CallerQueue) -> tuple[Loads, ...]:
        """Returns all Loads in which a request of `queue` is counted."""
        return self.loads, queue.within, queue.caller, queue

    def _remove_from(self, queue: _CallerQueue, entry: AdmissionEntry) -> None:
        queue.by_deadline.remove(entry)
        queue.by_age.remove(entry)
        for loads in self._loads_of(queue):
            loads.waiting.subtract(entry.request.input_bytes)

    def _drop_if_idle(self, queue: _CallerQueue) -> None:
        if not queue.running.requests and not queue.waiting.requests:
            del queue.caller.queues[queue.within.priority]
            if not queue.caller.queues:
                del self._callers[queue.caller.name]

    def _rank_all(self, caller: Caller) -> None:
        for queue in caller.queues.values():
            self._rank(queue)

    def _rank(self, queue: _CallerQueue) -> None:
        within = queue.within
        if not queue.waiting.requests:
            for ranking in (within.by_length, within.ready, self._by_age):
                ranking.put(queue, None)
            return
        bounds, first, oldest = self._limits.per_caller, queue.by_deadline[0], queue.by_age[0]
        turn = self._running_share(queue), queue.turn, first.request.deadline_s, first.number
        within.by_length.put(queue, -self._length(queue.waiting))
        within.ready.put(queue, turn if queue.caller.may_run(first, bounds) else None)
        self._by_age.put(queue, oldest.number if queue.caller.may_run(oldest, bounds) else None)

    def _running_share(self, queue: _CallerQueue) -> float:
        return queue.running.share(most=self._limits.max_in_flight, most_bytes=self._limits.max_in_flight_bytes)

    def _length(self, waiting: Load) -> float:
        return waiting.share(most=self._limits.max_queued, most_bytes=self._limits.max_queued_bytes)

    def _length_with(self, request: AdmissionRequest) -> float:
        """Returns the length that the caller's queue would have with the request, as a fraction of the queue limits."""
        queue = self.caller(request.caller).queues.get(_priority_of(request))
        waiting = queue.waiting if queue is not None else Load()
        return self._length(Load(choices=waiting.choices + 1, size_bytes=waiting.size_bytes + request.input_bytes))


def _priority_of(request: AdmissionRequest) -> int:
    """Returns the request's priority, clamped to the range of the priorities that have queues."""
    return max(_LOWEST_PRIORITY, min(_HIGHEST_PRIORITY, request.priority))
