"""When a process that has ended is started again."""

from dataclasses import dataclass


@dataclass(frozen=True)
class RestartPolicy:
    """The pause doubles with each failure and is back at its first length after `healthy_s` of readiness.

    A process that was never ready is given up after `quick_failures`, or after about half as many that took `slow_s` or
    more each: what fails slowly, such as loading a model, does not get better by patience.
    """

    first_pause_s: float = 0.1
    max_pause_s: float = 5.0
    healthy_s: float = 10.0
    quick_failures: int = 5
    slow_s: float = 10.0


class Backoff:
    """One process's failures. Times are monotonic seconds, given by the caller."""

    def __init__(self, policy: RestartPolicy) -> None:
        self._policy = policy
        self._pause_s = policy.first_pause_s
        self._cost = 0.0
        self._started_s = 0.0
        self._ready_s: float | None = None
        self._ever_ready = False

    def started(self, now_s: float) -> None:
        """The process was started."""
        self._started_s = now_s
        self._ready_s = None

    def ready(self, now_s: float) -> None:
        """The process is ready; said again, it changes nothing."""
        self._ever_ready = True
        self._ready_s = now_s if self._ready_s is None else self._ready_s

    def ended(self, now_s: float) -> float | None:
        """The process has ended: the pause before the next start, or None to give up."""
        policy = self._policy
        if self._ready_s is not None and now_s - self._ready_s >= policy.healthy_s:
            self._pause_s = policy.first_pause_s
        self._cost += 1 if now_s - self._started_s < policy.slow_s else 2
        if not self._ever_ready and self._cost >= policy.quick_failures:
            return None
        pause_s, self._pause_s = self._pause_s, min(self._pause_s * 2, policy.max_pause_s)
        return pause_s
