"""What a consumer keeps of one incarnation of a producer: the leases that it holds, and how it reads the arena."""

import asyncio
import threading

from stagemesh.common.connector_descriptors import ConnectorName
from stagemesh.connectors.base import Bytes, Producer, Reader
from stagemesh.connectors.edge import ReadyQueue
from stagemesh.connectors.flow.inlet import InletAttempt
from stagemesh.connectors.replica_connectors import ReplicaConnectors
from stagemesh.connectors.shm import hold_lease
from stagemesh.connectors.stream.local_socket import DeathWatch


class ProducerState:
    """Outlives the producer's streams, and ends with its incarnation."""

    def __init__(self, replica: str, incarnation: str, connectors: ReplicaConnectors) -> None:
        self.replica, self.incarnation = replica, incarnation
        self.held_lease_ids: set[int] = set()
        self._watch: DeathWatch | None = None
        self._connectors = connectors
        self._readers: dict[ConnectorName, Reader] = {}
        self._loop, self._thread = asyncio.get_running_loop(), threading.get_ident()
        self._released_ids: list[int] = []
        """Leases whose end the producer has yet to be sent."""
        self._streams: list[ReadyQueue[InletAttempt]] = []
        """The queues of the streams over which leases can be returned."""

    # -- reading

    def reader(self, name: ConnectorName) -> Reader | None:
        """Returns the reader of a negotiated connector, or None."""
        return self._readers.get(name)

    async def accept_offer(self, name: ConnectorName, offer: bytes, *, arena_fd: int | None) -> None:
        """Prepares reading by a connector; raises NotReadyError if that is impossible."""
        if name not in self._readers:
            producer = Producer(self.replica, self.incarnation, arena_fd)
            self._readers[name] = await self._connectors.get(name).connect(offer, producer)

    async def drop_reader(self, name: ConnectorName, reader: Reader) -> None:
        """Closes a reader that has failed: its connector must be negotiated again."""
        if self._readers.get(name) is reader:
            del self._readers[name]
            await reader.close()

    def own_watch(self, watch: DeathWatch) -> None:
        """Owns a watch on the producer's process from now on, in place of an earlier one."""
        if self._watch is not None:
            self._watch.close()
        self._watch = watch

    # -- leases

    def attach(self, stream: "ReadyQueue[InletAttempt]") -> None:
        """Returns leases over a stream from now on."""
        self._streams.append(stream)
        if self._released_ids:
            stream.wake()

    def detach(self, stream: "ReadyQueue[InletAttempt]") -> None:
        """Returns leases over another stream, because this one has ended."""
        if stream in self._streams:
            self._streams.remove(stream)
        if self._streams and self._released_ids:
            self._streams[-1].wake()

    def hold(self, lease_id: int, views: list[Bytes]) -> None:
        """Holds a lease until the last of `views` and of their own views is gone."""
        self.held_lease_ids.add(lease_id)
        hold_lease(views, lambda: self._views_gone(lease_id))

    def release(self, lease_id: int) -> None:
        """Returns a lease to the producer."""
        self.held_lease_ids.discard(lease_id)
        self._released_ids.append(lease_id)
        if self._streams:
            self._streams[-1].wake()

    def release_unless_held(self, lease_id: int) -> None:
        """Returns the lease of a chunk that is not accepted. A repeated chunk bears the lease of the accepted one."""
        if lease_id and lease_id not in self.held_lease_ids:
            self.release(lease_id)

    def take_released(self) -> list[int]:
        """Removes and returns the leases that are to be returned."""
        released, self._released_ids = self._released_ids, []
        return released

    async def close(self) -> None:
        """Closes the watch and the readers. Closing twice is harmless."""
        if self._watch is not None:
            self._watch.close()
            self._watch = None
        for name, reader in list(self._readers.items()):
            await self.drop_reader(name, reader)

    # -- inner workings

    def _views_gone(self, lease_id: int) -> None:
        """Returns a lease; called in whichever thread dropped the last view."""
        if threading.get_ident() == self._thread:
            self.release(lease_id)
        elif not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self.release, lease_id)
