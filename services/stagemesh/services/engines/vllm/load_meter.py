"""Measures the load of the vllm engine."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from stagemesh.services.engines.base import EngineLoad

_MIN_SAMPLE_S, _MAX_SAMPLE_S = 0.1, 1.0
"""The shortest time over which tokens are counted, and the longest time that a measurement may contain."""
_SMOOTHING = 0.5


@dataclass(frozen=True)
class _Held:
    """A request that has not ended. `sampled` grows with the request."""

    sampled: Sequence[int]
    first_tokens: int
    """The number of tokens in `sampled` when the request began."""
    max_tokens: int

    @property
    def new_tokens(self) -> int:
        """The number of tokens that were sampled since the request began."""
        return len(self.sampled) - self.first_tokens

    @property
    def tokens_left(self) -> int:
        """The number of tokens that may still be sampled."""
        return max(0, self.max_tokens - self.new_tokens)


class LoadMeter:
    """Measures the load of an engine: the numbers of running and queued requests, and the estimated remaining work.

    The estimate is based on the number of tokens that the requests may still sample and on the time per token, which is
    measured between calls of `load`, so that the meter does nothing for each token.
    """

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._held: dict[str, _Held] = {}
        self._ended_tokens = 0
        """The number of tokens that ended requests have sampled."""
        self._token_s = 0.0
        self._since_s, self._since_tokens = clock(), 0
        """When the present measurement began, and the number of tokens that all requests had sampled then."""

    def begin(self, name: str, sampled: Sequence[int], max_tokens: int) -> None:
        """Adds the request `name`, which may add at most `max_tokens` tokens to `sampled`."""
        if not self._held:
            # The time without requests is not part of a measurement.
            self._since_s, self._since_tokens = self._clock(), self._ended_tokens
        self._held[name] = _Held(sampled, len(sampled), max_tokens)

    def end(self, name: str) -> None:
        """Removes the request `name`, which has finished or was aborted."""
        self._ended_tokens += self._held.pop(name).new_tokens

    def load(self, *, max_running: int) -> EngineLoad:
        """Returns the load. `max_running` is the number of requests that the engine can run at the same time."""
        held = len(self._held)
        running = min(held, max_running)
        self._measure(running)
        rounds = sum(each.tokens_left for each in self._held.values()) / max(1, running)
        return EngineLoad(running, held - running, work_s=rounds * self._token_s)

    def _measure(self, running: int) -> None:
        """Measures the time in which each of the running requests sampled a token."""
        now_s = self._clock()
        passed_s = now_s - self._since_s
        tokens = self._ended_tokens + sum(each.new_tokens for each in self._held.values())
        if passed_s < _MIN_SAMPLE_S:
            return
        if new_tokens := tokens - self._since_tokens:
            sample_s = min(passed_s, _MAX_SAMPLE_S) * max(1, running) / new_tokens
            self._token_s += (sample_s - self._token_s) * (_SMOOTHING if self._token_s else 1.0)
        self._since_s, self._since_tokens = now_s, tokens
