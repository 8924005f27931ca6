"""The chunks that a flow has sent. Delivered chunks are retained, so that they can be sent again.

They are retained within a memory budget, and while consumers have leases on them.
"""

from collections import OrderedDict, defaultdict, deque
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass

from stagemesh.common.errors import InvalidChunkError
from stagemesh.common.notification import Notifier
from stagemesh.common.tensors import Tensors
from stagemesh.connectors.arena.arena import Arena, Region
from stagemesh.connectors.base import ArenaRange, Connector
from stagemesh.connectors.edge import MetadataValue
from stagemesh.connectors.stream import wire
from stagemesh.v1 import chunk_pb2

RETAINED_FRACTION = 4
"""The retained delivered chunks use at most 1 / RETAINED_FRACTION of the arena, and of each worker's partition."""

_ARENA = 0
"""The partition number of the arena's memory outside the workers' partitions."""


@dataclass(eq=False, slots=True)
class SentChunk:
    """A numbered chunk of a flow. It is retained until it is evicted, or until its flow has ended."""

    seq: int
    shape: wire.PacketShape | None = None
    """The shape of the packet, or None if the chunk is an End or Abort."""
    tensors: Tensors | None = None
    metadata: Mapping[str, MetadataValue] | None = None
    regions: tuple[Region, ...] = ()
    """The arena regions that contain the tensors. Empty if the chunk is sent inline."""
    places: Sequence[ArenaRange] = ()
    """The arena range of each tensor. Empty if the chunk is sent inline."""
    tail: wire.Tail | None = None
    """The End or Abort message, or None if the chunk contains data."""
    end_bytes: int = 0
    """The flow's payload bytes up to and including this chunk.

    The chunk may be sent if the credit limit is at least this number.
    """
    lease_id: int = 0
    """The id of the consumer's lease on the regions, or 0 if the consumer has no lease."""
    partition: int = 0
    """The number of the arena's partition in whose budget the chunk is retained. 0 if the chunk is in no partition."""
    reader: Connector | None = None
    """The connector through which the consumer is expected to read the chunk, or None if no read is expected."""

    @property
    def size_bytes(self) -> int:
        """The number of payload bytes. 0 for an End or Abort."""
        return self.shape.size_bytes if self.shape else 0

    def mark_read(self) -> None:
        """Records that the consumer has read the chunk or will not read it."""
        if self.reader is not None:
            self.reader.expect_reads(-1)
            self.reader = None

    def release(self) -> None:
        """Releases the chunk's tensors and regions. Leases may still retain the regions."""
        self.mark_read()
        self.tensors = None
        regions, self.regions = self.regions, ()
        for region in regions:
            region.release()


class Leases:
    """The leases of one consumer on regions of this replica's arena."""

    def __init__(self) -> None:
        self._regions: dict[int, Sequence[Region]] = {}
        self._last_id = 0

    def __bool__(self) -> bool:
        """Returns whether the consumer has at least one lease."""
        return bool(self._regions)

    def grant(self, regions: Sequence[Region]) -> int:
        """Grants a lease, which retains the regions until the lease ends. Returns the lease's id."""
        self._last_id += 1
        for region in regions:
            region.retain()
        self._regions[self._last_id] = regions
        return self._last_id

    def end(self, lease_id: int) -> None:
        """Ends a lease and releases its regions. Does nothing if the id is unknown."""
        for region in self._regions.pop(lease_id, ()):
            region.release()

    def end_all(self, *, except_ids: Container[int] = ()) -> None:
        """Ends all leases except the leases in `except_ids`."""
        for lease_id in [each for each in self._regions if each not in except_ids]:
            self.end(lease_id)


