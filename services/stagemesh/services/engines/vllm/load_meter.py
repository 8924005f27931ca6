"""How much an engine has to do, by its requests' tokens and the pace at which they come."""

import time

from stagemesh.services.engines.base import EngineLoad

_SMOOTHING = 0.1


class LoadMeter:
    """Counts the tokens that requests may still sample, and the mean time between a request's tokens."""

    def __init__(self) -> None:
        self._tokens_left: dict[str, int] = {}
        self._token_s = 0.0
        self._tokens_at_s = time.monotonic()

    def begin(self, name: str, max_tokens: int) -> None:
        """A request that is held from now on."""
        self._tokens_left[name] = max_tokens

    def count(self, name: str, new: int) -> None:
        """Tokens that a request has sampled."""
        if not new:
            return
        now_s = time.monotonic()
        sample_s = min(1.0, now_s - self._tokens_at_s) * len(self._tokens_left)
        self._token_s += _SMOOTHING * (sample_s - self._token_s)
        self._tokens_at_s = now_s
        self._tokens_left[name] = max(0, self._tokens_left[name] - new)

    def end(self, name: str) -> None:
        """The request is over."""
        del self._tokens_left[name]

    def load(self, *, max_running: int) -> EngineLoad:
        """Where so many requests run at once."""
        held = len(self._tokens_left)
        running = min(held, max_running)
        rounds = sum(self._tokens_left.values()) / max(1, running)
        return EngineLoad(running, held - running, work_s=rounds * self._token_s)
