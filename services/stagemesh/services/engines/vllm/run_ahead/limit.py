"""The run-ahead limit of one request, in token positions. This module does not import vLLM."""

from collections.abc import Callable

import msgspec

UNLIMITED = 1 << 40
MAX_TOKENS_AHEAD = 256
"""The maximum number of tokens that vLLM computes ahead of a consumer that has not received a request's rows."""


class StartLimit(msgspec.Struct, frozen=True):
    """A request's argument for vLLM's processes: the limit with which the request starts."""

    name: str
    position: int
    """The position before which vLLM may compute."""


class RequestLimit:
    """One request's limit. It never decreases."""

    def __init__(self) -> None:
        self._arrived = self._ahead = UNLIMITED
        self.on_change: Callable[[], None] | None = None

    @property
    def position(self) -> int:
        """The position before which vLLM may compute: inputs have arrived, and outputs are not too far ahead."""
        return min(self._arrived, self._ahead)

    def set_arrived(self, position: int) -> None:
        """Records that the inputs of all positions before `position` have arrived."""
        self._move(position, self._ahead)

    def set_taken(self, position: int) -> None:
        """Records that the consumer has received the outputs of all positions before `position`."""
        ahead = position + MAX_TOKENS_AHEAD
        # Not updated for every token, because each change is a message to the engine core.
        if self._ahead == UNLIMITED or ahead - self._ahead >= MAX_TOKENS_AHEAD // 2:
            self._move(self._arrived, ahead)

    def _move(self, arrived: int, ahead: int) -> None:
        before = self.position
        self._arrived, self._ahead = arrived, ahead
        if self.position != before and self.on_change is not None:
            self.on_change()
