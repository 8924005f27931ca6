"""How often a step says how far it is."""

import math
import time
from collections.abc import Callable

from stagemesh.services.engines.base import Progress

INTERVAL_S = 0.5


class ProgressPace:
    """Tells all progress of an engine that knows how much there is, and of any other at most every `INTERVAL_S`.

    An engine that makes tokens has some for each of them: it would be as many messages again as there are outputs.
    """

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._told_s = -math.inf

    def is_due(self, progress: Progress) -> bool:
        """Whether this is to be told; what is left out then, the next one or the end makes up for."""
        now_s = self._clock()
        if progress.total_steps is None and now_s - self._told_s < INTERVAL_S:
            return False
        self._told_s = now_s
        return True
