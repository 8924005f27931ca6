"""The run-ahead limit of one request, in token positions. Importing this module imports nothing of vLLM."""

from collections.abc import Callable

import msgspec

UNLIMITED = 1 << 40
MAX_TOKENS_AHEAD = 256
"""vLLM computes at most this number of tokens ahead of a consumer that is slow to take a request's rows."""


class StartLimit(msgspec.Struct, frozen=True):
    """The limit with which a request enters vLLM."""

    name: str
    position: int
    """vLLM may compute the positions before this one."""


class RequestLimit:
    """One request's limit. It only grows."""

    def __init__(self) -> None:
        self._arrived = self._ahead = UNLIMITED
        self.on_change: Callable[[], None] | None = None

    @property
    def position(self) -> int:
        """VLLM may compute the positions before this one: their inputs arrived, and the consumer keeps up."""
        return min(self._arrived, self._ahead)

    def set_arrived(self, position: int) -> None:
        """Records that the inputs of all positions before `position` have arrived."""
        self._move(position, self._ahead)

    def set_taken(self, position: int) -> None:
        """Records that the consumer has taken the outputs of all positions before `position`."""
        ahead = position + MAX_TOKENS_AHEAD
        # Not for every token: each change is a message to the engine core.
        if self._ahead == UNLIMITED or ahead - self._ahead >= MAX_TOKENS_AHEAD // 2:
            self._move(self._arrived, ahead)

    def _move(self, arrived: int, ahead: int) -> None:
        before = self.position
        self._arrived, self._ahead = arrived, ahead
        if self.position != before and self.on_change is not None:
            self.on_change()
