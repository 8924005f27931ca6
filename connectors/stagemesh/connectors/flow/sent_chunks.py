"""The chunks that a flow has sent, which are retained so that they can be sent again.

A delivered chunk is retained within a budget of arena memory. The chunk's regions are also retained while consumers
have leases on them.
"""

import itertools
import time
from collections import OrderedDict, defaultdict, deque
from collections.abc import AsyncGenerator, Collection, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from stagemesh.common.errors import InvalidChunkError
from stagemesh.common.notification import Notifier
from stagemesh.common.wire.telemetry import StepTrace
from stagemesh.common.wire.tensors import Tensors
from stagemesh.connectors import fragments, wire
from stagemesh.connectors.arena.arena import Arena, Region
from stagemesh.connectors.base import ArenaRange, Connector
from stagemesh.connectors.flow.edge_meters import EdgeMeters
from stagemesh.connectors.flow.flow_control import CreditLimit
from stagemesh.connectors.packets import EdgeKey, FirstRows, MetadataValue, OfferedTicket, Packet
from stagemesh.v1 import chunk_pb2, stage_pb2

RETAINED_FRACTION = 4
"""The divisor of the memory budget. Retained delivered chunks may use 1 / RETAINED_FRACTION of the memory.

The budget applies separately to the arena and to each worker's partition.
"""

_lease_ids = itertools.count(1)
"""The source of lease ids, which are unique in this process.

A consumer that is reached at two addresses can therefore release a lease over either connection.
"""
_ARENA = 0
"""The partition number of the arena memory that is outside all workers' partitions."""


@dataclass(eq=False, slots=True)
class SentChunk:
    """A numbered chunk of a flow. The chunk is retained until it is evicted or until its flow has ended."""

    seq: int
    shape: wire.PacketShape | None = None
    """The shapes and dtypes of the chunk's tensors, or None if the chunk is an End or Abort message."""
    tensors: Tensors | None = None
    metadata: Mapping[str, MetadataValue] | None = None
    first_rows: FirstRows = ()
    regions: tuple[Region, ...] = ()
    """The arena regions that contain the tensors. Empty if the chunk is sent inline."""
    places: Sequence[ArenaRange] = ()
    """The arena range of each tensor. Empty if the chunk is sent inline."""
    tail: chunk_pb2.Chunk | None = None
    """A chunk with an End or Abort message, or None if the chunk contains data."""
    end_bytes: int = 0
    """The total number of payload bytes of the flow's chunks up to and including this chunk.

    The chunk may be sent if the credit limit is at least this number.
    """
    lease_id: int = 0
    """The id of the consumer's lease on the chunk's regions, or 0 if the consumer has no lease."""
    partition: int = 0
    """The number of the arena partition that contains the chunk. 0 if the chunk is outside all partitions.

    The chunk counts toward that partition's budget for delivered chunks.
    """
    reader: Connector | None = None
    """The connector through which the consumer is expected to read the chunk. None if no read is expected."""
    tickets: Mapping[str, OfferedTicket] | None = None
    """The tickets of the chunk by name, or None if it has none.

    The chunk has a reference to each ticket until the tickets are used or the chunk is released.
    """
    offered_s: float = 0.0
    """When the outlet received the chunk, or received another consumer for it, on the monotonic clock."""
    sent_s: float = 0.0
    """When the chunk was last sent, on the monotonic clock. 0 if it has not been sent."""
    size_bytes: int = field(init=False)
    """The number of payload bytes of the chunk. 0 for an End or Abort message."""
    _are_tickets_used: bool = False

    def __post_init__(self) -> None:
        self.size_bytes = self.shape.size_bytes if self.shape else 0

    def is_within(self, credit: CreditLimit) -> bool:
        """Returns whether the chunk may be sent with this credit. An End or Abort message needs none of its own."""
        return self.end_bytes <= credit.size_bytes and (self.tail is not None or self.seq < credit.chunks)

    @property
    def can_be_sent(self) -> bool:
        """Whether a consumer can still use the chunk. False if its tickets were used or their state was released."""
        return not self._are_tickets_used and not any(ticket.is_released for ticket in self.offered)

    @property
    def offered(self) -> Collection[OfferedTicket]:
        """The tickets of the chunk. Empty if it has none."""
        return self.tickets.values() if self.tickets else ()

    def use_tickets(self) -> None:
        """Releases the chunk's references to its tickets, because its consumer has read their state. Idempotent."""
        if not self._are_tickets_used:
            self._are_tickets_used = True
            for ticket in self.offered:
                ticket.release()

    def fill(
        self, chunk: chunk_pb2.Chunk, key: chunk_pb2.EdgeKey, *, is_streamed: bool = False, lease_id: int = 0
    ) -> None:
        """Sets the content of the empty message `chunk`, which belongs to the flow `key`.

        If `is_streamed` is True, fragments contain the tensors. Otherwise, a consumer with the lease `lease_id` reads
        them from the arena if they are located there. All other tensors are sent inline.
        """
        chunk.key.CopyFrom(key)
        chunk.seq = self.seq
        if self.tail is not None:
            chunk.MergeFrom(self.tail)
            return
        assert self.tensors is not None, "a chunk that is sent is retained"
        assert self.shape is not None, "data has a shape"
        data, first_rows = chunk.data, self.first_rows
        if is_streamed:
            wire.fill_streamed(data, self.shape, first_rows=first_rows)
        elif lease_id and self.places:
            wire.fill_in_arena(data, self.shape, first_rows=first_rows, places=self.places, lease_id=lease_id)
        else:
            wire.fill_inline(data, self.tensors, self.shape, first_rows=first_rows)
            if self.tickets:
                wire.add_tickets(data, self.tickets, first_rows=first_rows[len(self.tensors) :], lease_id=lease_id)
        if self.metadata:
            wire.fill_metadata(data, self.metadata)

    def replay(self, key: chunk_pb2.EdgeKey) -> Iterator[stage_pb2.GetChunkResponse]:
        """Yields the chunk as messages that can be read without a lease and without other chunks.

        `key` is the flow's key. The regions of the chunk are retained until the last message.
        """
        is_streamed = self.size_bytes > fragments.FRAGMENT_BYTES
        chunk, tensors, regions = chunk_pb2.Chunk(), self.tensors, self.regions
        self.fill(chunk, key, is_streamed=is_streamed)
        for region in regions:
            region.retain()
        try:
            if is_streamed and tensors is not None:
                for message, payload in fragments.split_into_fragments(
                    key, tensors, total_bytes=self.size_bytes, seq=self.seq
                ):
                    message.payload = bytes(payload)
                    yield stage_pb2.GetChunkResponse(fragment=message)
            yield stage_pb2.GetChunkResponse(chunk=chunk)
        finally:
            for region in regions:
                region.release()

    def mark_read(self) -> None:
        """Records that the consumer has read the chunk or will not read it, so that no read is expected."""
        if self.reader is not None:
            self.reader.expect_reads(-1)
            self.reader = None

    def release(self) -> None:
        """Releases the chunk's tensors and its references to regions and tickets. Leases may still retain them."""
        self.mark_read()
        self.tensors = None
        regions, self.regions = self.regions, ()
        for region in regions:
            region.release()
        if self.tickets:
            self.use_tickets()


