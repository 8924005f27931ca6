"""How far vLLM may compute a request ahead of its inputs and its consumer. Enforced by `run_ahead`."""

from collections.abc import Callable

UNLIMITED = 1 << 40
MAX_TOKENS_AHEAD = 256
"""The maximum number of tokens by which vLLM's computation may be ahead of a request's consumer.

Counted from the last token whose row the consumer has received.
"""


class RequestLimit:
    """The run-ahead limit of one request. The limit never decreases after the request has started."""

    def __init__(self) -> None:
        self._arrived = self._ahead = UNLIMITED
        self.on_change: Callable[[], None] | None = None

    @property
    def position(self) -> int:
        """The run-ahead limit: the first token position that vLLM must not compute yet.

        The inputs of all earlier positions have arrived. The limit is at most `MAX_TOKENS_AHEAD` tokens ahead of the
        request's consumer.
        """
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
