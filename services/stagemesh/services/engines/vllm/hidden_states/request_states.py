"""Buffers the received hidden states of one request in the replica's process."""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator

from stagemesh.common.errors import StagemeshError, UnavailableError
from stagemesh.common.notification import Notifier
from stagemesh.common.tensors import Tensors
from stagemesh.connectors.edge import Packet

_LATE_S = 10.0
"""The maximum time to wait for the rows of tokens that have already been sampled, in seconds."""


class RequestStates:
    """A buffer for one request's hidden states. A row is the state of one token position.

    Returns each row once and in order, even if the worker writes some rows again.
    """

    def __init__(self, *, first_position: int, prompt_tokens: int) -> None:
        self.next_position = first_position
        """The position of the next row to arrive. All requested rows before this position have arrived."""
        self._prompt_tokens = prompt_tokens
        self._ready: deque[tuple[int, Tensors]] = deque()
        self._error: StagemeshError | None = None
        self._changed = Notifier()

    def push(self, position: int, tensors: Tensors) -> None:
        """Adds consecutive rows, the first of which belongs to `position`. Drops rows that have already arrived.

        Rows arrive again after a preemption. Calls `fail` if rows before `position` are missing.
        """
        count = _count(tensors)
        skipped = self.next_position - position
        if skipped >= count:
            return
        if skipped < 0:
            self.fail(
                UnavailableError(f"the hidden states of positions {self.next_position} to {position} are missing")
            )
            return
        self._ready.append((self.next_position, {name: tensor[skipped:] for name, tensor in tensors.items()}))
        self.next_position = position + count
        self._changed.fire()

    def fail(self, error: StagemeshError) -> None:
        """Records an error, which `take` raises from then on. Only the first error is recorded."""
        self._error = self._error or error
        self._changed.fire()

    def take(self, *, before: int) -> list[Packet]:
        """Removes and returns the buffered rows of the positions below `before`.

        Raises the error that `fail` has recorded, if any.
        """
        if self._error is not None:
            raise self._error
        taken: list[Packet] = []
        while self._ready and self._ready[0][0] < before:
            position, tensors = self._ready.popleft()
            count = before - position
            if position + _count(tensors) > before:
                self._ready.appendleft((before, {name: tensor[count:] for name, tensor in tensors.items()}))
            rows = {name: tensor[:count] for name, tensor in tensors.items()}
            taken.append(Packet(rows, {"token_start": position, "prompt_tokens": self._prompt_tokens}))
        return taken

    async def up_to(self, position: int) -> AsyncGenerator[Packet]:
        """Yields the remaining rows of the positions below `position` as they arrive.

        Raises UnavailableError if rows do not arrive in time, or the error that `fail` has recorded.
        """
        while True:
            if packets := self.take(before=position):
                for packet in packets:
                    yield packet
                # More rows may have arrived while the consumer processed these.
                continue
            if self.next_position >= position:
                return
            try:
                async with asyncio.timeout(_LATE_S):
                    await self._changed.wait()
            except TimeoutError:
                raise UnavailableError(
                    f"the hidden states from position {self.next_position} on did not arrive; the worker's log has the "
                    "cause"
                ) from None


def _count(tensors: Tensors) -> int:
    return len(next(iter(tensors.values())))