async def replay_packet(key: EdgeKey, packet: Packet) -> AsyncGenerator[stage_pb2.GetChunkResponse]:
    """Yields the GetChunk responses for a packet that does not belong to a flow.

    The responses are the same as for a flow with the key `key` that consists of this packet and an End message.
    """
    shape, digest = wire.PacketShape(packet), wire.FlowDigest()
    digest.add(shape)
    end = chunk_pb2.Chunk(end=digest.end())
    first_rows = (0,) * len(shape.rows)
    for sent in (SentChunk(0, shape, packet.tensors, packet.metadata, first_rows), SentChunk(1, tail=end)):
        for response in sent.replay(wire.key_to_wire(key)):
            yield response


@dataclass(eq=False, slots=True)
class _TicketLease:
    """A consumer's lease on the tickets of a chunk. Has a reference to each ticket."""

    chunk: SentChunk
    is_accepted: bool = False

    def accept(self) -> bool:
        """Restarts the time limits of the tickets. Returns False if the state of a ticket has been released."""
        if any(ticket.is_released for ticket in self.chunk.offered):
            return False
        for ticket in self.chunk.offered:
            ticket.renew()
        self.is_accepted = True
        return True

    def release(self) -> None:
        for ticket in self.chunk.offered:
            ticket.release()


