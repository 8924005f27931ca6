"""Whether a rolling update may count a replica as ready.

A rolling update ends a former replica as soon as a new one is ready. The former ones must not end before the new
generation can serve requests, which orchestrators alone know: it needs a ready replica of every stage.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Generator
from contextlib import contextmanager

from stagemesh.v1.stage_pb2 import ROLLOUT_VERDICT_RELEASED, ROLLOUT_VERDICT_WITHHELD, RolloutVerdict

_LATCH_S = 10.0


class RolloutRelease:
    """The verdicts of the orchestrators that watch this replica.

    The replica is ready for the rollout while it is available, at least one orchestrator releases it, and no
    orchestrator withholds it. A verdict ends with the connection to its orchestrator. After the replica has been ready
    for _LATCH_S seconds without interruption, verdicts no longer matter, because they are for new replicas.
    """

    def __init__(self) -> None:
        self.on_change: Callable[[], None] = lambda: None
        """Called after `is_ready` may have changed."""
        self._is_available = self._is_latched = False
        self._verdicts = Counter["RolloutVerdict.ValueType"]()
        """The number of orchestrators that watch the replica, by their verdict."""
        self._latching: asyncio.TimerHandle | None = None

    @property
    def is_ready(self) -> bool:
        """Whether the replica is ready for the rollout."""
        is_released = self._verdicts[ROLLOUT_VERDICT_RELEASED] > 0 and not self._verdicts[ROLLOUT_VERDICT_WITHHELD]
        return self._is_available and (self._is_latched or is_released)

    @property
    def is_watched(self) -> bool:
        """Whether an orchestrator watches the replica, and may have planned steps on it."""
        return self._verdicts.total() > 0

    def set_available(self, available: bool) -> None:
        """Sets whether the replica could serve requests if it were released."""
        self._is_available = available
        self._update()

    @contextmanager
    def verdict(self, verdict: "RolloutVerdict.ValueType") -> Generator[None]:
        """Counts the verdict of one orchestrator within the block."""
        self._verdicts[verdict] += 1
        self._update()
        try:
            yield
        finally:
            self._verdicts[verdict] -= 1
            self._update()

    def close(self) -> None:
        """Stops the timer. Idempotent."""
        if self._latching is not None:
            self._latching.cancel()
            self._latching = None

    def _update(self) -> None:
        if not self.is_ready:
            self.close()
        elif self._latching is None and not self._is_latched:
            self._latching = asyncio.get_running_loop().call_later(_LATCH_S, self._latch)
        self.on_change()

    def _latch(self) -> None:
        self._is_latched = True
