"""A consumer's state for one producer: the readers of its arena, the leases, and the acceptances of its tickets."""

import asyncio
import itertools
import secrets
import socket
import threading
from collections.abc import Callable
from copy import copy
from functools import partial

from stagemesh.common.errors import StagemeshError, UnavailableError
from stagemesh.common.plugins.connectors import ConnectorName
from stagemesh.connectors.arena.memory import when_gone
from stagemesh.connectors.base import Bytes, Producer, Reader
from stagemesh.connectors.flow.flow_control import ReadyQueue
from stagemesh.connectors.flow.inlet_attempt import InletAttempt
from stagemesh.connectors.packets import ReceivedTicket
from stagemesh.connectors.stream.connector_agreement import ReplicaConnectors
from stagemesh.connectors.stream.local_socket import DeathWatch, watch_peer
from stagemesh.connectors.wire import MakeTicket
from stagemesh.v1 import stage_pb2, tensor_pb2

_REPEAT_S = 0.5
"""The time in seconds without an answer after which an acceptance is sent again, because a message may be lost."""


class TicketAcceptances:
    """Accepts leases on tickets at one incarnation of a producer. Use it on the event loop.

    If a connection ends before the answer, the acceptance is sent again over the next one.
    """

    def __init__(self, replica: str, wake: Callable[[], None]) -> None:
        """`replica` is the producer's name. `wake` is called when `take_unsent` has messages to return."""
        self._replica, self._wake = replica, wake
        self._waiting: dict[int, asyncio.Future[None]] = {}
        self._unsent: dict[int, stage_pb2.AcceptTickets] = {}
        self._numbers = itertools.count(1)
        self.is_lost = False
        """Whether the producer has terminated, or its state was closed."""

    async def accept(self, lease_id: int) -> None:
        """Asks the producer to keep the state of a lease. Returns when the producer has confirmed it.

        The caller must limit the time. Raises UnavailableError: TICKET_EXPIRED if the state has been released,
        TICKET_LOST if the producer has terminated.
        """
        if self.is_lost:
            raise self._lost_error()
        number = next(self._numbers)
        answer = self._waiting[number] = asyncio.get_running_loop().create_future()
        try:
            while not answer.done():
                self._unsent[number] = stage_pb2.AcceptTickets(lease_id=lease_id, acceptance=number)
                self._wake()
                await asyncio.wait((answer,), timeout=_REPEAT_S)
            if (error := answer.exception()) is not None:
                # Raises a copy, because a raised error refers to frames, which refer to the future, and to the ticket.
                raise copy(error)
        finally:
            del self._waiting[number]
            self._unsent.pop(number, None)

    def answered(self, number: int, error: StagemeshError | None) -> None:
        """Processes the producer's answer to an acceptance. `error` is None if the producer keeps the state.

        Ignores a repeated answer, and an answer that is not expected any more.
        """
        answer = self._waiting.get(number)
        if answer is None or answer.done():
            return
        if error is None:
            answer.set_result(None)
        else:
            answer.set_exception(error)

    def take_unsent(self) -> list[stage_pb2.AcceptTickets]:
        """Removes and returns the messages that have not been sent."""
        unsent, self._unsent = self._unsent, {}
        return list(unsent.values())

    def lose(self) -> None:
        """Fails all acceptances with TICKET_LOST, because the producer has terminated. Idempotent."""
        self.is_lost = True
        for number in list(self._waiting):
            self.answered(number, self._lost_error())

    def _lost_error(self) -> UnavailableError:
        return UnavailableError(
            f"replica {self._replica}, which kept the state of the ticket, has terminated or restarted",
            reason="TICKET_LOST",
            metadata={"producer": self._replica},
        )


