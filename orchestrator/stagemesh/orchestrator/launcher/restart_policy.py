"""Decides when a process that has ended is restarted, and when to stop trying."""

from dataclasses import dataclass

from stagemesh.common.backoff import Backoff


@dataclass(frozen=True)
class RestartPolicy:
    """The pause before a restart doubles with each failure and is reset after `healthy_s` of readiness.

    A process that was never ready is abandoned after `quick_failures` failures. A failure that took `slow_s` or more
    counts twice: a slow failure, such as a model that cannot be loaded, does not go away with patience.
    """

    first_pause_s: float = 0.1
    max_pause_s: float = 5.0
    healthy_s: float = 10.0
    quick_failures: int = 5
    slow_s: float = 10.0


class RestartSchedule:
    """Counts the failures of one process. Times are monotonic seconds, passed in by the caller."""

    def __init__(self, policy: RestartPolicy) -> None:
        self._policy = policy
        self._backoff = Backoff(first_s=policy.first_pause_s, longest_s=policy.max_pause_s)
        self._cost = 0
        self._started_s = 0.0
        self._ready_s: float | None = None
        self._ever_ready = False

    def started(self, now_s: float) -> None:
        """Records that the process was started."""
        self._started_s = now_s
        self._ready_s = None

    def ready(self, now_s: float) -> None:
        """Records that the process is ready. Further calls before the next start change nothing."""
        self._ever_ready = True
        self._ready_s = now_s if self._ready_s is None else self._ready_s

    def ended(self, now_s: float) -> float | None:
        """Records that the process has ended. Returns the pause before the next start, or None to abandon it."""
        policy = self._policy
        if self._ready_s is not None and now_s - self._ready_s >= policy.healthy_s:
            self._backoff.reset()
        self._cost += 1 if now_s - self._started_s < policy.slow_s else 2
        if not self._ever_ready and self._cost >= policy.quick_failures:
            return None
        return self._backoff.next_s()
