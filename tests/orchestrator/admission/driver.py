"""Drives an admission with a manual clock and with requests that record their reports."""

import heapq
import itertools
import math
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any

from stagemesh.common.errors import StagemeshError
from stagemesh.orchestrator.admission.admission import Admission
from stagemesh.orchestrator.admission.queue import AdmissionEntry, AdmissionRequest
from stagemesh.pipeline import Limits
from tests.orchestrator.replicas import Clock


@dataclass
class RecordedRequest:
    """A request and the reports about it."""

    request: AdmissionRequest
    reports: list[str] = field(default_factory=list[str])
    """In order of arrival: queued, admitted, refused."""
    positions: list[int] = field(default_factory=list[int])
    waits_s: list[float] = field(default_factory=list[float])
    error: StagemeshError | None = None
    on_admitted: Callable[[], None] = lambda: None
    entry: AdmissionEntry = field(init=False)
    """The request's entry, once the request has been entered."""

    @property
    def name(self) -> str:
        return self.request.request_id

    @property
    def runs(self) -> bool:
        return self.reports[-1:] == ["admitted"]

    @property
    def waits(self) -> bool:
        return self.reports[-1:] == ["queued"]

    def queued(self, *, position: int, expected_wait_s: float) -> None:
        self.reports.append("queued")
        self.positions.append(position)
        self.waits_s.append(expected_wait_s)

    def admitted(self) -> None:
        self.reports.append("admitted")
        self.on_admitted()

    def refused(self, error: StagemeshError) -> None:
        self.reports.append("refused")
        self.error = error


class AdmissionDriver:
    """An admission with a clock. `order` contains the names of admitted requests."""

    def __init__(self, max_in_flight: int = 1, **limits: Any) -> None:
        """`limits` are further fields of `Limits`. They are high by default."""
        high: dict[str, Any] = {"max_queued": 1000, "max_in_flight_bytes": 1 << 40, "max_queued_bytes": 1 << 40}
        self.clock = Clock()
        self.admission = Admission(Limits(max_in_flight=max_in_flight, **(high | limits)), clock=self.clock)
        self.order: list[str] = []
        self._numbers = itertools.count()

    def ask(self, name: str = "", *, within_s: float = math.inf, **fields: Any) -> RecordedRequest:
        """Enters a request with these fields of `AdmissionRequest`. Raises the error if it is rejected."""
        name = name or f"r{next(self._numbers)}"
        request = AdmissionRequest(name, deadline_s=self.clock.now_s + within_s, **fields)
        recorded = RecordedRequest(request)
        recorded.on_admitted = lambda: self.order.append(recorded.name)
        recorded.entry = self.admission.enter(request, recorded)
        return recorded

    def end(self, recorded: RecordedRequest, *, after_s: float = 0.0, made_bytes: int | None = 0) -> None:
        """Ends a running request."""
        self.clock.now_s += after_s
        self.admission.release(recorded.entry, made_bytes=made_bytes)

    def run_before(self, *, took_s: float, times: int = 60, kind: Hashable = None, made_bytes: int = 0) -> None:
        """Runs requests one after another."""
        for _ in range(times):
            self.end(self.ask(kind=kind), after_s=took_s, made_bytes=made_bytes)
        self.order.clear()

    def serve(self, waiting: list[RecordedRequest], *, first: RecordedRequest) -> list[str]:
        """Ends requests one after another, starting with `first`, until all have run. Returns their order."""
        by_name = {recorded.name: recorded for recorded in waiting}
        running = first
        self.order.clear()
        while any(recorded.waits for recorded in waiting):
            self.end(running)
            running = by_name[self.order[-1]]
        return self.order


class Agenda:
    """The scheduled events of a simulation."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()

    def add(self, in_s: float, action: Callable[[], None]) -> None:
        """Schedules an event."""
        heapq.heappush(self._events, (self._clock.now_s + in_s, next(self._numbers), action))

    def run(self, *, until_s: float) -> None:
        """Runs the events until a time."""
        while self._events and self._events[0][0] <= until_s:
            self._clock.now_s, _, action = heapq.heappop(self._events)
            action()