class SentChunks:
    """The numbered chunks of one flow: unacknowledged chunks, and delivered chunks that are retained.

    `pending` contains the unacknowledged chunks that the current attempt has yet to send.
    """

    def __init__(self, retention: "Retention") -> None:
        self.next_seq = self.acked = 0
        self.sent_bytes = 0
        """The sum of the payload bytes of all chunks that have been appended."""
        self.ended = self.is_aborted = False
        """Whether the flow's End or Abort has been appended, and whether it is an Abort."""
        self.is_bulk = False
        """Whether the flow has large chunks, which must not delay the chunks of other flows on the main stream."""
        self.wanted_bytes = 0
        """The size in bytes of the chunk that waits for credit. 0 if no chunk waits."""
        self.changed = Notifier()
        """Fired when the flow's chunks, credit or attempt changes."""
        self.pending: deque[SentChunk] = deque()
        """The chunks that the current attempt has yet to send, oldest first."""
        self.unacked: deque[SentChunk] = deque()
        """The chunks that the consumer has not acknowledged, oldest first."""
        self._kept: deque[SentChunk] = deque()
        self._retention = retention

    @property
    def is_delivered(self) -> bool:
        """Whether the consumer has received all chunks, including End or Abort."""
        return self.ended and self.acked == self.next_seq

    def append(self, sent: SentChunk) -> None:
        """Adds the next chunk of the flow. Its number must be `next_seq`."""
        self.next_seq += 1
        self.sent_bytes += sent.size_bytes
        self.ended, self.is_aborted = sent.tail is not None, isinstance(sent.tail, chunk_pb2.ChunkAbort)
        sent.end_bytes = self.sent_bytes
        self.unacked.append(sent)

    def drop_beyond(self, limit_bytes: int) -> None:
        """Drops the chunks that exceed the credit limit, so that an Abort does not wait for credit."""
        while self.pending and self.pending[-1].end_bytes > limit_bytes:
            self.pending.pop()
        while self.unacked and self.unacked[-1].end_bytes > limit_bytes:
            sent = self.unacked.pop()
            self.next_seq -= 1
            self.sent_bytes -= sent.size_bytes
            sent.release()

    def acknowledge(self, next_seq: int) -> bool:
        """Marks all chunks below `next_seq` as delivered. Returns True if any chunk was not marked before.

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
        """Clears the pending chunks, because no stream carries the flow."""
        self.pending.clear()
        for sent in self.unacked:
            sent.mark_read()

    def resend(self, leases: Leases) -> None:
        """Makes all unacknowledged chunks pending again. Ends their leases, which the consumer does not use."""
        for sent in self.unacked:
            sent.mark_read()
            if sent.lease_id:
                leases.end(sent.lease_id)
                sent.lease_id = 0
        self.pending = deque(self.unacked)

    def restart(self) -> None:
        """Marks all chunks as unacknowledged, so that they are sent again to another consumer."""
        self.stop_sending()
        while self._kept:
            sent = self._kept.pop()
            self._retention.forget(sent)
            self.unacked.appendleft(sent)
        self.acked = 0
        for sent in self.unacked:
            # The link to the previous consumer ends that consumer's leases.
            sent.lease_id = 0

    def retained_from(self, first_seq: int) -> list[SentChunk] | None:
        """Returns the chunks from `first_seq` on, or None if chunk `first_seq` is no longer retained."""
        oldest = self._kept[0].seq if self._kept else self.acked
        if first_seq < oldest:
            return None
        return [sent for sent in (*self._kept, *self.unacked) if sent.seq >= first_seq]

    def evict(self, last: SentChunk) -> None:
        """Releases the delivered chunks up to and including `last`."""
        while self._kept and self._kept[0].seq <= last.seq:
            sent = self._kept.popleft()
            self._retention.forget(sent)
            sent.release()

    def release(self) -> None:
        """Releases all chunks, because the flow has ended."""
        self.pending.clear()
        if self._kept:
            self.evict(self._kept[-1])
        while self.unacked:
            self.unacked.popleft().release()


class Retention:
    """Retains delivered chunks of a replica's flows within a budget of arena memory, so that they can be sent again.

    Each worker's partition of the arena has its own budget, because the worker cannot write elsewhere.
    """

    def __init__(self, arena: Arena) -> None:
        self.arena = arena
        # Unlike a dict, an OrderedDict finds its first key in constant time after many keys were removed.
        self._kept: defaultdict[int, OrderedDict[SentChunk, SentChunks]] = defaultdict(OrderedDict)
        """The retained chunks of each partition, oldest first, with the chunks of their flow."""
        self._kept_bytes: defaultdict[int, int] = defaultdict(int)

    def keep(self, chunks: SentChunks, sent: SentChunk) -> None:
        """Adds a delivered chunk. Evicts the oldest chunks if the memory budget is exceeded."""
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
        """Removes a chunk that its flow no longer retains as delivered."""
        del self._kept[sent.partition][sent]
        self._kept_bytes[sent.partition] -= sent.size_bytes

    def evict_oldest(self, partition: int = _ARENA) -> bool:
        """Evicts the oldest retained chunk of a partition. Returns False if no chunk is retained there."""
        oldest = next(iter(self._kept[partition].items()), None)
        if oldest is None:
            return False
        sent, chunks = oldest
        chunks.evict(sent)
        return True
