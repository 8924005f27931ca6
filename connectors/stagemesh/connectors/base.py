"""The interface of connectors, by which a consumer reads ranges of a producer's arena.

The producer's connector describes how to reach the arena (`offer`). The consumer's connector prepares to read it
(`connect`) and reads ranges of it (`Reader`). Flows, which are the same for all connectors, are responsible for order,
exactly-once delivery, credit, leases and the meaning of a range. The `grpc` connector does not use this interface: its
producer sends the bytes itself.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from stagemesh.common.connector_descriptors import ConnectorName
from stagemesh.connectors.arena.account import MemoryAccount

Bytes: TypeAlias = npt.NDArray[np.uint8]
"""A one-dimensional array of bytes."""


class ArenaRange(NamedTuple):
    """The place of a tensor in its producer's arena."""

    offset: int
    size_bytes: int
    generation: int
    """The generation of the region that holds the tensor. A reader rejects a range whose pages now have another one."""


@dataclass(frozen=True)
class Producer:
    """The replica whose arena is read."""

    replica: str
    incarnation: str
    arena_fd: int | None
    """The arena's memory file, or None if the producer did not pass it. It can be passed only on one host."""


class Reader(ABC):
    """A consumer's access to the arena of one incarnation of a producer. Used on the event loop."""

    @abstractmethod
    async def close(self) -> None:
        """Closes the access. Views that were handed out stay valid. Closing twice is harmless."""


class InPlaceReader(Reader):
    """Reads the producer's memory without copying it. The producer's lease is held while a view exists."""

    @abstractmethod
    def view(self, place: ArenaRange) -> Bytes:
        """Returns a read-only view of a range.

        Raises InvalidChunkError for a range that is outside the arena or whose region was freed.
        """


class FetchingReader(Reader):
    """Reads by copying into the consumer's memory. The producer's lease is released when the copy is complete."""

    @abstractmethod
    async def fetch(self, places: Sequence[ArenaRange], account: MemoryAccount) -> list[Bytes]:
        """Returns copies of the ranges, read in one transfer if possible. Calls may overlap.

        Waits for space first, which is charged to the flow's `account`. Raises InvalidChunkError for a range that is
        outside the arena or whose region was freed. Raises UnavailableError within bounded time if the bytes cannot be
        read; the edge then falls back to another connector.
        """

    def fetch_at_once(self, places: Sequence[ArenaRange], account: MemoryAccount) -> list[Bytes] | None:  # noqa: ARG002
        """Returns the result of `fetch` if that is possible without waiting, or None if it is not or the read failed.

        Connectors that often can do this save a task for each chunk, which costs more than copying a small chunk.
        Raises InvalidChunkError like `fetch`.
        """
        return None


class Connector(ABC):
    """One replica's use of a connector, as a producer and as a consumer. Used on the event loop."""

    name: ClassVar[ConnectorName]

    @abstractmethod
    async def offer(self) -> bytes:
        """At the producer: returns the information by which a consumer reads this replica's arena.

        Raises NotReadyError if the connector cannot be used here.
        """

    @abstractmethod
    async def connect(self, offer: bytes, producer: Producer) -> Reader:
        """At the consumer: prepares to read a producer's arena. Raises NotReadyError if that is not possible."""

    def expect_reads(self, chunks: int) -> None:  # noqa: B027 - most connectors have nothing to do
        """At the producer: adds `chunks`, which may be negative, to the number of sent chunks not known to be read.

        A connector can override it if reading needs the producer's processor.
        """

    @abstractmethod
    async def close(self) -> None:
        """Releases everything except memory that a peer may still read. Closing twice is harmless."""
