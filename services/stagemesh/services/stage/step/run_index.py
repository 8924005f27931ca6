"""The index of a replica's running and recently ended runs."""

import asyncio
from collections import OrderedDict
from collections.abc import Iterable
from typing import TypeVar

from stagemesh.common.errors import CancelledRequestError, ExistsError, NotFoundError, StaleAttemptError
from stagemesh.services.stage.step.edges import StepEdges
from stagemesh.services.stage.step.run import StepRun
from stagemesh.services.stage.step.spec import Rebinding, StepSpec

KEPT_S = 30.0
"""The time for which a run is stored after it has ended, in seconds. Callers can attach to a stored run again."""
MAX_KEPT = 256
"""The maximum number of ended runs that are stored."""
MAX_KEPT_BYTES = 64 << 20
"""The maximum total size of the events of all ended runs that are stored, in bytes."""
MAX_ATTEMPTS = 4096
"""The maximum number of requests whose latest attempt number is recorded."""
_RELEASED = CancelledRequestError("the request has ended")

_StepT = TypeVar("_StepT", StepRun, StepEdges)


class RunIndex:
    """An index of runs by step id and by request. Records the latest attempt of each request."""

    def __init__(self) -> None:
        self._runs: dict[str, StepRun] = {}
        self._left: dict[str, StepEdges] = {}
        """The outgoing edges that ended runs have left open, by step id. Edges that can no longer be rebound are
        removed by `_drop_edges_over`."""
        self._running: dict[str, StepRun] = {}
        self._kept: OrderedDict[str, tuple[asyncio.TimerHandle, int]] = OrderedDict()
        """The timer that removes each ended run, and the run's size in bytes when it ended, by step id."""
        self._kept_bytes = 0
        self._attempts: OrderedDict[str, int] = OrderedDict()

    def running(self, request_id: str = "", *, up_to_attempt: int = 0) -> list[StepRun]:
        """Returns the runs of a request that have not ended and whose attempt number is at most `up_to_attempt`.

        An empty `request_id` means all requests. An `up_to_attempt` of 0 means all attempts.
        """
        return _of_request(self._running.values(), request_id, up_to_attempt)

    def rebind(self, rebinding: Rebinding) -> None:
        """Binds edges of a step to other replicas. The step is running, or has ended and left the edges open.

        Raises NotFoundError (UNKNOWN_STEP) if there is no such step, and the errors of `StepEdges.rebind`.
        """
        self._drop_edges_over()
        edges = self._edges_of(rebinding.step_id)
        if edges is None or edges.request_id != rebinding.request_id:
            raise NotFoundError(
                f"step {rebinding.step_id} of request {rebinding.request_id} does not run here and left no open edges",
                reason="UNKNOWN_STEP",
            )
        edges.rebind(rebinding)
        if (known := self._runs.get(rebinding.step_id)) is not None:
            known.note_rebound(edges.flow_attempts)

    def release_edges(self, request_id: str = "", *, up_to_attempt: int = 0) -> None:
        """Releases the edges that ended runs of a request have left open. Affects only runs whose attempt number is at
        most `up_to_attempt`.

        An empty `request_id` means all requests. An `up_to_attempt` of 0 means all attempts.
        """
        for edges in _of_request(self._left.values(), request_id, up_to_attempt):
            edges.abort(_RELEASED)
        self._drop_edges_over()

    def find(self, spec: StepSpec) -> StepRun | None:
        """Returns the running or stored run with the step id of `spec`, or None if there is none.

        Raises StaleAttemptError if a newer attempt of the request is recorded, ExistsError if a run with this step id
        was started with a different spec, and NotFoundError if there is no run and `spec` may only attach to one.
        """
        latest = self._attempts.get(spec.request_id, 0)
        if spec.attempt < latest:
            raise StaleAttemptError(
                f"attempt {spec.attempt} of request {spec.request_id} has been replaced by attempt {latest}",
                facts={"attempt": latest},
            )
        run = self._runs.get(spec.step_id)
        if run is not None and run.fingerprint != spec.fingerprint:
            raise ExistsError(
                f"step {spec.step_id} exists with other content; use another step_id, or repeat the original call",
                reason="STEP_EXISTS",
                facts={"attempt": latest},
            )
        if run is None and spec.attach_only:
            raise NotFoundError(
                f"step {spec.step_id} is not known here, and the call may not start it; start a new attempt",
                reason="UNKNOWN_STEP",
            )
        if (edges := self._edges_of(spec.step_id)) is not None:
            edges.reject_below(spec.lowest_attempt)
        return run

    def add(self, run: StepRun) -> None:
        """Adds a new run. Stops the runs of earlier attempts of the same request, and releases the edges that ended
        runs of this request have left open.
        """
        for known in self.running(run.request_id):
            if known.attempt < run.attempt:
                known.stop(StaleAttemptError(f"attempt {run.attempt} has taken over"))
        self.release_edges(run.request_id, up_to_attempt=run.attempt)
        self._attempts[run.request_id] = run.attempt
        self._attempts.move_to_end(run.request_id)
        if len(self._attempts) > MAX_ATTEMPTS:
            self._attempts.popitem(last=False)
        self._runs[run.step_id] = self._running[run.step_id] = run

    def retire(self, run: StepRun, left: StepEdges | None) -> None:
        """Stores an ended run for KEPT_S seconds. Removes the oldest stored runs if their number exceeds MAX_KEPT or
        their total size exceeds MAX_KEPT_BYTES.

        `left` contains the outgoing edges that the run has left open, or is None. These edges are stored until their
        consumers can no longer be replaced.
        """
        step_id = run.step_id
        del self._running[step_id]
        self._drop_edges_over()
        if left is not None:
            self._left[step_id] = left
        loop = asyncio.get_running_loop()
        size_bytes = run.kept_bytes
        self._kept[step_id] = loop.call_later(KEPT_S, self._forget, step_id), size_bytes
        self._kept_bytes += size_bytes
        while len(self._kept) > MAX_KEPT or self._kept_bytes > MAX_KEPT_BYTES:
            self._forget(next(iter(self._kept)))

    def close(self) -> None:
        """Removes all ended runs, and releases the edges that they have left open."""
        self.release_edges()
        for step_id in list(self._kept):
            self._forget(step_id)

    def _edges_of(self, step_id: str) -> StepEdges | None:
        run = self._running.get(step_id)
        return run.edges if run is not None else self._left.get(step_id)

    def _forget(self, step_id: str) -> None:
        timer, size_bytes = self._kept.pop(step_id)
        timer.cancel()
        self._kept_bytes -= size_bytes
        del self._runs[step_id]

    def _drop_edges_over(self) -> None:
        self._left = {step_id: edges for step_id, edges in self._left.items() if not edges.is_over}


def _of_request(steps: Iterable[_StepT], request_id: str, up_to_attempt: int) -> list[_StepT]:
    """Returns the steps of a request whose attempt number is at most `up_to_attempt`. An empty `request_id` means all
    requests, and an `up_to_attempt` of 0 means all attempts.
    """
    return [
        each
        for each in steps
        if request_id in ("", each.request_id) and (not up_to_attempt or each.attempt <= up_to_attempt)
    ]