class Leases:
    """The leases of one consumer on regions of this replica's arena, and on tickets for state of its engine."""

    def __init__(self) -> None:
        self._regions: dict[int, Sequence[Region]] = {}
        self._tickets: dict[int, _TicketLease] = {}

    def __bool__(self) -> bool:
        """Returns whether the consumer has at least one lease."""
        return bool(self._regions or self._tickets)

    def grant(self, regions: Sequence[Region]) -> int:
        """Grants a lease on `regions` and returns its id. The lease retains the regions until the lease ends."""
        lease_id = next(_lease_ids)
        for region in regions:
            region.retain()
        self._regions[lease_id] = regions
        return lease_id

    def grant_tickets(self, chunk: SentChunk) -> int:
        """Grants a lease on the tickets of a chunk and returns its id. The lease retains the tickets until it ends."""
        lease_id = next(_lease_ids)
        for ticket in chunk.offered:
            ticket.retain()
        self._tickets[lease_id] = _TicketLease(chunk)
        return lease_id

    def accept(self, lease_id: int) -> bool:
        """Restarts the time limits of a lease's tickets, because the consumer reads their state.

        Returns False if there is no such lease, or if the state has been released.
        """
        lease = self._tickets.get(lease_id)
        return lease is not None and lease.accept()

    def end(self, lease_id: int) -> bool:
        """Ends the lease `lease_id`, which the consumer does not use any more. Returns False if there is no such lease.

        Releases the regions or tickets of the lease. If the tickets were accepted, their chunk also releases them.
        """
        regions = self._regions.pop(lease_id, None)
        if regions is None:
            return self._end_tickets(lease_id)
        for region in regions:
            region.release()
        return True

    def end_all(self, *, except_ids: Container[int] = ()) -> None:
        """Ends all leases of the consumer, which does not use them any more, except those in `except_ids`."""
        for lease_id in [each for each in (*self._regions, *self._tickets) if each not in except_ids]:
            self.end(lease_id)

    def end_dead(self) -> None:
        """Ends all leases, because the consumer has died. Chunks retain their tickets for another consumer."""
        for lease in self._tickets.values():
            lease.release()
        self._tickets.clear()
        self.end_all()

    def end_unreachable(self) -> None:
        """Ends all leases, because the consumer is unreachable.

        The consumer may still read the state of accepted tickets, which is therefore kept until their time limit.
        """
        self._tickets = {lease_id: lease for lease_id, lease in self._tickets.items() if not lease.is_accepted}
        self.end_dead()

    def _end_tickets(self, lease_id: int) -> bool:
        lease = self._tickets.pop(lease_id, None)
        if lease is None:
            return False
        # A chunk that is bound to another consumer retains its tickets for that consumer.
        if lease.is_accepted and lease.chunk.lease_id == lease_id:
            lease.chunk.use_tickets()
        lease.release()
        return True


class SentChunks:
    """The numbered chunks of one flow: the unacknowledged chunks and the retained delivered chunks.

    `pending` contains the unacknowledged chunks that the current attempt has yet to send.
    """

    def __init__(self, retention: "Retention") -> None:
        self.next_seq = self.acked = 0
        self.sent_bytes = 0
        """The total number of payload bytes of all appended chunks, whether sent or pending."""
        self.handed_over_bytes = 0
        """The total size of the state for which chunks with tickets were appended, in bytes."""
        self.ended = self.is_aborted = False
        """Whether an End or Abort message has been appended, and whether that message is an Abort."""
        self.is_bulk = False
        """Whether the flow has large chunks, and therefore uses the bulk stream.

        On the main stream, large chunks would delay the chunks of other flows.
        """
        self.wanted_bytes = 0
        """The size, in bytes, of the next chunk that waits for credit before it is appended. 0 if no chunk waits."""
        self.trace: StepTrace | None = None
        """The spans of the step that sends the chunks, or None if the step is not traced."""
        self.changed = Notifier()
        """A notifier that fires when the flow's chunks, credit or attempt changes."""
        self.pending: deque[SentChunk] = deque()
        """The unacknowledged chunks that the current attempt has yet to send, oldest first."""
        self.unacked: deque[SentChunk] = deque()
        """The chunks that the consumer has not acknowledged, oldest first. Includes the pending chunks."""
        self._kept: deque[SentChunk] = deque()
        self._retention = retention
        self.meters = retention.meters
        """The counts of all edges of the data plane."""

    @property
    def is_delivered(self) -> bool:
        """Whether the consumer has received all chunks, including the End or Abort message."""
        return self.ended and self.acked == self.next_seq

    def append(self, sent: SentChunk) -> None:
        """Adds the next chunk of the flow. The chunk's number must equal `next_seq`."""
        self.next_seq += 1
        self.sent_bytes += sent.size_bytes
        if sent.tickets:
            self.handed_over_bytes += sum(ticket.size_bytes for ticket in sent.offered)
        self.ended, self.is_aborted = sent.tail is not None, bool(sent.tail and sent.tail.HasField("abort"))
        sent.end_bytes = self.sent_bytes
        self.unacked.append(sent)

    def drop_beyond(self, credit: CreditLimit) -> None:
        """Drops the chunks beyond the limit `credit`. An Abort must not wait for credit."""
        while self.pending and not self.pending[-1].is_within(credit):
            self.pending.pop()
        while self.unacked and not self.unacked[-1].is_within(credit):
            sent = self.unacked.pop()
            self.next_seq -= 1
            self.sent_bytes -= sent.size_bytes
            sent.release()

    def acknowledge(self, next_seq: int) -> bool:
        """Marks all chunks with numbers below `next_seq` as delivered. Returns whether any chunk was newly marked.

        Raises InvalidChunkError if the consumer acknowledges a chunk that was never sent.
        """
        if next_seq > self.next_seq:
            raise InvalidChunkError("the consumer acknowledged a chunk that was never sent")
        if next_seq <= self.acked:
            return False
        self.acked = next_seq
        while self.unacked and self.unacked[0].seq < next_seq:
            sent = self.unacked.popleft()
            sent.mark_read()
            self._kept.append(sent)
            self._retention.keep(self, sent)
        return True

    def stop_sending(self) -> None:
        """Clears the pending chunks, because no stream carries the flow. The chunks remain unacknowledged."""
        self.pending.clear()
        for sent in self.unacked:
            sent.mark_read()

    def resend(self, leases: Leases) -> None:
        """Makes all unacknowledged chunks pending again.

        Ends the leases on these chunks, because the consumer does not use them.
        """
        for sent in self.unacked:
            sent.mark_read()
            if sent.lease_id:
                leases.end(sent.lease_id)
                sent.lease_id = 0
        self.pending = deque(self.unacked)

    def restart(self) -> None:
        """Marks all retained chunks as unacknowledged, so that they are sent again to another consumer."""
        self.stop_sending()
        while self._kept:
            sent = self._kept.pop()
            self._retention.forget(sent)
            self.unacked.appendleft(sent)
        self.acked = 0
        now_s = time.monotonic()
        for sent in self.unacked:
            sent.offered_s = now_s
            # The link to the previous consumer ends that consumer's leases.
            sent.lease_id = 0

    @property
    def can_restart(self) -> bool:
        """Whether another consumer can receive all chunks, starting with the first one."""
        return self.retained_from(0) is not None and all(sent.can_be_sent for sent in (*self._kept, *self.unacked))

    def retained_from(self, first_seq: int) -> list[SentChunk] | None:
        """Returns the chunks with numbers of at least `first_seq`, in order.

        Returns None if chunk `first_seq` is no longer retained.
        """
        oldest = self._kept[0].seq if self._kept else self.acked
        if first_seq < oldest:
            return None
        return [sent for sent in (*self._kept, *self.unacked) if sent.seq >= first_seq]

    def evict(self, last: SentChunk) -> None:
        """Releases the retained delivered chunks up to and including `last`."""
        while self._kept and self._kept[0].seq <= last.seq:
            sent = self._kept.popleft()
            self._retention.forget(sent)
            sent.release()

    def release(self) -> None:
        """Releases all chunks because the flow has ended."""
        self.pending.clear()
        if self._kept:
            self.evict(self._kept[-1])
        while self.unacked:
            self.unacked.popleft().release()


