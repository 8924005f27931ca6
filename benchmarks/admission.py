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
from stagemesh.orchestrator.admission.admission import Admission
from stagemesh.orchestrator.admission.queue import AdmissionEntry, AdmissionRequest
from stagemesh.pipeline import Limits

_MAX_IN_FLIGHT = 64
_REQUESTS = 5_000


@dataclass
class _Load:
    """A full admission with `waiting` requests in its queue, of 100 callers, 3 priorities and random deadlines."""

    waiting: int
    running: deque["_Request"] = field(default_factory=deque["_Request"])

    def __post_init__(self) -> None:
        self._random = random.Random(1)
        limits = Limits(
            max_in_flight=_MAX_IN_FLIGHT,
            max_in_flight_bytes=1 << 40,
            max_queued=self.waiting + 1,
            max_queued_bytes=1 << 50,
        )
        self._admission = Admission(limits)
        for _ in range(_MAX_IN_FLIGHT + self.waiting):
            self.add()

    def add(self) -> None:
        """Enters a request."""
        generator = self._random
        request = AdmissionRequest(
            str(generator.random()),
            caller=str(generator.randrange(100)),
            priority=generator.randrange(3),
            deadline_s=time.monotonic() + 1e6 * (1 + generator.random()),
        )
        waiter = _Request(self.running)
        waiter.entry = self._admission.enter(request, waiter)

    def end(self) -> None:
        """Ends the oldest running request, so that the next one is admitted."""
        entry = self.running.popleft().entry
        assert entry is not None
        self._admission.release(entry, made_bytes=1_000)


@dataclass(eq=False)
class _Request:
    running: deque["_Request"]
    entry: AdmissionEntry | None = None

    def queued(self, *, position: int, expected_wait_s: float) -> None:
        """Does nothing."""

    def admitted(self) -> None:
        """Adds the request to the running requests."""
        self.running.append(self)

    def refused(self, error: StagemeshError) -> None:
        """Fails the benchmark: the queue has space for all requests."""
        raise error


def _measure(waiting: int) -> Figure:
    load = _Load(waiting)
    began_s = time.thread_time()
    for _ in range(_REQUESTS):
        load.add()
        load.end()
    took_us = (time.thread_time() - began_s) / _REQUESTS * 1e6
    return Figure(f"with {waiting:,} waiting", took_us, "us per request")


def main() -> None:
    """Reads the command line, measures and reports."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="Write the figures to this file in addition to the report.")
    arguments = parser.parse_args()
    report("admission", [_measure(waiting) for waiting in (0, 100, 1_000, 10_000, 100_000)], json_file=arguments.json)


if __name__ == "__main__":
    main()
