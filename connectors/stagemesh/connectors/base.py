"""The connector interface, with which a consumer reads ranges of a producer's arena.

The producer's connector describes how to reach the arena (`offer`). The consumer's connector prepares to read the arena
(`connect`) and reads ranges of the arena (`Reader`). The flow modules are the same for all connectors: they ensure
order and exactly-once delivery, manage credit and leases, and interpret the ranges. The `grpc` connector does not use
this interface, because its producer sends the bytes itself.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from stagemesh.common.errors import NotReadyError
from stagemesh.common.plugins.connectors import ConnectorName

Bytes: TypeAlias = npt.NDArray[np.uint8]
"""A one-dimensional uint8 array."""


@dataclass(eq=False, slots=True)
class MemoryAccount:
    """The arena memory of one flow: `held_bytes` bytes in regions, and `waiting` allocations that wait for free memory.

    `Arena` counts each region toward an account until the region is freed, and limits the account to a fair share.
    """

    held_bytes: int = 0
    waiting: int = 0


class ArenaRange(NamedTuple):
    """The location of a tensor in its producer's arena."""

    offset: int
    """The offset, in bytes, from the start of the arena's memory file."""
    size_bytes: int
    generation: int
    """The generation of the tensor's region. A reader rejects the range if the generation of its pages is different."""


@dataclass(frozen=True)
class Producer:
    """The producing replica, as seen by a consumer that reads its arena."""

    replica: str
    incarnation: str
    arena_fd: int | None
    """The file descriptor of the arena's memory file, or None if the producer did not send it.

    A producer can send the file descriptor only to a consumer on the same host.
    """


class Reader(ABC):
    """Read access to the arena of one incarnation of a producer. Use it only on the event loop."""

    @abstractmethod
    async def close(self) -> None:
        """Closes the reader. Views that the reader has returned remain valid. Idempotent."""


class InPlaceReader(Reader):
    """A reader that returns views of the producer's memory without copying the memory.

    The consumer retains the lease on a chunk until all views of the chunk have been deleted.
    """

    @abstractmethod
    def view(self, place: ArenaRange) -> Bytes:
        """Returns a read-only uint8 view of a range.

        Raises InvalidChunkError if the range is outside the arena or if its region was freed.
        """


class FetchingReader(Reader):
    """A reader that copies the producer's bytes into the consumer's memory.

    A chunk's lease ends when the copy of the chunk is complete.
    """

    @abstractmethod
    async def fetch(self, places: Sequence[ArenaRange], account: MemoryAccount) -> list[Bytes]:
        """Returns copies of the ranges, in the same order. Uses one transfer for all ranges if possible.

        Waits first until memory for the copies is free. The memory counts toward the flow's `account`. Calls may
        overlap. Raises InvalidChunkError if a range is outside the arena or if its region was freed. Raises
        UnavailableError within bounded time if the bytes cannot be read. The flow then falls back to another connector.
        """

    def fetch_at_once(self, places: Sequence[ArenaRange], account: MemoryAccount) -> list[Bytes] | None:  # noqa: ARG002
        """Returns the result of `fetch` if no waiting is needed. Returns None if the read failed or would have to wait.

        The caller thereby avoids creating a task, which would cost more than the copy of a small chunk. Raises
        InvalidChunkError under the same conditions as `fetch`.
        """
        return None


def unavailable(cause: str) -> NotReadyError:
    """Returns the error for a connector that this host or these two replicas cannot use, because of `cause`."""
    return NotReadyError(cause, reason="CONNECTOR_UNAVAILABLE")


class Connector(ABC):
    """A connector of one replica, for both outgoing and incoming flows. Use it only on the event loop."""

    name: ClassVar[ConnectorName]

    @abstractmethod
    async def offer(self) -> bytes:
        """Returns the information that a consumer needs to read this replica's arena. Called at the producer.

        Raises NotReadyError if this replica cannot use the connector.
        """

    @abstractmethod
    async def connect(self, offer: bytes, producer: Producer) -> Reader:
        """Returns a reader of a producer's arena. Called at the consumer with the result of the producer's `offer`.

        Raises NotReadyError if the consumer cannot read the arena through this connector.
        """

    def expect_reads(self, chunks: int) -> None:  # noqa: B027 - most connectors have nothing to do
        """Adds `chunks` to the number of chunks that consumers are expected to read. `chunks` may be negative.

        Called at the producer. A connector overrides this method if a read needs the producer's processor.
        """

    @abstractmethod
    async def close(self) -> None:
        """Releases all resources of the connector, except memory that a peer may still read. Idempotent."""
