"""The runs that a replica knows: those under way, and those that ended a moment ago."""

import asyncio
from collections import OrderedDict
from collections.abc import Iterator
from functools import partial

from stagemesh.common.errors import CancelledRequestError, ExistsError, NotFoundError, StaleAttemptError
from stagemesh.services.stage.step.edges import StepEdges
from stagemesh.services.stage.step.run import StepRun
from stagemesh.services.stage.step.spec import Rebinding, StepSpec

KEPT_S = 30.0
MAX_KEPT = 256
MAX_KEPT_BYTES = 64 << 20
"""Ended runs stay for callers that attach again, within these limits."""
MAX_ATTEMPTS = 4096
"""Requests whose latest attempt is remembered."""
_RELEASED = CancelledRequestError("the request is over")


class RunRegistry:
    """Finds runs by step_id and by request, and knows each request's latest attempt."""

    def __init__(self) -> None:
        self._runs: dict[str, StepRun] = {}
        self._left: dict[str, StepEdges] = {}
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

    def of_step(self, rebinding: Rebinding) -> "StepRun | StepEdges":
        """Whose edges are to be bound anew: a run's, or those that it has left; raises NotFoundError."""
        found = self._running.get(rebinding.step_id) or self._left.get(rebinding.step_id)
        if found is None or found.request_id != rebinding.request_id:
            raise NotFoundError(
                f"step {rebinding.step_id} of request {rebinding.request_id} does not run here, and has left nothing",
                reason="UNKNOWN_STEP",
            )
        return found

    def leave(self, edges: StepEdges) -> None:
        """Keeps what a run that ended well has left until it is over."""
        self._left[edges.step_id] = edges
        edges.on_over = partial(self._forget_left, edges)

    def release(self, request_id: str, *, up_to_attempt: int = 0) -> None:
        """Lets go of what runs of a request's attempts up to one have left; 0 is all."""
        for edges in list(self._left.values()):
            if edges.request_id == request_id and (not up_to_attempt or edges.attempt <= up_to_attempt):
                edges.release(_RELEASED)

    def find(self, order: StepSpec) -> StepRun | None:
        """The run that `order` attaches to; raises StaleAttemptError, and ExistsError for other content."""
        latest = self._attempts.get(order.request_id, 0)
        if order.attempt < latest:
            raise StaleAttemptError(
                f"attempt {order.attempt} of request {order.request_id} is over: attempt {latest} has taken its place",
                metadata={"attempt": str(latest)},
            )
        run = self._runs.get(order.step_id)
        if run is not None and run.order.fingerprint != order.fingerprint:
            raise ExistsError(
                f"step {order.step_id} exists with other content; use another step_id, or repeat the call as it was",
                reason="STEP_EXISTS",
                metadata={"attempt": str(latest)},
            )
        return run

    def add(self, run: StepRun) -> None:
        """Enters a new run, and stops those of earlier attempts."""
        order = run.order
        former_runs = [run for run in self.of_request(order.request_id) if run.order.attempt < order.attempt]
        for former in former_runs:
            former.stop(CancelledRequestError(f"attempt {order.attempt} has taken over", reason="STALE_ATTEMPT"))
        self.release(order.request_id, up_to_attempt=order.attempt)
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
        for edges in list(self._left.values()):
            edges.release(_RELEASED)
        for step_id in list(self._kept):
            self._forget(step_id)

    def _forget(self, step_id: str) -> None:
        self._kept.pop(step_id).cancel()
        self._kept_bytes -= self._runs.pop(step_id).kept_bytes

    def _forget_left(self, edges: StepEdges) -> None:
        if self._left.get(edges.step_id) is edges:
            del self._left[edges.step_id]
        # What is told holds them: a circle.
        edges.on_over = _nothing


def _nothing() -> None:
    """Nobody wants to know."""
