"""Who may run now, who waits, and who is sent away: decided before any stage holds anything of a request."""

import itertools
import math
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from copy import copy
from itertools import islice

from stagemesh.common.errors import DeadlineError, OverloadedError, StagemeshError
from stagemesh.orchestrator.admission.caller_queues import AdmissionRequest, Caller, Listener, Load, Ticket, TicketState
from stagemesh.orchestrator.admission.estimates import RequestEstimates
from stagemesh.orchestrator.admission.queue import AdmissionQueue, QueuePosition
from stagemesh.orchestrator.admission.ranking import Ranking
from stagemesh.orchestrator.admission.retry_schedule import RetrySchedule
from stagemesh.orchestrator.admission.snapshot import AdmissionSnapshot, CallerLoad
from stagemesh.orchestrator.spec import Limits

_TELL_EVERY_S = 1.0
_TOLD_AT_ONCE = 200
# A request is hopeless where it would be late even if all went in this part of the time that was measured.
_CAUTION = 0.5
# At most this part of the queue is held for those who were told to come back.
_HELD = 1 / 8
_MOST_LINES = 256


class Admission:
    """Admits requests up to the limits, lets those beyond wait in a bounded queue, and refuses the rest with a time to
    come back at.

    It is driven by its callers and by `tick`, and knows no time but that of `clock`. Listeners must not call back.
    """

    def __init__(self, limits: Limits, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.limits = limits
        self._clock = clock
        self._running = Load()
        self._queue = AdmissionQueue(limits)
        self._hopeless = Ranking[Ticket]()
        self._measures = RequestEstimates()
        self._returns = RetrySchedule()
        self._caller_returns = OrderedDict[str, RetrySchedule]()
        self._numbers = itertools.count()
        self._told_s = -math.inf
        self._telling: Iterator[QueuePosition] = iter(())

    @property
    def in_flight(self) -> int:
        """Requests that run now."""
        return self._running.requests

    @property
    def queued(self) -> int:
        """Requests that wait now."""
        return self._queue.load.requests

    def enter(self, claim: AdmissionRequest, listener: Listener) -> Ticket:
        """Takes a claim: the listener has heard that it is admitted, or that it waits.

        Raises OverloadedError (ADMISSION_LIMIT, CALLER_LIMIT) where the queue has no room, and DeadlineError
        (DEADLINE_UNREACHABLE) where the request would be late. Whoever takes the ticket gives it back by `withdraw` or
        `release`, unless the listener heard that it was refused.
        """
        now_s = self._clock()
        ticket = Ticket(
            claim,
            listener,
            next(self._numbers),
            size_bytes=claim.input_bytes + self._measures.made_bytes(claim.kind),
            hopeless_s=claim.deadline_s - _CAUTION * self._measures.fastest_s(claim.kind, now_s),
        )
        caller = self._queue.caller(claim.caller)
        may_run = caller.may_run(ticket, self.limits.per_caller) and self._fits(ticket)
        if may_run and self._queue.next() is None:
            _check_hope(ticket, now_s, wait_s=0.0)
            self._admit(ticket, now_s)
        else:
            self._wait(ticket, caller, now_s)
            # It may go before one who waits for bytes, or have pushed that one out.
            self._fill()
        return ticket

    def withdraw(self, ticket: Ticket) -> bool:
        """Gives up waiting; returns whether it did wait. Its listener hears nothing more."""
        if ticket.state is not TicketState.WAITING:
            return False
        self._queue.remove(ticket)
        self._end_waiting(ticket)
        self._fill()
        return True

    def release(self, ticket: Ticket, *, made_bytes: int | None = None) -> None:
        """An admitted request has ended, having made so many bytes; None where it came to no good end. Once."""
        assert ticket.state is TicketState.RUNNING, "only what runs is released"
        now_s = self._clock()
        took_s = now_s - ticket.admitted_s
        ticket.state = TicketState.GONE
        self._running.take(ticket.size_bytes)
        self._queue.end(ticket)
        self._measures.add_end(took_s)
        if made_bytes is not None:
            self._measures.add_success(ticket.claim.kind, now_s, took_s=took_s, made_bytes=made_bytes)
        self._fill()

    def tick(self) -> None:
        """Refuses who waits without hope, and tells the others where they stand; to be called a few times a second."""
        now_s = self._clock()
        hopeless = False
        while (ticket := self._hopeless.first()) is not None and ticket.hopeless_s <= now_s:
            self._refuse(ticket, _hopeless_error(ticket, now_s, wait_s=0.0))
            hopeless = True
        if hopeless:
            self._fill()
        if self.queued:
            self._tell_some(now_s)
        else:
            self._telling = iter(())

    def close(self, error: StagemeshError) -> None:
        """Refuses all who wait; those who run go on."""
        for ticket in tuple(self._queue):
            # One for each: raising one object in several tasks would mix their tracebacks.
            self._refuse(ticket, copy(error))

    def snapshot(self) -> AdmissionSnapshot:
        """What there is now."""
        return AdmissionSnapshot(
            in_flight=self._running.requests,
            in_flight_bytes=self._running.size_bytes,
            queued=self._queue.load.requests,
            queued_bytes=self._queue.load.size_bytes,
            expected_wait_s=self._expected_wait_s(AdmissionRequest("", caller="\0")),
            returning=len(self._returns),
            callers=tuple(
                CallerLoad(
                    caller.name,
                    in_flight=caller.running.requests,
                    in_flight_bytes=caller.running.size_bytes,
                    queued=caller.waiting.requests,
                    queued_bytes=caller.waiting.size_bytes,
                )
                for caller in self._queue.callers
            ),
        )

    # -- inner workings

    def _fits(self, ticket: Ticket) -> bool:
        limits = self.limits
        return self._running.fits(ticket.size_bytes, most=limits.max_in_flight, most_bytes=limits.max_in_flight_bytes)

    def _admit(self, ticket: Ticket, now_s: float) -> None:
        self._queue.run(ticket)
        self._hopeless.discard(ticket)
        self._running.add(ticket.size_bytes)
        ticket.state, ticket.admitted_s = TicketState.RUNNING, now_s
        self._keep_promise(ticket.claim)
        listener, ticket.listener = ticket.listener, None
        assert listener is not None, "nobody is admitted twice"
        listener.admitted()

    def _fill(self) -> None:
        """Admits whose turn it is. Nobody passes one who waits for bytes to become free."""
        now_s = self._clock()
        while (ticket := self._queue.next()) is not None and self._fits(ticket):
            if ticket.hopeless_s <= now_s:
                self._refuse(ticket, _hopeless_error(ticket, now_s, wait_s=0.0))
            else:
                self._admit(ticket, now_s)

    def _wait(self, ticket: Ticket, caller: Caller, now_s: float) -> None:
        position = self._queue.position(ticket.claim)
        wait_s = max(position * self._interval_s(self._running), self._caller_wait_s(caller, ticket, position=position))
        _check_hope(ticket, now_s, wait_s=wait_s if self._measures.has_mean else 0.0)
        pushed_out = self._make_room(ticket, caller, now_s)
        self._keep_promise(ticket.claim)
        ticket.state = TicketState.WAITING
        self._queue.add(ticket)
        self._hopeless.put(ticket, ticket.hopeless_s)
        self._tell(ticket, position=position, wait_s=wait_s)
        for other in pushed_out:
            self._tell_refused(other, self._full_error(other.claim, now_s))

    def _make_room(self, ticket: Ticket, caller: Caller, now_s: float) -> list[Ticket]:
        """Finds the ticket a place in the queue; raises OverloadedError.

        RetrySchedule those who were pushed out for it, where that is fair, and who are to hear so.
        """
        claim = ticket.claim
        bounds, line = self.limits.per_caller, self._caller_returns.get(caller.name)
        held = _held(line, claim, now_s, most=bounds.max_queued) if line is not None else 0
        if not caller.may_wait(ticket, bounds, held=held):
            raise self._caller_error(claim, caller, now_s)
        most = self.limits.max_queued
        may_wait = self._may_wait(claim, most=most - _held(self._returns, claim, now_s, most=most))
        pushed_out: list[Ticket] = []
        while not may_wait and (other := self._queue.who_gives_way(claim)) is not None:
            self._queue.remove(other)
            pushed_out.append(other)
            may_wait = self._may_wait(claim, most=most)
        if not may_wait:
            # Nobody is pushed out for nothing.
            for other in pushed_out:
                self._queue.add(other)
            raise self._full_error(claim, now_s)
        return pushed_out

    def _may_wait(self, claim: AdmissionRequest, *, most: int) -> bool:
        return self._queue.load.fits(claim.input_bytes, most=most, most_bytes=self.limits.max_queued_bytes)

    def _refuse(self, ticket: Ticket, error: StagemeshError) -> None:
        self._queue.remove(ticket)
        self._tell_refused(ticket, error)

    def _tell_refused(self, ticket: Ticket, error: StagemeshError) -> None:
        if (listener := self._end_waiting(ticket)) is not None:
            listener.refused(error)

    def _end_waiting(self, ticket: Ticket) -> Listener | None:
        """It has left the queue; returns who is to hear why."""
        self._hopeless.discard(ticket)
        listener, ticket.listener, ticket.state = ticket.listener, None, TicketState.GONE
        return listener

    def _keep_promise(self, claim: AdmissionRequest) -> None:
        self._returns.keep(claim.request_id)
        if (line := self._caller_returns.get(claim.caller)) is not None:
            line.keep(claim.request_id)

    # Requests that hold places for so long on average give them back at this interval.
    def _interval_s(self, running: Load) -> float:
        return self._measures.mean_s / max(1, running.requests)

    def _expected_wait_s(self, claim: AdmissionRequest) -> float:
        if self._running.requests < self.limits.max_in_flight and self._queue.next() is None:
            return 0.0
        return self._queue.position(claim) * self._interval_s(self._running)

    def _caller_wait_s(self, caller: Caller, ticket: Ticket, *, position: int) -> float:
        """Where it waits for its own caller's requests to end; 0 where it does not."""
        if caller.may_run(ticket, self.limits.per_caller):
            return 0.0
        return min(position, caller.waiting.requests + 1) * self._interval_s(caller.running)

    def _tell(self, ticket: Ticket, *, position: int, wait_s: float) -> None:
        ticket.told = position
        assert ticket.listener is not None, "it waits"
        ticket.listener.queued(position=position, expected_wait_s=wait_s)

    def _tell_some(self, now_s: float) -> None:
        """Tells so many as do not hold others up, and goes on with the rest at the next tick."""
        standings = list(islice(self._telling, _TOLD_AT_ONCE))
        for ticket, position, in_lane in standings:
            if ticket.state is TicketState.WAITING and position != ticket.told:
                caller = self._queue.caller(ticket.claim.caller)
                wait_s = position * self._interval_s(self._running)
                wait_s = max(wait_s, self._caller_wait_s(caller, ticket, position=in_lane))
                self._tell(ticket, position=position, wait_s=wait_s)
        if len(standings) < _TOLD_AT_ONCE and now_s - self._told_s >= _TELL_EVERY_S:
            self._told_s = now_s
            self._telling = self._queue.standings()

    def _full_error(self, claim: AdmissionRequest, now_s: float) -> OverloadedError:
        limits, waiting = self.limits, self._queue.load.requests
        retry_after_s = self._returns.promise(claim.request_id, now_s, interval_s=self._interval_s(self._running))
        return OverloadedError(
            f"{self._running.requests} requests run and {waiting} wait, as many as the pipeline's limits allow "
            f"(max_in_flight is {limits.max_in_flight}, max_queued {limits.max_queued}, beside those on bytes); "
            f"come back in {retry_after_s:.1f} s under the same request_id",
            reason="ADMISSION_LIMIT",
            metadata={"max_in_flight": str(limits.max_in_flight), "max_queued": str(limits.max_queued)},
            retry_after_s=retry_after_s,
        )

    def _caller_error(self, claim: AdmissionRequest, caller: Caller, now_s: float) -> OverloadedError:
        line = self._caller_returns.setdefault(caller.name, RetrySchedule())
        self._caller_returns.move_to_end(caller.name)
        if len(self._caller_returns) > _MOST_LINES:
            self._caller_returns.popitem(last=False)
        retry_after_s = line.promise(claim.request_id, now_s, interval_s=self._interval_s(caller.running))
        return OverloadedError(
            f"{caller.running.requests} requests of caller {caller.name!r} run and {caller.waiting.requests} wait, as "
            f"many as the pipeline's limits.per_caller allow; come back in {retry_after_s:.1f} s under the same "
            "request_id",
            reason="CALLER_LIMIT",
            metadata={"caller": caller.name},
            retry_after_s=retry_after_s,
        )


def _held(line: RetrySchedule, claim: AdmissionRequest, now_s: float, *, most: int) -> int:
    """How many places of a queue the claim must leave to others, who were promised them."""
    promised = 0 if line.is_due(claim.request_id, now_s) else len(line)
    return min(promised, math.ceil(most * _HELD))


def _check_hope(ticket: Ticket, now_s: float, *, wait_s: float) -> None:
    if now_s + _CAUTION * wait_s >= ticket.hopeless_s:
        raise _hopeless_error(ticket, now_s, wait_s=wait_s)


def _hopeless_error(ticket: Ticket, now_s: float, *, wait_s: float) -> DeadlineError:
    left_s = max(0.0, ticket.claim.deadline_s - now_s)
    fastest_s = (ticket.claim.deadline_s - ticket.hopeless_s) / _CAUTION
    return DeadlineError(
        f"{left_s:.1f} s are left to the request's deadline; it would wait about {wait_s:.1f} s, and the fastest of "
        f"the last ones like it took {fastest_s:.1f} s; allow more time",
        reason="DEADLINE_UNREACHABLE",
        metadata={"left_s": f"{left_s:.3f}", "wait_s": f"{wait_s:.3f}", "fastest_s": f"{fastest_s:.3f}"},
    )
