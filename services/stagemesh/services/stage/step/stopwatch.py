"""The times of one step."""

import time

from stagemesh.services.stage.step.events import Timings


class Stopwatch:
    """Counts from when it is made, by the monotonic clock."""

    def __init__(self) -> None:
        self._accepted_s = time.monotonic()
        self._started_s: float | None = None
        self._first_output_s: float | None = None

    @property
    def age_s(self) -> float:
        """Seconds since it was made."""
        return self._elapsed_s()

    @property
    def started(self) -> bool:
        """Whether the engine has something to work on."""
        return self._started_s is not None

    def start(self) -> None:
        """The engine has something to work on; only the first call counts."""
        if self._started_s is None:
            self._started_s = self._elapsed_s()

    def first_output(self) -> None:
        """Something was emitted; only the first call counts."""
        if self._first_output_s is None:
            self._first_output_s = self._elapsed_s()

    def timings(self) -> Timings:
        """The times, with now as the end."""
        now_s = self._elapsed_s()
        started_s = now_s if self._started_s is None else self._started_s
        return Timings(started_s, self._first_output_s, now_s)

    def _elapsed_s(self) -> float:
        return time.monotonic() - self._accepted_s
