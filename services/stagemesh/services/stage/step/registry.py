"""The registry of a replica's running and recently ended runs."""

import asyncio
from collections import OrderedDict
from collections.abc import Iterable
from typing import TypeVar

from stagemesh.common.errors import CancelledRequestError, ExistsError, NotFoundError, StaleAttemptError
from stagemesh.services.stage.step.edges import StepEdges
from stagemesh.services.stage.step.run import StepRun
from stagemesh.services.stage.step.spec import Rebinding, StepSpec

KEPT_S = 30.0
"""The time for which an ended run is stored, in seconds."""
MAX_KEPT = 256
"""The maximum number of ended runs that are stored."""
MAX_KEPT_BYTES = 64 << 20
"""The maximum total size of the ended runs that are stored, in bytes. Callers can attach to a stored run again."""
MAX_ATTEMPTS = 4096
"""The maximum number of requests whose latest attempt is recorded."""
_RELEASED = CancelledRequestError("the request has ended")

_StepT = TypeVar("_StepT", StepRun, StepEdges)


class RunRegistry:
    """An index of runs by step id and by request. Records the latest attempt of each request."""

    def __init__(self) -> None:
        self._runs: dict[str, StepRun] = {}
        self._left: dict[str, StepEdges] = {}
        """The edges that ended runs have left open. Edges that are over are removed when another run ends."""
        self._running: dict[str, StepRun] = {}
        self._kept: OrderedDict[str, asyncio.TimerHandle] = OrderedDict()
        self._kept_bytes = 0
        self._attempts: OrderedDict[str, int] = OrderedDict()

    def running(self, request_id: str = "", *, up_to_attempt: int = 0) -> list[StepRun]:
        """Returns the runs of a request that have not ended and whose attempt is at most `up_to_attempt`.

        An empty `request_id` means all requests. An attempt of 0 means all attempts.
        """
        return _of_request(self._running.values(), request_id, up_to_attempt)

    def rebind(self, rebinding: Rebinding) -> None:
        """Binds edges of a running step, or edges that an ended step has left open, to other replicas.

        Raises NotFoundError (UNKNOWN_STEP) if neither exists, and the errors of `StepEdges.rebind`.
        """
        self._drop_edges_over()
        run = self._running.get(rebinding.step_id)
        edges = run.edges if run is not None else self._left.get(rebinding.step_id)
        if edges is None or edges.request_id != rebinding.request_id:
            raise NotFoundError(
                f"step {rebinding.step_id} of request {rebinding.request_id} does not run here and left no open edges",
                reason="UNKNOWN_STEP",
            )
        edges.rebind(rebinding)

    def release_edges(self, request_id: str = "", *, up_to_attempt: int = 0) -> None:
        """Releases the edges that ended runs of a request have left open. Their attempt is at most `up_to_attempt`.

        An empty `request_id` means all requests. An attempt of 0 means all attempts.
        """
        for edges in _of_request(self._left.values(), request_id, up_to_attempt):
            edges.abort(_RELEASED)
        self._drop_edges_over()

    def find(self, spec: StepSpec) -> StepRun | None:
        """Returns the run with the step id of `spec`, or None if there is none.

        Raises StaleAttemptError if a newer attempt is known, and ExistsError if the step exists with other content.
        """
        latest = self._attempts.get(spec.request_id, 0)
        if spec.attempt < latest:
            raise StaleAttemptError(
                f"attempt {spec.attempt} of request {spec.request_id} has been replaced by attempt {latest}",
                metadata={"attempt": str(latest)},
            )
        run = self._runs.get(spec.step_id)
        if run is not None and run.fingerprint != spec.fingerprint:
            raise ExistsError(
                f"step {spec.step_id} exists with other content; use another step_id, or repeat the original call",
                reason="STEP_EXISTS",
                metadata={"attempt": str(latest)},
            )
        return run

    def add(self, run: StepRun) -> None:
        """Adds a new run, and stops runs of earlier attempts of the same request."""
        for known in self.running(run.request_id):
            if known.attempt < run.attempt:
                known.stop(CancelledRequestError(f"attempt {run.attempt} has taken over", reason="STALE_ATTEMPT"))
        self.release_edges(run.request_id, up_to_attempt=run.attempt)
        self._attempts[run.request_id] = run.attempt
        self._attempts.move_to_end(run.request_id)
        if len(self._attempts) > MAX_ATTEMPTS:
            self._attempts.popitem(last=False)
        self._runs[run.step_id] = self._running[run.step_id] = run

    def retire(self, run: StepRun, left: StepEdges | None) -> None:
        """Stores an ended run for KEPT_S seconds, or until newer runs exceed the limits.

        Stores `left`, the outgoing edges of a successful run, until their consumers no longer need them.
        """
        step_id = run.step_id
        del self._running[step_id]
        self._drop_edges_over()
        if left is not None:
            self._left[step_id] = left
        loop = asyncio.get_running_loop()
        self._kept[step_id] = loop.call_later(KEPT_S, self._forget, step_id)
        self._kept_bytes += run.kept_bytes
        while len(self._kept) > MAX_KEPT or self._kept_bytes > MAX_KEPT_BYTES:
            self._forget(next(iter(self._kept)))

    def close(self) -> None:
        """Removes the ended runs, and releases the edges that they have left open."""
        self.release_edges()
        for step_id in list(self._kept):
            self._forget(step_id)

    def _forget(self, step_id: str) -> None:
        self._kept.pop(step_id).cancel()
        self._kept_bytes -= self._runs.pop(step_id).kept_bytes

    def _drop_edges_over(self) -> None:
        self._left = {step_id: edges for step_id, edges in self._left.items() if not edges.is_over}


def _of_request(steps: Iterable[_StepT], request_id: str, up_to_attempt: int) -> list[_StepT]:
    """Returns the steps that match both arguments. An empty request id and an attempt of 0 match all steps."""
    return [
        each
        for each in steps
        if request_id in ("", each.request_id) and (not up_to_attempt or each.attempt <= up_to_attempt)
    ]
