"""The consumer's state for one incarnation of a producer: its leases, and the readers of the producer's arena."""

import asyncio
import threading

from stagemesh.common.connector_descriptors import ConnectorName
from stagemesh.connectors.arena.memory_file import when_gone
from stagemesh.connectors.base import Bytes, Producer, Reader
from stagemesh.connectors.edge import ReadyQueue
from stagemesh.connectors.flow.inlet import InletAttempt
from stagemesh.connectors.replica_connectors import ReplicaConnectors
from stagemesh.connectors.stream.local_socket import DeathWatch


class ProducerState:
    """The leases and arena readers for one incarnation of a producer. They outlive the producer's streams."""

    def __init__(self, replica: str, incarnation: str, connectors: ReplicaConnectors) -> None:
        self.replica, self.incarnation = replica, incarnation
        self.held_lease_ids: set[int] = set()
        self._watch: DeathWatch | None = None
        self._connectors = connectors
        self._readers: dict[ConnectorName, Reader] = {}
        self._loop, self._thread = asyncio.get_running_loop(), threading.get_ident()
        self._released_ids: list[int] = []
        """The ids of ended leases that have not been returned to the producer yet."""
        self._streams: list[ReadyQueue[InletAttempt]] = []
        """The ready queues of the producer's streams, over which leases can be returned."""

    # -- reading

    def reader(self, name: ConnectorName) -> Reader | None:
        """Returns the reader of a connector, or None if the connector is not negotiated or its reader has failed."""
        return self._readers.get(name)

    async def accept_offer(self, name: ConnectorName, offer: bytes, *, arena_fd: int | None) -> None:
        """Creates the reader of a connector from the producer's offer, unless the reader exists.

        Raises NotReadyError if the connector cannot be used.
        """
        if name not in self._readers:
            producer = Producer(self.replica, self.incarnation, arena_fd)
            self._readers[name] = await self._connectors.get(name).connect(offer, producer)

    async def drop_reader(self, name: ConnectorName, reader: Reader) -> None:
        """Removes and closes a reader that has failed, so that its connector can be negotiated again."""
        if self._readers.get(name) is reader:
            del self._readers[name]
            await reader.close()

    def own_watch(self, watch: DeathWatch) -> None:
        """Takes ownership of a watch on the producer's process. Closes the previous watch, if any."""
        if self._watch is not None:
            self._watch.close()
        self._watch = watch

    # -- leases

    def attach(self, stream: "ReadyQueue[InletAttempt]") -> None:
        """Adds a stream over which ended leases are returned to the producer."""
        self._streams.append(stream)
        if self._released_ids:
            stream.wake()

    def detach(self, stream: "ReadyQueue[InletAttempt]") -> None:
        """Removes a stream that has ended. Leases are returned over the remaining streams."""
        if stream in self._streams:
            self._streams.remove(stream)
        if self._streams and self._released_ids:
            self._streams[-1].wake()

    def hold(self, lease_id: int, views: list[Bytes]) -> None:
        """Retains a lease until all `views`, and all views of them, are deleted."""
        self.held_lease_ids.add(lease_id)
        when_gone(views, lambda: self._views_gone(lease_id))

    def release(self, lease_id: int) -> None:
        """Ends a lease and sends the lease's id to the producer over the newest stream."""
        self.held_lease_ids.discard(lease_id)
        self._released_ids.append(lease_id)
        if self._streams:
            self._streams[-1].wake()

    def release_unless_held(self, lease_id: int) -> None:
        """Ends the lease of a chunk that was not accepted.

        Does nothing if the lease is in use, because a repeated chunk has the same lease as the accepted chunk.
        """
        if lease_id and lease_id not in self.held_lease_ids:
            self.release(lease_id)

    def take_released(self) -> list[int]:
        """Removes and returns the ids of the leases that must be returned to the producer."""
        released, self._released_ids = self._released_ids, []
        return released

    async def close(self) -> None:
        """Closes the watch and the readers. Idempotent."""
        if self._watch is not None:
            self._watch.close()
            self._watch = None
        for name, reader in list(self._readers.items()):
            await self.drop_reader(name, reader)

    # -- inner workings

    def _views_gone(self, lease_id: int) -> None:
        """Ends a lease in the thread of the event loop. Called in the thread that has deleted the last view."""
        if threading.get_ident() == self._thread:
            self.release(lease_id)
        elif not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self.release, lease_id)
