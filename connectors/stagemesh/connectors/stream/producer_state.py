"""What a consumer keeps of one incarnation of a producer: the leases that it is owed, and how its arena is read."""

import asyncio
import threading
from typing import Protocol

from stagemesh.common.connector_descriptors import ConnectorName
from stagemesh.connectors.base import Bytes, Producer, Reader
from stagemesh.connectors.replica_connectors import ReplicaConnectors
from stagemesh.connectors.shm import hold_lease
from stagemesh.connectors.stream.local_socket import DeathWatch


class ReleaseSink(Protocol):
    """A stream that leases can go back over."""

    def release(self, lease_ids: list[int]) -> None:
        """Returns leases."""


class ProducerState:
    """Outlives the producer's streams; ends with its incarnation."""

    def __init__(self, replica: str, incarnation: str, connectors: ReplicaConnectors) -> None:
        self.replica, self.incarnation = replica, incarnation
        self.held_lease_ids: set[int] = set()
        self._watch: DeathWatch | None = None
        self._connectors = connectors
        self._readers: dict[ConnectorName, Reader] = {}
        self._loop, self._thread = asyncio.get_running_loop(), threading.get_ident()
        self._owed: list[int] = []
        self._sinks: list[ReleaseSink] = []

    # -- reading

    def reader(self, name: ConnectorName) -> Reader | None:
        """How its arena is read by a connector that was agreed on."""
        return self._readers.get(name)

    async def meet(self, name: ConnectorName, offer: bytes, *, arena_fd: int | None) -> None:
        """Gets ready to read by a connector; raises NotReadyError where that cannot be done."""
        if name not in self._readers:
            producer = Producer(self.replica, self.incarnation, arena_fd)
            self._readers[name] = await self._connectors.get(name).connect(offer, producer)

    async def drop_reader(self, name: ConnectorName, reader: Reader) -> None:
        """A reader has failed: its connector must be agreed on anew."""
        if self._readers.get(name) is reader:
            del self._readers[name]
            await reader.close()

    def watched_by(self, watch: DeathWatch) -> None:
        """Takes over a watch on its process; one is enough."""
        if self._watch is not None:
            self._watch.close()
        self._watch = watch

    # -- leases

    def attach(self, sink: ReleaseSink) -> None:
        """A stream that leases can go back over from now on."""
        self._sinks.append(sink)
        self._flush()

    def detach(self, sink: ReleaseSink) -> None:
        """The stream is over."""
        if sink in self._sinks:
            self._sinks.remove(sink)

    def hold(self, lease_id: int, views: list[Bytes]) -> None:
        """Keeps a lease until the last of `views` and of their own views is gone."""
        self.held_lease_ids.add(lease_id)
        hold_lease(views, lambda: self._gone(lease_id))

    def give_back(self, lease_id: int) -> None:
        """Returns a lease."""
        self.held_lease_ids.discard(lease_id)
        self._owed.append(lease_id)
        self._flush()

    def give_back_unless_held(self, lease_id: int) -> None:
        """Returns the lease of a chunk that is not taken; a repeat bears that of the one that was."""
        if lease_id and lease_id not in self.held_lease_ids:
            self.give_back(lease_id)

    async def close(self) -> None:
        """Lets go of the producer. Closing twice is harmless."""
        if self._watch is not None:
            self._watch.close()
            self._watch = None
        for name, reader in list(self._readers.items()):
            await self.drop_reader(name, reader)

    # -- inner workings

    def _gone(self, lease_id: int) -> None:
        """The last view is gone, in whatever thread dropped it."""
        if threading.get_ident() == self._thread:
            self.give_back(lease_id)
        elif not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self.give_back, lease_id)

    def _flush(self) -> None:
        if self._sinks and self._owed:
            owed, self._owed = self._owed, []
            self._sinks[-1].release(owed)
