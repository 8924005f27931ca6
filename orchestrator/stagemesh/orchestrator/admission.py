"""The limit on requests that run at once, counted over the whole pipeline."""

import time
from collections.abc import Callable

from stagemesh.connectors.errors import OverloadedError

_SMOOTHING = 0.2
_FIRST_GUESS_S = 1.0
_LEAST_RETRY_S = 0.1


class Admission:
    """Admits requests up to a limit, before any stage holds anything of them."""

    def __init__(self, max_in_flight: int, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.max_in_flight = max_in_flight
        self._clock = clock
        self._in_flight = 0
        self._duration_s = _FIRST_GUESS_S

    @property
    def in_flight(self) -> int:
        """Requests that run now."""
        return self._in_flight

    def admit(self) -> Callable[[], None]:
        """Takes a place and returns what gives it back, once; raises OverloadedError (ADMISSION_LIMIT)."""
        if self._in_flight >= self.max_in_flight:
            raise OverloadedError(
                f"{self._in_flight} requests run already, as many as the pipeline's limits.max_in_flight allows; "
                "try again when one has ended",
                reason="ADMISSION_LIMIT",
                metadata={"max_in_flight": str(self.max_in_flight)},
                retry_after_s=self._next_end_s(),
            )
        self._in_flight += 1
        admitted_at = self._clock()

        def give_back() -> None:
            self._in_flight -= 1
            self._duration_s += _SMOOTHING * (self._clock() - admitted_at - self._duration_s)

        return give_back

    def _next_end_s(self) -> float:
        # Requests that are spread evenly over their lives end one after another at this interval.
        return max(_LEAST_RETRY_S, self._duration_s / self._in_flight)
