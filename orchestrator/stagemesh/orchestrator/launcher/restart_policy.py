"""Decides whether and when a process that has ended is restarted."""

from dataclasses import dataclass

from stagemesh.common.backoff import Backoff


@dataclass(frozen=True)
class RestartPolicy:
    """Limits the restarts of a process.

    The pause before the first restart is `first_pause_s` seconds. It doubles with each failure, up to `max_pause_s`. It
    is reset after the process has been ready for `healthy_s` seconds. A process that has never been ready is abandoned
    after `quick_failures` failures. A failure that occurs `slow_s` seconds or more after the start counts twice,
    because slow failures, such as a model that cannot be loaded, rarely disappear after a restart.
    """

    first_pause_s: float = 0.1
    max_pause_s: float = 5.0
    healthy_s: float = 10.0
    quick_failures: int = 5
    slow_s: float = 10.0


class RestartSchedule:
    """Applies a RestartPolicy to one process. All times are in seconds on a monotonic clock of the caller."""

    def __init__(self, policy: RestartPolicy) -> None:
        self._policy = policy
        self._backoff = Backoff(first_s=policy.first_pause_s, longest_s=policy.max_pause_s)
        self._cost = 0
        self._started_s = 0.0
        self._ready_s: float | None = None
        self._ever_ready = False

    def started(self, now_s: float) -> None:
        """Must be called when the process is started."""
        self._started_s = now_s
        self._ready_s = None

    def ready(self, now_s: float) -> None:
        """Must be called when the process becomes ready. Ignores further calls until the next start."""
        self._ever_ready = True
        self._ready_s = now_s if self._ready_s is None else self._ready_s

    def ended(self, now_s: float) -> float | None:
        """Must be called when the process has ended.

        Returns the pause in seconds before the process must be started again, or None if the process must be abandoned.
        """
        policy = self._policy
        if self._ready_s is not None and now_s - self._ready_s >= policy.healthy_s:
            self._backoff.reset()
        self._cost += 1 if now_s - self._started_s < policy.slow_s else 2
        if not self._ever_ready and self._cost >= policy.quick_failures:
            return None
        return self._backoff.next_s()
