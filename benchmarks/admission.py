"""Measures admission: the time of all decisions about one request, with queues of growing length.

python -m benchmarks.admission [--json FILE]
"""

import argparse
import random
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.report import Figure, report
from stagemesh.common.errors import StagemeshError
from stagemesh.orchestrator.admission import Admission, AdmissionRequest, Ticket
from stagemesh.orchestrator.spec import Limits

_MAX_IN_FLIGHT = 64
_REQUESTS = 5_000


@dataclass
class _Crowd:
    """An admission queue of a given length, with many callers, three priorities and different deadlines."""

    waiting: int
    running: deque["_Waiter"] = field(default_factory=deque["_Waiter"])

    def __post_init__(self) -> None:
        self._random = random.Random(1)
        limits = Limits(
            _MAX_IN_FLIGHT, max_in_flight_bytes=1 << 40, max_queued=self.waiting + 1, max_queued_bytes=1 << 50
        )
        self._admission = Admission(limits)
        for _ in range(_MAX_IN_FLIGHT + self.waiting):
            self.ask()

    def ask(self) -> None:
        """Adds a request."""
        draw = self._random
        claim = AdmissionRequest(
            str(draw.random()),
            caller=str(draw.randrange(100)),
            priority=draw.randrange(3),
            deadline_s=time.monotonic() + 1e6 * (1 + draw.random()),
        )
        waiter = _Waiter(self.running)
        waiter.ticket = self._admission.enter(claim, waiter)

    def end(self) -> None:
        """Ends a running request, so that the next one is admitted."""
        ticket = self.running.popleft().ticket
        assert ticket is not None
        self._admission.release(ticket, made_bytes=1_000)


@dataclass(eq=False)
class _Waiter:
    running: deque["_Waiter"]
    ticket: Ticket | None = None

    def queued(self, *, position: int, expected_wait_s: float) -> None:
        """Called when the request waits."""

    def admitted(self) -> None:
        """Called when the request is admitted."""
        self.running.append(self)

    def refused(self, error: StagemeshError) -> None:
        """Never called: the queue has space."""
        raise error


def _measure(waiting: int) -> Figure:
    crowd = _Crowd(waiting)
    began_s = time.thread_time()
    for _ in range(_REQUESTS):
        crowd.ask()
        crowd.end()
    took_us = (time.thread_time() - began_s) / _REQUESTS * 1e6
    return Figure(f"beside {waiting:,} who wait", took_us, "us a request")


def main() -> None:
    """Reads the command line, measures and reports."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="write the figures here too")
    arguments = parser.parse_args()
    report("admission", [_measure(waiting) for waiting in (0, 100, 1_000, 10_000, 100_000)], json_file=arguments.json)


if __name__ == "__main__":
    main()
