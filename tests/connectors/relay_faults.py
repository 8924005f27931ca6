"""Faults of one message of a stream, the same for every transport that a relay supports."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from stagemesh.v1 import stage_pb2

DELAY_S = 0.05
"""The time for which a delayed message waits for the message that is to overtake it."""


class Fault(Enum):
    """The possible faults of a message."""

    DROP = "dropped"
    DUPLICATE = "duplicated"
    SWAP = "delayed behind the next"
    CUT = "cut"


class Direction(Enum):
    """The direction of a message."""

    REQUESTS = "requests"
    REPLIES = "replies"


_KINDS: dict[Direction, tuple[Any, str]] = {
    Direction.REQUESTS: (stage_pb2.PutChunkRequest, "items"),
    Direction.REPLIES: (stage_pb2.PutChunkResponse, "replies"),
}
"""The class of the messages of each direction, and the name of the field with their items."""


class CutError(Exception):
    """Raised to break the connection."""


@dataclass
class Faults:
    """One fault of one message of a producer. Messages are counted over all of the producer's connections."""

    fault: Fault | None = None
    direction: Direction = Direction.REQUESTS
    index: int = 0
    counts: Counter[Direction] = field(default_factory=Counter[Direction])
    harmed: bytes = b""
    """The affected message, once it has passed the relay."""
    _held: dict[Direction, list[bytes]] = field(default_factory=dict[Direction, list[bytes]])

    @property
    def struck(self) -> bool:
        """Whether the affected message has passed the relay."""
        return self.counts[self.direction] > self.index

    def apply(self, direction: Direction, message: bytes) -> list[bytes]:
        """Returns the messages to forward in place of a message. Raises CutError if the connection is to break."""
        index = self.counts[direction]
        self.counts[direction] += 1
        held = self.held(direction)
        if direction is not self.direction or index != self.index:
            return [message, *held]
        self.harmed = message
        match self.fault:
            case Fault.CUT:
                raise CutError
            case Fault.DROP:
                return []
            case Fault.DUPLICATE:
                return [message, message]
            case Fault.SWAP:
                self._held[direction] = [message]
                return []
            case None:
                return [message]

    def held(self, direction: Direction) -> list[bytes]:
        """Returns the delayed message, if any, which no longer waits for the next one."""
        return self._held.pop(direction, [])

    def is_holding(self, direction: Direction) -> bool:
        """Whether a delayed message waits for the next one."""
        return direction in self._held


async def pump(
    source: AsyncIterator[bytes], sink: Callable[[bytes], Awaitable[None]], *, faults: Faults, direction: Direction
) -> None:
    """Forwards messages until the source ends. Raises CutError if the connection is to break."""
    while True:
        upcoming = asyncio.ensure_future(anext(source, None))
        try:
            await asyncio.wait((upcoming,), timeout=DELAY_S if faults.is_holding(direction) else None)
            if not upcoming.done():
                await _send_all(faults.held(direction), sink)
            message = await upcoming
        finally:
            upcoming.cancel()
        if message is None:
            await _send_all(faults.held(direction), sink)
            return
        for part in split(message, direction):
            await _send_all(faults.apply(direction, part), sink)


def split(message: bytes, direction: Direction) -> list[bytes]:
    """Returns a message for each item of a message, so that batching does not decide which item is affected."""
    kind, name = _KINDS[direction]
    whole = kind.FromString(message)
    items = list(getattr(whole, name))
    whole.ClearField(name)
    rest = whole.SerializeToString()
    return [rest] * bool(rest or not items) + [kind(**{name: [item]}).SerializeToString() for item in items]


async def _send_all(messages: list[bytes], sink: Callable[[bytes], Awaitable[None]]) -> None:
    for message in messages:
        await sink(message)