class ProducerState:
    """A consumer's state for one incarnation of a producer: the leases and the arena readers.

    The state persists when a stream of the producer ends.
    """

    def __init__(self, replica: str, incarnation: str, connectors: ReplicaConnectors) -> None:
        self.replica, self.incarnation = replica, incarnation
        self.local_secret = secrets.token_bytes(16)
        """The secret by which the producer identifies itself on local streams."""
        self.held_lease_ids: set[int] = set()
        self._watch: DeathWatch | None = None
        self._connectors = connectors
        self._readers: dict[ConnectorName, Reader | None] = {}
        """The reader of each connector that was negotiated. The value is None if the reader has failed."""
        self._loop, self._thread = asyncio.get_running_loop(), threading.get_ident()
        self.released_ids: list[int] = []
        """The ids of ended leases that have not been sent to the producer yet."""
        self.streams: list[ReadyQueue[InletAttempt]] = []
        """The ready queue of each stream of the producer. A lease can be released over any of these streams."""
        self.acceptances = TicketAcceptances(replica, self._wake)
        """The acceptances of the producer's tickets, which can be sent over any of these streams, too."""

    # -- reading

    def reader(self, name: ConnectorName) -> Reader | None:
        """Returns the reader of the connector `name`.

        Returns None if the connector has not been negotiated, or if the reader has failed.
        """
        return self._readers.get(name)

    def has_negotiated(self, name: ConnectorName) -> bool:
        """Returns whether the connector `name` was negotiated, even if the connector's reader has failed since."""
        return name in self._readers

    async def accept_offer(self, name: ConnectorName, offer: bytes, *, arena_fd: int | None) -> None:
        """Creates the reader of the connector `name` from the producer's offer. Does nothing if the reader exists.

        `arena_fd` is the file descriptor of the producer's arena, or None if the producer did not pass one. Raises
        NotReadyError if the connector cannot be used.
        """
        if self._readers.get(name) is None:
            producer = Producer(self.replica, self.incarnation, arena_fd)
            reader = await self._connectors.get(name).connect(offer, producer)
            if self._readers.get(name) is None and not self.acceptances.is_lost:
                self._readers[name] = reader
            else:
                # An offer on another stream was accepted meanwhile, or this state was closed.
                await reader.close()

    async def drop_reader(self, name: ConnectorName, reader: Reader) -> None:
        """Removes and closes a reader that has failed, so that the connector `name` can be negotiated again.

        Does nothing if `reader` has been replaced.
        """
        if self._readers.get(name) is reader:
            self._readers[name] = None
            await reader.close()

    def watch(self, connection: socket.socket, *, died: Callable[[], None]) -> None:
        """Watches the producer's process, and calls `died` when the process terminates. Replaces the previous watch.

        `connection` is a local socket whose other end belongs to the process.
        """
        if self._watch is not None:
            self._watch.close()
        self._watch = watch_peer(connection, died)

    # -- leases

    def attach(self, stream: ReadyQueue[InletAttempt]) -> None:
        """Adds a stream over which the ids of ended leases can be sent to the producer.

        `stream` is the ready queue of the stream.
        """
        self.streams.append(stream)
        self._wake()

    def detach(self, stream: ReadyQueue[InletAttempt]) -> None:
        """Removes a stream that has ended. The ids of ended leases are then sent over the newest remaining stream."""
        if stream in self.streams:
            self.streams.remove(stream)
        self._wake()

    def hold(self, lease_id: int, views: list[Bytes]) -> None:
        """Retains a lease until all arrays in `views`, and all arrays derived from them, are deleted."""
        self.held_lease_ids.add(lease_id)
        when_gone(views, lambda: self._release_on_loop(lease_id))

    def hold_tickets(self, lease_id: int, number: int) -> MakeTicket:
        """Returns the function that makes the `number` tickets of a chunk.

        The tickets retain the lease until all of them have been released or deleted.
        """
        ended = itertools.count(1)

        def end_one() -> None:
            # `next` is atomic between threads, so exactly one call is the last one.
            if next(ended) == number:
                self._release_on_loop(lease_id)

        def make(handover: tensor_pb2.Handover) -> ReceivedTicket:
            self.held_lease_ids.add(lease_id)
            accept = partial(self.acceptances.accept, lease_id)
            return ReceivedTicket(handover, accept=accept, on_release=end_one)

        return make

    def release(self, lease_id: int) -> None:
        """Ends a lease and sends the lease's id to the producer over the newest stream."""
        self.held_lease_ids.discard(lease_id)
        self.released_ids.append(lease_id)
        self._wake()

    def release_unless_held(self, lease_id: int) -> None:
        """Ends the lease of a chunk that was not accepted.

        Does nothing if `lease_id` is 0, or if the lease is in use. If a producer sends a chunk twice, both messages
        have the same lease.
        """
        if lease_id and lease_id not in self.held_lease_ids:
            self.release(lease_id)

    def report(self, response: stage_pb2.PutChunkResponse) -> None:
        """Adds the ids of ended leases and the acceptances that have not been sent yet to `response`."""
        if self.released_ids:
            response.replies.add().release.lease_ids.extend(self.released_ids)
            self.released_ids = []
        for accept in self.acceptances.take_unsent():
            response.replies.add().accept.CopyFrom(accept)

    async def close(self) -> None:
        """Closes the readers, stops watching the producer's process, and fails the acceptances. Idempotent."""
        self.acceptances.lose()
        if self._watch is not None:
            self._watch.close()
            self._watch = None
        for name, reader in list(self._readers.items()):
            if reader is not None:
                await self.drop_reader(name, reader)

    # -- inner workings

    def _wake(self) -> None:
        """Lets the newest stream send the ids of ended leases and the acceptances."""
        if self.streams:
            self.streams[-1].wake()

    def _release_on_loop(self, lease_id: int) -> None:
        """Ends a lease on the thread of the event loop.

        Called on the thread that has deleted the last view of the lease's memory, or the last ticket.
        """
        if threading.get_ident() == self._thread:
            self.release(lease_id)
        elif not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self.release, lease_id)
