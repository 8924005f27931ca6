"""The connector interface, through which a consumer reads ranges of a producer's arena.

The producer's connector describes how to reach the arena (`offer`). The consumer's connector prepares to read the arena
(`connect`) and reads ranges of it (`Reader`). Flows, which are the same for all connectors, ensure order and
exactly-once delivery, manage credit and leases, and interpret the ranges. The `grpc` connector does not use this
interface, because its producer sends the bytes itself.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from stagemesh.common.connector_descriptors import ConnectorName

Bytes: TypeAlias = npt.NDArray[np.uint8]
"""A one-dimensional uint8 array."""


@dataclass(eq=False, slots=True)
class MemoryAccount:
    """The memory use of one flow: `held_bytes` bytes in its regions, and `waiting` allocations that wait for space.

    `Arena` charges the account for each region until the region is freed, and limits the account to a fair share.
    """

    held_bytes: int = 0
    waiting: int = 0


class ArenaRange(NamedTuple):
    """The location of a tensor in its producer's arena."""

    offset: int
    """The offset in bytes from the start of the arena's memory file."""
    size_bytes: int
    generation: int
    """The generation of the tensor's region. A reader rejects the range if its pages have another generation."""


@dataclass(frozen=True)
class Producer:
    """The replica whose arena is read."""

    replica: str
    incarnation: str
    arena_fd: int | None
    """The file descriptor of the arena's memory file, or None if the producer did not pass it.

    A producer can pass the file descriptor only to a consumer on its own host.
    """


class Reader(ABC):
    """Provides access to the arena of one incarnation of a producer. Use it only on the event loop."""

    @abstractmethod
    async def close(self) -> None:
        """Closes the reader. Views that the reader has returned remain valid. Idempotent."""


class InPlaceReader(Reader):
    """A reader that returns views of the producer's memory without copying it.

    The consumer retains a chunk's lease while a view of the chunk exists.
    """

    @abstractmethod
    def view(self, place: ArenaRange) -> Bytes:
        """Returns a read-only view of a range.

        Raises InvalidChunkError if the range is outside the arena or if its region was freed.
        """


class FetchingReader(Reader):
    """A reader that copies the producer's bytes into the consumer's memory.

    A chunk's lease ends when the copy of the chunk is complete.
    """

    @abstractmethod
    async def fetch(self, places: Sequence[ArenaRange], account: MemoryAccount) -> list[Bytes]:
        """Returns copies of the ranges. Reads all ranges in one transfer if possible. Calls may overlap.

        Waits for memory for the copies first, and charges the memory to the flow's `account`. Raises InvalidChunkError
        if a range is outside the arena or if its region was freed. Raises UnavailableError within bounded time if the
        bytes cannot be read. The flow then falls back to another connector.
        """

    def fetch_at_once(self, places: Sequence[ArenaRange], account: MemoryAccount) -> list[Bytes] | None:  # noqa: ARG002
        """Returns the result of `fetch`, or None if the read failed or would have to wait.

        Avoids a task for each chunk, which would cost more than the copy of a small chunk. Raises InvalidChunkError
        under the same conditions as `fetch`.
        """
        return None


class Connector(ABC):
    """A connector of one replica, for both its outgoing and its incoming flows. Use it only on the event loop."""

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
        """Adds `chunks`, which may be negative, to the number of chunks that consumers are expected to read.

        Called at the producer. A connector can override this method if reads need the producer's processor.
        """

    @abstractmethod
    async def close(self) -> None:
        """Releases all resources except memory that a peer may still read. Idempotent."""
