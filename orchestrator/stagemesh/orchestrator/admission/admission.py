"""Decides which requests run, wait or are rejected, before any stage reserves resources for them."""

import itertools
import math
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from copy import copy
from itertools import islice
from operator import attrgetter

from sortedcontainers import SortedKeyList

from stagemesh.common.errors import DeadlineError, OverloadedError, StagemeshError
from stagemesh.orchestrator.admission.estimates import RequestEstimates, RetrySchedule
from stagemesh.orchestrator.admission.queue import (
    AdmissionEntry,
    AdmissionQueue,
    AdmissionRequest,
    Caller,
    EntryState,
    Listener,
    Loads,
    QueuePosition,
)
from stagemesh.pipeline import Bounds, Limits

_REPORT_INTERVAL_S = 1.0
_REPORTS_PER_TICK = 200
# A request is rejected if it would miss its deadline even at this fraction of the measured times.
_MEASURED_FRACTION = 0.5
# At most this fraction of the queue is reserved for rejected requests that may be sent again.
_RESERVED_FRACTION = 1 / 8
_MAX_CALLER_SCHEDULES = 256


class Admission:
    """Admits requests up to the pipeline's limits and queues further requests. Rejects requests if the queue is full.

    The error of a rejected request contains the delay after which the client may retry. This object starts no tasks:
    its owner must call `tick` regularly. The only source of time is `clock`. Listeners must not call methods of this
    object.
    """

    def __init__(self, limits: Limits, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.limits = limits
        self._clock = clock
        self._queue = AdmissionQueue(limits)
        self.loads = self._queue.loads
        """The current number and total size in bytes of the running requests and of the waiting requests."""
        self._waiting = SortedKeyList[AdmissionEntry](key=attrgetter("latest_start_s", "number"))
        self._estimates = RequestEstimates()
        self._schedule = RetrySchedule()
        self._caller_schedules = OrderedDict[str, RetrySchedule]()
        self._numbers = itertools.count()
        self._reported_s = -math.inf
        self._to_report: Iterator[QueuePosition] = iter(())

    @property
    def callers(self) -> tuple[Caller, ...]:
        """The callers that have running or waiting requests."""
        return self._queue.callers

    @property
    def expected_wait_s(self) -> float:
        """The expected wait of a new request with priority 0, in seconds, if its caller has no other requests."""
        if self.loads.running.choices < self.limits.max_in_flight and self._queue.next() is None:
            return 0.0
        return self._queue.position(AdmissionRequest("", caller="\0")) * self._interval_s(self.loads)

    @property
    def returning(self) -> int:
        """The number of rejected requests that may be sent again, because their retry times have not expired."""
        return len(self._schedule)

    def enter(self, request: AdmissionRequest, listener: Listener) -> AdmissionEntry:
        """Admits or queues a request. Calls the listener's `admitted` or `queued` before returning.

        The returned entry must be passed to `withdraw` or `release`, unless the listener's `refused` is called. Raises
        OverloadedError (ADMISSION_LIMIT, CALLER_LIMIT) if the queue is full, and DeadlineError (DEADLINE_UNREACHABLE)
        if the request would miss its deadline.
        """
        now_s = self._clock()
        entry = AdmissionEntry(
            request,
            listener,
            next(self._numbers),
            size_bytes=request.input_bytes * request.choices + self._estimates.made_bytes(request.kind),
            latest_start_s=request.deadline_s - _MEASURED_FRACTION * self._estimates.fastest_s(request.kind, now_s),
        )
        caller = self._queue.caller(request.caller)
        may_run = caller.may_run(entry, self.limits.per_caller) and self.loads.may_run(entry, self.limits)
        # An earlier request of the caller may wait for a limit of the caller that this smaller request does not reach.
        if may_run and not caller.waiting.requests and self._queue.next() is None:
            _check_deadline(entry, now_s, wait_s=0.0)
            self._admit(entry, now_s)
        else:
            self._wait(entry, caller, now_s)
            # The new entry may precede or have displaced an entry that waits for bytes.
            self._fill()
        return entry

    def withdraw(self, entry: AdmissionEntry) -> bool:
        """Removes an entry from the queue without calling its listener.

        Returns False if the entry is not in the queue.
        """
        if entry.state is not EntryState.WAITING:
            return False
        self._queue.remove(entry)
        self._end_waiting(entry)
        self._fill()
        return True

    def release(self, entry: AdmissionEntry, *, made_bytes: int | None = None) -> None:
        """Ends an admitted request, and admits waiting requests. Must be called exactly once for each admitted request.

        `made_bytes` is the number of bytes that the request's outputs and edges occupied, or None if the request
        failed.
        """
        assert entry.state is EntryState.RUNNING, "only running entries are released"
        now_s = self._clock()
        took_s = now_s - entry.admitted_s
        entry.state = EntryState.GONE
        self._queue.end(entry)
        self._estimates.duration_s.add(took_s)
        if made_bytes is not None:
            self._estimates.add_success(entry.request.kind, now_s, took_s=took_s, made_bytes=made_bytes)
        self._fill()

    def tick(self) -> None:
        """Rejects waiting requests that can no longer meet their deadlines.

        Also reports queue positions to the listeners of the other waiting requests. Must be called a few times per
        second.
        """
        now_s = self._clock()
        late = False
        while self._waiting and (entry := self._waiting[0]).latest_start_s <= now_s:
            self._reject(entry, _deadline_error(entry, now_s, wait_s=0.0))
            late = True
        if late:
            self._fill()
        if self.loads.waiting.requests:
            self._report_some(now_s)
        else:
            self._to_report = iter(())

    def close(self, error: StagemeshError) -> None:
        """Rejects all waiting requests with `error`. Running requests continue."""
        for entry in tuple(self._waiting):
            # Several tasks raise the error. Each task needs a copy, because an exception object contains its traceback.
            self._reject(entry, copy(error))

    def _admit(self, entry: AdmissionEntry, now_s: float) -> None:
        self._queue.run(entry)
        listener = self._end_waiting(entry)
        entry.state, entry.admitted_s = EntryState.RUNNING, now_s
        self._remove_retry_slots(entry.request)
        assert listener is not None, "an entry is admitted once"
        listener.admitted()

    def _fill(self) -> None:
        """Admits as many waiting requests as the limits allow, in the order of the queue.

        If the next request would exceed the limit on bytes, the requests behind it are not admitted either.
        """
        now_s = self._clock()
        while (entry := self._queue.next()) is not None and self.loads.may_run(entry, self.limits):
            if entry.latest_start_s <= now_s:
                self._reject(entry, _deadline_error(entry, now_s, wait_s=0.0))
            else:
                self._admit(entry, now_s)

    def _wait(self, entry: AdmissionEntry, caller: Caller, now_s: float) -> None:
        position = self._queue.position(entry.request)
        wait_s = self._wait_s(entry, caller, position=position, in_caller_queue=position)
        _check_deadline(entry, now_s, wait_s=0.0 if self._estimates.duration_s.is_guess else wait_s)
        displaced = self._make_space(entry, caller, now_s)
        self._remove_retry_slots(entry.request)
        entry.state = EntryState.WAITING
        self._queue.add(entry)
        self._waiting.add(entry)
        self._report(entry, position=position, wait_s=wait_s)
        for other in displaced:
            self._report_rejected(other, self._full_error(other.request, now_s))

    def _make_space(self, entry: AdmissionEntry, caller: Caller, now_s: float) -> list[AdmissionEntry]:
        """Removes entries from the queue if a new request needs the space. Returns the removed entries.

        Raises OverloadedError if there is not enough space for the request. The queue is then unchanged.
        """
        request = entry.request
        bounds, schedule = self.limits.per_caller, self._caller_schedules.get(caller.name)
        reserved = _reserved(schedule, request, now_s, limits=bounds) if schedule is not None else 0
        if not caller.may_wait(request, bounds, reserved=reserved):
            raise self._caller_error(request, caller, now_s)
        reserved = _reserved(self._schedule, request, now_s, limits=self.limits)
        may_wait = self.loads.may_wait(request, self.limits, reserved=reserved)
        displaced: list[AdmissionEntry] = []
        while not may_wait and (other := self._queue.displaced_by(request)) is not None:
            self._queue.remove(other)
            displaced.append(other)
            may_wait = self.loads.may_wait(request, self.limits, reserved=0)
        if not may_wait:
            # A request that is rejected must not displace other requests.
            for other in displaced:
                self._queue.add(other)
            raise self._full_error(request, now_s)
        return displaced

    def _reject(self, entry: AdmissionEntry, error: StagemeshError) -> None:
        self._queue.remove(entry)
        self._report_rejected(entry, error)

    def _report_rejected(self, entry: AdmissionEntry, error: StagemeshError) -> None:
        if (listener := self._end_waiting(entry)) is not None:
            listener.refused(error)

    def _end_waiting(self, entry: AdmissionEntry) -> Listener | None:
        """Marks an entry as no longer waiting, and detaches its listener.

        Returns the listener for one last notification, or None if the entry has no listener.
        """
        self._waiting.discard(entry)
        listener, entry.listener, entry.state = entry.listener, None, EntryState.GONE
        return listener

    def _remove_retry_slots(self, request: AdmissionRequest) -> None:
        self._schedule.remove(request.retry_key)
        if (schedule := self._caller_schedules.get(request.caller)) is not None:
            schedule.remove(request.retry_key)

    def _interval_s(self, loads: Loads) -> float:
        """Returns the expected interval between consecutive completions of the running choices in `loads`.

        The interval is in seconds.
        """
        return self._estimates.duration_s.value / max(1, loads.running.choices)

    def _wait_s(self, entry: AdmissionEntry, caller: Caller, *, position: int, in_caller_queue: int) -> float:
        """Returns the expected time until the limits allow the request to run, in seconds.

        - `position` is the request's position in the order of admission, from 1.
        - `in_caller_queue` is the request's position in the queue of its caller, from 1.

        Counts earlier requests as one choice each, because a request that is expected too early is rejected later,
        but one that is expected too late is lost.
        """
        further = entry.request.choices - 1
        wait_s = (position + further) * self._interval_s(self.loads)
        if caller.may_run(entry, self.limits.per_caller):
            return wait_s
        in_caller_queue = min(in_caller_queue, caller.waiting.requests + 1)
        return max(wait_s, (in_caller_queue + further) * self._interval_s(caller))

    def _report(self, entry: AdmissionEntry, *, position: int, wait_s: float) -> None:
        entry.reported_position = position
        assert entry.listener is not None, "waiting entries have a listener"
        entry.listener.queued(position=position, expected_wait_s=wait_s)

    def _report_some(self, now_s: float) -> None:
        """Reports changed queue positions to a limited number of listeners.

        The next tick continues with the remaining listeners.
        """
        positions = list(islice(self._to_report, _REPORTS_PER_TICK))
        for entry, position, in_caller_queue in positions:
            if entry.state is EntryState.WAITING and position != entry.reported_position:
                caller = self._queue.caller(entry.request.caller)
                wait_s = self._wait_s(entry, caller, position=position, in_caller_queue=in_caller_queue)
                self._report(entry, position=position, wait_s=wait_s)
        if len(positions) < _REPORTS_PER_TICK and now_s - self._reported_s >= _REPORT_INTERVAL_S:
            self._reported_s = now_s
            self._to_report = self._queue.positions()

    def _full_error(self, request: AdmissionRequest, now_s: float) -> OverloadedError:
        limits, loads = self.limits, self.loads
        retry_after_s = self._schedule.assign(request.retry_key, now_s, interval_s=self._interval_s(loads))
        return OverloadedError(
            f"{loads.running.choices} requests run and {loads.waiting.requests} wait, which reaches the pipeline's "
            f"limits (max_in_flight {limits.max_in_flight}, max_queued {limits.max_queued}, or the limits on bytes); "
            f"retry in {retry_after_s:.1f} s with the same request_id",
            reason="ADMISSION_LIMIT",
            metadata={"max_in_flight": str(limits.max_in_flight), "max_queued": str(limits.max_queued)},
            retry_after_s=retry_after_s,
        )

    def _caller_error(self, request: AdmissionRequest, caller: Caller, now_s: float) -> OverloadedError:
        schedule = self._caller_schedules.setdefault(caller.name, RetrySchedule())
        self._caller_schedules.move_to_end(caller.name)
        if len(self._caller_schedules) > _MAX_CALLER_SCHEDULES:
            self._caller_schedules.popitem(last=False)
        retry_after_s = schedule.assign(request.retry_key, now_s, interval_s=self._interval_s(caller))
        return OverloadedError(
            f"{caller.running.choices} requests of caller {caller.name!r} run and {caller.waiting.requests} wait, "
            f"which reaches the pipeline's limits.per_caller; retry in {retry_after_s:.1f} s with the same request_id",
            reason="CALLER_LIMIT",
            metadata={"caller": caller.name},
            retry_after_s=retry_after_s,
        )


def _reserved(schedule: RetrySchedule, request: AdmissionRequest, now_s: float, *, limits: Bounds) -> int:
    """Returns the number of queue slots that `request` must leave free for rejected requests that may be sent again.

    Returns 0 if the retry time of `request` itself has been reached.
    """
    returning = 0 if schedule.is_due(request.retry_key, now_s) else len(schedule)
    return min(returning, math.ceil(limits.max_queued * _RESERVED_FRACTION))


def _check_deadline(entry: AdmissionEntry, now_s: float, *, wait_s: float) -> None:
    if now_s + _MEASURED_FRACTION * wait_s >= entry.latest_start_s:
        raise _deadline_error(entry, now_s, wait_s=wait_s)


def _deadline_error(entry: AdmissionEntry, now_s: float, *, wait_s: float) -> DeadlineError:
    left_s = max(0.0, entry.request.deadline_s - now_s)
    fastest_s = (entry.request.deadline_s - entry.latest_start_s) / _MEASURED_FRACTION
    return DeadlineError(
        f"{left_s:.1f} s remain until the request's deadline, but it would wait about {wait_s:.1f} s, and the fastest "
        f"recent request of its kind took {fastest_s:.1f} s; allow more time",
        reason="DEADLINE_UNREACHABLE",
        metadata={"left_s": f"{left_s:.3f}", "wait_s": f"{wait_s:.3f}", "fastest_s": f"{fastest_s:.3f}"},
    )
