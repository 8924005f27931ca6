"""Tickets for state that engines hand over to each other by a transport of their own, such as pages of a KV cache.

The data plane carries only the ticket: the kind of the state, and the descriptor by which the consumer's engine reads
it. The state remains in the memory of the producer's engine until the ticket is released, which happens exactly once.
"""

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable

from stagemesh.common.errors import InvalidChunkError, UnavailableError

MAX_DESCRIPTOR_BYTES = 64 << 10
"""The maximum size of a ticket's descriptor in bytes."""

_log = logging.getLogger(__name__)


class Ticket(ABC):
    """The right to read state that the engine of a producing replica keeps.

    Use a ticket on the replica's event loop, except `release`.
    """

    __slots__ = ("__weakref__", "descriptor", "kind", "size_bytes", "time_limit_s")

    def __init__(self, kind: str, descriptor: bytes, *, size_bytes: int, time_limit_s: float) -> None:
        self.kind = kind
        """The name of the transport and of the kind of state, such as "vllm.kv"."""
        self.descriptor = descriptor
        """The data by which the consumer's engine finds the state, in the format of the kind. Comes from a peer."""
        self.size_bytes = size_bytes
        """The memory that the state occupies at its producer, in bytes."""
        self.time_limit_s = time_limit_s
        """The time in seconds for which the state is kept after the offer, and after each acceptance."""

    @abstractmethod
    async def accept(self) -> float:
        """Asks the producer to keep the state. Returns the time until which the state may be read.

        Call this method directly before the state is read, and again to continue to read after the returned time. The
        returned time is in seconds on the event loop's clock, at most `time_limit_s` seconds from the call. Reading
        must have ended by then.

        Raises UnavailableError: TICKET_EXPIRED if the state has been released, TICKET_LOST if the producer terminated
        or does not answer.
        """

    @abstractmethod
    def release(self) -> None:
        """Ends the use of the state, so that its producer can free it."""


class OfferedTicket(Ticket):
    """A ticket as the producer's engine emits it in `Packet.tickets`, with counted references.

    `on_release` is called exactly once, on the event loop: when the last reference is released, or when the time limit
    has passed, whichever is first. It must not raise an error. The engine's own reference goes to the step with the
    emission. An engine that cannot emit the ticket calls `release` itself.
    """

    __slots__ = ("_holders", "_timer", "is_released", "on_release")

    def __init__(
        self,
        kind: str,
        descriptor: bytes,
        *,
        size_bytes: int,
        time_limit_s: float,
        on_release: Callable[[], None],
    ) -> None:
        """Offers state that is ready to be read. Call it on the event loop.

        Raises InvalidChunkError if the descriptor has more than MAX_DESCRIPTOR_BYTES bytes.
        """
        if len(descriptor) > MAX_DESCRIPTOR_BYTES:
            raise InvalidChunkError(
                f"the descriptor of a ticket of kind {kind!r} has {len(descriptor)} bytes; at most "
                f"{MAX_DESCRIPTOR_BYTES} are sent"
            )
        super().__init__(kind, descriptor, size_bytes=size_bytes, time_limit_s=time_limit_s)
        self.on_release = on_release
        self.is_released = False
        """Whether the state has been released, so that no consumer can accept the ticket any more."""
        self._holders = 1
        self._timer = asyncio.get_running_loop().call_later(time_limit_s, self._expire)

    async def accept(self) -> float:
        """Keeps the state for another `time_limit_s` seconds. Returns the time at which it is released."""
        if not self.renew():
            raise expired(self.kind)
        return self._timer.when()

    def renew(self) -> bool:
        """Keeps the state for another `time_limit_s` seconds. Returns False if the state has been released."""
        if not self.is_released:
            self._timer.cancel()
            self._timer = asyncio.get_running_loop().call_later(self.time_limit_s, self._expire)
        return not self.is_released

    def retain(self) -> None:
        """Adds a reference to the ticket."""
        assert self._holders > 0, "a ticket without references cannot be retained"
        self._holders += 1

    def release(self) -> None:
        """Releases one reference. Releases the state if it was the last one."""
        assert self._holders > 0, "release a ticket once for each reference"
        self._holders -= 1
        if self._holders == 0:
            self._end()

    def _expire(self) -> None:
        _log.info("the state of a ticket of kind %s was not released within %g s", self.kind, self.time_limit_s)
        self._end()

    def _end(self) -> None:
        if not self.is_released:
            self.is_released = True
            self._timer.cancel()
            self.on_release()


def expired(kind: str) -> UnavailableError:
    """Returns the error for a ticket whose state has been released at its producer."""
    return UnavailableError(
        f"the state of a ticket of kind {kind!r} was released at its producer: the ticket was accepted too late, or its "
        "flow has ended",
        reason="TICKET_EXPIRED",
    )
