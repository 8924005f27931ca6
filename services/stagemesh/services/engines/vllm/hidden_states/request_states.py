"""The hidden states of one request, in the replica's process."""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator

from stagemesh.common.errors import StagemeshError, UnavailableError
from stagemesh.common.notifier import Notifier
from stagemesh.common.tensors import Tensors
from stagemesh.connectors.edge import Packet

_LATE_S = 10.0
"""How long rows may arrive after the tokens of the same step."""


class RequestStates:
    """One request's rows: each position once and in order, even if the worker writes rows again."""

    def __init__(self, *, first_position: int, prompt_tokens: int) -> None:
        self.next_position = first_position
        """All wanted rows before this position have arrived."""
        self._prompt_tokens = prompt_tokens
        self._ready: deque[Packet] = deque()
        self._error: StagemeshError | None = None
        self._changed = Notifier()

    def push(self, position: int, tensors: Tensors) -> None:
        """Adds rows that start at `position`. Drops rows that arrived before, as happens after a preemption."""
        count = len(next(iter(tensors.values())))
        skipped = self.next_position - position
        if skipped >= count:
            return
        if skipped < 0:
            self.fail(
                UnavailableError(f"the hidden states of positions {self.next_position} to {position} are missing")
            )
            return
        rows = {name: tensor[skipped:] for name, tensor in tensors.items()}
        metadata = {"token_start": self.next_position, "prompt_tokens": self._prompt_tokens}
        self._ready.append(Packet(rows, metadata))
        self.next_position = position + count
        self._changed.fire()

    def fail(self, error: StagemeshError) -> None:
        """Records that no more rows will arrive."""
        self._error = self._error or error
        self._changed.fire()

    def take(self, *, before: int) -> list[Packet]:
        """Returns the rows before a position that have arrived since the last call. Raises the recorded error."""
        if self._error is not None:
            raise self._error
        taken: list[Packet] = []
        while self._ready and _start(self._ready[0]) < before:
            packet = self._ready.popleft()
            count = before - _start(packet)
            if count < _length(packet):
                self._ready.appendleft(_cut(packet, count, None))
                packet = _cut(packet, 0, count)
            taken.append(packet)
        return taken

    async def up_to(self, position: int) -> AsyncGenerator[Packet]:
        """Yields the remaining rows before `position`. Raises UnavailableError if they do not arrive."""
        while True:
            if packets := self.take(before=position):
                for packet in packets:
                    yield packet
                # More rows may have arrived while the consumer took these.
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


def _start(packet: Packet) -> int:
    start = packet.metadata["token_start"]
    assert isinstance(start, int), "set by `push`"
    return start


def _length(packet: Packet) -> int:
    return len(next(iter(packet.tensors.values())))


def _cut(packet: Packet, first: int, end: int | None) -> Packet:
    tensors = {name: tensor[first:end] for name, tensor in packet.tensors.items()}
    return Packet(tensors, {**packet.metadata, "token_start": _start(packet) + first})