class Retention:
    """The delivered chunks of all flows of a replica, retained within a memory budget so that they can be sent again.

    Each worker's partition of the arena has its own budget, because the worker cannot write outside its partition.
    """

    def __init__(self, arena: Arena, meters: EdgeMeters) -> None:
        self.arena, self.meters = arena, meters
        # Unlike a dict, an OrderedDict finds its first key in constant time after many keys were removed.
        self._kept: defaultdict[int, OrderedDict[SentChunk, SentChunks]] = defaultdict(OrderedDict)
        """The retained chunks by partition number. Maps each chunk, oldest first, to the `SentChunks` of its flow."""
        self._kept_bytes: defaultdict[int, int] = defaultdict(int)

    def keep(self, chunks: SentChunks, sent: SentChunk) -> None:
        """Adds the delivered chunk `sent` of the flow of `chunks`.

        Evicts the oldest chunks if the budget is exceeded.
        """
        size_bytes = self.arena.size_bytes
        if sent.regions:
            sent.partition, size_bytes = self.arena.partition_of(sent.regions[0])
        partition = sent.partition
        self._kept[partition][sent] = chunks
        self._kept_bytes[partition] += sent.size_bytes
        while self._kept_bytes[partition] > size_bytes // RETAINED_FRACTION:
            self.evict_oldest(partition)
        self.arena.wake()

    def forget(self, sent: SentChunk) -> None:
        """Removes a chunk from the budget, because its flow has evicted the chunk or sends it again."""
        del self._kept[sent.partition][sent]
        self._kept_bytes[sent.partition] -= sent.size_bytes

    @property
    def size_bytes(self) -> int:
        """The payload of all retained chunks, in bytes."""
        return sum(self._kept_bytes.values())

    def evict_oldest(self, partition: int = _ARENA) -> bool:
        """Evicts the oldest retained chunk of a partition. Returns False if the partition has no retained chunk."""
        oldest = next(iter(self._kept[partition].items()), None)
        if oldest is None:
            return False
        sent, chunks = oldest
        chunks.evict(sent)
        return True
