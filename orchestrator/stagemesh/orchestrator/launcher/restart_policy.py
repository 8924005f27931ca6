"""Decides when a process that has ended is restarted, and when it is abandoned."""

from dataclasses import dataclass

from stagemesh.common.backoff import Backoff


@dataclass(frozen=True)
class RestartPolicy:
    """Limits the restarts of a process.

    The pause before a restart is `first_pause_s` at first. It doubles with each failure up to `max_pause_s`, and is
    reset after the process has been ready for `healthy_s` seconds. A process that was never ready is abandoned after
    `quick_failures` failures. A failure that took `slow_s` seconds or more counts twice, because slow failures, such as
    a model that cannot be loaded, rarely disappear after a restart.
    """

    first_pause_s: float = 0.1
    max_pause_s: float = 5.0
    healthy_s: float = 10.0
    quick_failures: int = 5
    slow_s: float = 10.0


class RestartSchedule:
    """Counts the failures of one process. The caller passes in times, in seconds on a monotonic clock."""

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
        """Records that the process is ready. Further calls before the next start have no effect."""
        self._ever_ready = True
        self._ready_s = now_s if self._ready_s is None else self._ready_s

    def ended(self, now_s: float) -> float | None:
        """Records that the process has ended.

        Returns the pause in seconds before the next start, or None if the process must be abandoned.
        """
        policy = self._policy
        if self._ready_s is not None and now_s - self._ready_s >= policy.healthy_s:
            self._backoff.reset()
        self._cost += 1 if now_s - self._started_s < policy.slow_s else 2
        if not self._ever_ready and self._cost >= policy.quick_failures:
            return None
        return self._backoff.next_s()
