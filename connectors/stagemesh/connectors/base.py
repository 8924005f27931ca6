"""The seam for connectors: ways in which a consumer reads what lies in a producer's arena.

A connector says how to reach the arena (`offer`, at the producer), gets ready to read it (`meet`, at the consumer), and
reads ranges of it (`Reader`). Order, exactly-once delivery, credit, leases and what a range means belong to the
flows and are the same for all. The `grpc` connector needs nothing of this: its producer sends the bytes itself.
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
"""One dimension of bytes."""


class ArenaRange(NamedTuple):
    """A tensor's place in its producer's arena."""

    offset: int
    size_bytes: int
    generation: int
    """That of the region which holds it; a reader refuses a range whose pages now have another one."""


@dataclass(frozen=True)
class Producer:
    """Whose arena is to be read."""

    replica: str
    incarnation: str
    arena_fd: int | None
    """The arena's memory file where the producer handed it over, which it can do on one host only."""


class Reader(ABC):
    """A consumer's access to the arena of one incarnation of a producer. Used on the event loop."""

    @abstractmethod
    async def close(self) -> None:
        """Lets go of the producer; views that are still out stay valid. Closing twice is harmless."""


class InPlaceReader(Reader):
    """Reads by looking: nothing is copied, and the producer's lease is held while a view is."""

    @abstractmethod
    def view(self, place: ArenaRange) -> Bytes:
        """The range, read-only. Raises InvalidChunkError for one outside the arena or no longer its own."""


class FetchingReader(Reader):
    """Reads by copying into memory of its own; the producer's lease goes back once that is done."""

    @abstractmethod
    async def fetch(self, places: Sequence[ArenaRange], account: MemoryAccount) -> list[Bytes]:
        """Copies of the ranges, in one transfer where that is possible; calls may overlap.

        Waits for room of its own first, charged to the flow's `account`. Raises InvalidChunkError for a range outside
        the arena or no longer its own, and UnavailableError, within bounded time, when the bytes cannot be had: the
        edge then falls back.
        """

    def fetch_at_once(self, places: Sequence[ArenaRange], account: MemoryAccount) -> list[Bytes] | None:  # noqa: ARG002
        """What `fetch` would give, where that can be had without waiting; None where it cannot, or has failed.

        For connectors that often can: a task for each chunk costs more than a small chunk's bytes. Raises
        InvalidChunkError as `fetch` does.
        """
        return None


class Connector(ABC):
    """One object a replica, for both of its roles. Used on the event loop."""

    name: ClassVar[ConnectorName]

    @abstractmethod
    async def offer(self) -> bytes:
        """At the producer: what a consumer needs to read this replica's arena. Raises NotReadyError with the reason."""

    @abstractmethod
    async def meet(self, offer: bytes, producer: Producer) -> Reader:
        """At the consumer: gets ready to read. Raises NotReadyError with the reason why it cannot be done."""

    def expect_reads(self, chunks: int) -> None:  # noqa: B027 - most have nothing to do
        """At the producer: so many more chunks (or fewer) are sent by this connector and not yet known to be read.

        For connectors that need the producer's processor to be read from.
        """

    @abstractmethod
    async def close(self) -> None:
        """Lets go of everything but memory that a peer may still reach. Closing twice is harmless."""
