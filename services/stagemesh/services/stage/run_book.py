"""The runs that a replica knows: those under way, and those that ended a moment ago."""

import asyncio
from collections import OrderedDict
from collections.abc import Iterator

from stagemesh.connectors.errors import CancelledRequestError, ExistsError, StaleAttemptError
from stagemesh.services.stage.order import StepOrder
from stagemesh.services.stage.step_run import StepRun

KEPT_S = 30.0
MAX_KEPT = 256
MAX_KEPT_BYTES = 64 << 20
"""Ended runs stay for callers that attach again, within these limits."""
MAX_ATTEMPTS = 4096
"""Requests whose latest attempt is remembered."""


class RunBook:
    """Finds runs by step_id and by request, and knows each request's latest attempt."""

    def __init__(self) -> None:
        self._runs: dict[str, StepRun] = {}
        self._running: dict[str, StepRun] = {}
        self._kept: OrderedDict[str, asyncio.TimerHandle] = OrderedDict()
        self._kept_bytes = 0
        self._attempts: OrderedDict[str, int] = OrderedDict()

    def running(self) -> list[StepRun]:
        """The runs under way."""
        return list(self._running.values())

    def of_request(self, request_id: str, *, up_to_attempt: int = 0) -> Iterator[StepRun]:
        """The runs under way of a request's attempts up to one; 0 is all."""
        for run in self.running():
            order = run.order
            if order.request_id == request_id and (not up_to_attempt or order.attempt <= up_to_attempt):
                yield run

    def find(self, order: StepOrder) -> StepRun | None:
        """The run that `order` attaches to; raises StaleAttemptError, and ExistsError for other content."""
        latest = self._attempts.get(order.request_id, 0)
        if order.attempt < latest:
            raise StaleAttemptError(
                f"attempt {order.attempt} of request {order.request_id} is over: attempt {latest} has taken its place"
            )
        run = self._runs.get(order.step_id)
        if run is not None and run.order.fingerprint != order.fingerprint:
            raise ExistsError(
                f"step {order.step_id} exists with other content; use another step_id, or repeat the call as it was",
                reason="STEP_EXISTS",
            )
        return run

    def add(self, run: StepRun) -> None:
        """Enters a new run, and stops those of earlier attempts."""
        order = run.order
        former_runs = [run for run in self.of_request(order.request_id) if run.order.attempt < order.attempt]
        for former in former_runs:
            former.stop(CancelledRequestError(f"attempt {order.attempt} has taken over", reason="STALE_ATTEMPT"))
        self._attempts[order.request_id] = order.attempt
        self._attempts.move_to_end(order.request_id)
        if len(self._attempts) > MAX_ATTEMPTS:
            self._attempts.popitem(last=False)
        self._runs[order.step_id] = self._running[order.step_id] = run

    def retire(self, run: StepRun) -> None:
        """Keeps an ended run for a while."""
        del self._running[run.order.step_id]
        loop = asyncio.get_running_loop()
        self._kept[run.order.step_id] = loop.call_later(KEPT_S, self._forget, run.order.step_id)
        self._kept_bytes += run.kept_bytes
        while len(self._kept) > MAX_KEPT or self._kept_bytes > MAX_KEPT_BYTES:
            self._forget(next(iter(self._kept)))

    def close(self) -> None:
        """Forgets the ended runs."""
        for step_id in list(self._kept):
            self._forget(step_id)

    def _forget(self, step_id: str) -> None:
        self._kept.pop(step_id).cancel()
        self._kept_bytes -= self._runs.pop(step_id).kept_bytes
