"""What a producer keeps of the chunks that it has sent: until they are committed, within a budget, and under leases."""

from collections import defaultdict, deque
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass

from stagemesh.common.errors import InvalidChunkError
from stagemesh.common.notifier import Notifier
from stagemesh.common.tensors import Tensors
from stagemesh.connectors.arena.arena import Arena, Region
from stagemesh.connectors.base import ArenaRange, Connector
from stagemesh.connectors.edge import MetadataValue
from stagemesh.connectors.stream import wire
from stagemesh.v1 import chunk_pb2

RETAINED_FRACTION = 4
"""Delivered chunks take at most 1 / RETAINED_FRACTION of the arena, and of each worker's partition of it."""

_ARENA = 0
"""The partition number of the memory that belongs to no worker."""
_SWEEP_CHUNKS = 1024
"""Number of entries from which on the entries of finished flows are removed."""


@dataclass(eq=False, slots=True)
class SentChunk:
    """A numbered chunk. It is kept until it is committed or evicted, or until its flow is over."""

    seq: int
    shape: wire.PacketShape | None = None
    """None for an End or Abort."""
    tensors: Tensors | None = None
    metadata: Mapping[str, MetadataValue] | None = None
    regions: tuple[Region, ...] = ()
    """The retained regions of the tensors; empty for an inline chunk."""
    places: Sequence[ArenaRange] = ()
    """The arena range of each tensor."""
    tail: wire.Tail | None = None
    end_bytes: int = 0
    """Payload bytes of the flow up to the end of this chunk; the credit limit must reach this number."""
    lease_id: int = 0
    reader: Connector | None = None
    """The connector by which the consumer has yet to read the chunk."""

    @property
    def size_bytes(self) -> int:
        """Payload bytes."""
        return self.shape.size_bytes if self.shape else 0

    def mark_read(self) -> None:
        """Ends the expected read, because the consumer has the chunk or will not read it."""
        if self.reader is not None:
            self.reader.expect_reads(-1)
            self.reader = None

    def release(self) -> None:
        """Releases the chunk's memory."""
        self.mark_read()
        self.tensors = None
        regions, self.regions = self.regions, ()
        for region in regions:
            region.release()


class Leases:
    """The leases that one consumer holds on regions of this replica's arena."""

    def __init__(self) -> None:
        self._regions: dict[int, Sequence[Region]] = {}
        self._last_id = 0

    def __bool__(self) -> bool:
        """Returns whether the consumer holds a lease."""
        return bool(self._regions)

    def grant(self, regions: Sequence[Region]) -> int:
        """Retains regions until the lease ends; returns its id."""
        self._last_id += 1
        for region in regions:
            region.retain()
        self._regions[self._last_id] = regions
        return self._last_id

    def end(self, lease_id: int) -> None:
        """Ends a lease. Does nothing for an unknown id."""
        for region in self._regions.pop(lease_id, ()):
            region.release()

    def end_all(self, *, except_ids: Container[int] = ()) -> None:
        """Ends all leases but those of `except_ids`."""
        for lease_id in [each for each in self._regions if each not in except_ids]:
            self.end(lease_id)


class Ledger:
    """The numbered chunks of one flow: to be sent (`pending`), sent and not acknowledged, delivered and kept."""

    def __init__(self, retention: "Retention") -> None:
        self.next_seq = self.acked = 0
        self.sent_chunks = self.sent_bytes = 0
        """Data chunks and payload bytes that have their numbers."""
        self.ended = False
        """Whether End or Abort has its number."""
        self.is_bulk = False
        """Whether the flow has large chunks, which must not delay those of other flows on the main stream."""
        self.wanted_bytes = 0
        """Size of the chunk that waits for credit."""
        self.changed = Notifier()
        self.pending: deque[SentChunk] = deque()
        """Chunks that the present attempt has yet to send, oldest first."""
        self.unacked: deque[SentChunk] = deque()
        self._kept: deque[SentChunk] = deque()
        self._retention = retention

    @property
    def is_delivered(self) -> bool:
        """Whether the consumer has every chunk, End or Abort included."""
        return self.ended and self.acked == self.next_seq

    @property
    def is_aborted(self) -> bool:
        """Whether the last chunk of the flow is an Abort."""
        chunks = self.unacked or self._kept
        return bool(chunks) and isinstance(chunks[-1].tail, chunk_pb2.ChunkAbort)

    def append(self, sent: SentChunk) -> None:
        """Adds the next chunk, which bears the number `next_seq`."""
        self.next_seq += 1
        if sent.tail is None:
            self.sent_chunks += 1
            self.sent_bytes += sent.size_bytes
        else:
            self.ended = True
        sent.end_bytes = self.sent_bytes
        self.unacked.append(sent)

    def drop_beyond(self, limit_bytes: int) -> None:
        """Drops chunks that lack credit, so that an Abort need not wait for it."""
        while self.pending and self.pending[-1].end_bytes > limit_bytes:
            self.pending.pop()
        while self.unacked and self.unacked[-1].end_bytes > limit_bytes:
            sent = self.unacked.pop()
            self.next_seq -= 1
            self.sent_chunks -= 1
            self.sent_bytes -= sent.size_bytes
            sent.release()

    def acknowledge(self, next_seq: int) -> bool:
        """Moves chunks below `next_seq` to the kept ones; returns whether that is new.

        Raises InvalidChunkError for a chunk that was never sent.
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
        """Leaves nothing pending, because no stream carries the flow."""
        self.pending.clear()
        for sent in self.unacked:
            sent.mark_read()

    def resend(self, leases: Leases) -> None:
        """Makes all unacknowledged chunks pending again; the consumer does not use their leases."""
        for sent in self.unacked:
            sent.mark_read()
            if sent.lease_id:
                leases.end(sent.lease_id)
                sent.lease_id = 0
        self.pending = deque(self.unacked)

    def restart(self) -> None:
        """Has every chunk sent again, from the first one on, to another consumer."""
        self.stop_sending()
        self.unacked.extendleft(reversed(self._kept))
        self._kept.clear()
        self.acked = 0
        for sent in self.unacked:
            # The former consumer's leases end with its own link.
            sent.lease_id = 0

    @property
    def is_complete(self) -> bool:
        """Whether every chunk that has its number is still kept."""
        return not self.sent_chunks or self.retained_from(0) is not None

    def retained_from(self, first_seq: int) -> list[SentChunk] | None:
        """Returns the kept chunks from `first_seq` on, or None if the first of them is not kept any more."""
        oldest = self._kept[0].seq if self._kept else self.acked
        if first_seq < oldest:
            return None
        return [sent for sent in (*self._kept, *self.unacked) if sent.seq >= first_seq]

    def keeps(self, sent: SentChunk) -> bool:
        """Returns whether a delivered chunk is still kept."""
        return bool(self._kept) and sent.seq >= self._kept[0].seq

    def evict(self, sent: SentChunk) -> bool:
        """Releases a delivered chunk and those before it; returns whether it was still kept."""
        if not self.keeps(sent):
            return False
        while self._kept and self._kept[0].seq <= sent.seq:
            self._kept.popleft().release()
        return True

    def release(self) -> None:
        """Releases all chunks."""
        self.pending.clear()
        for chunks in (self._kept, self.unacked):
            while chunks:
                chunks.popleft().release()


class Retention:
    """The delivered chunks of all flows of a replica, kept within a budget for consumers that ask for them again.

    Each worker's partition of the arena has a budget of its own, because the worker can write nowhere else.
    """

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._kept: defaultdict[int, deque[tuple[Ledger, SentChunk, int]]] = defaultdict(deque)
        self._kept_bytes: defaultdict[int, int] = defaultdict(int)
        self._sweep_chunks: defaultdict[int, int] = defaultdict(lambda: _SWEEP_CHUNKS)

    def keep(self, ledger: Ledger, sent: SentChunk) -> None:
        """Counts a delivered chunk, and evicts the oldest ones beyond the budget."""
        arena = self._arena
        partition, size_bytes = arena.partition_of(sent.regions[0]) if sent.regions else (_ARENA, arena.size_bytes)
        self._kept[partition].append((ledger, sent, sent.size_bytes))
        self._kept_bytes[partition] += sent.size_bytes
        while self._kept_bytes[partition] > size_bytes // RETAINED_FRACTION:
            self._evict_oldest(partition)
        if len(self._kept[partition]) > self._sweep_chunks[partition]:
            self._sweep(partition)
        arena.wake()

    def evict_oldest(self) -> bool:
        """Evicts the oldest kept chunk outside of the workers' partitions; returns whether there was one."""
        return self._evict_oldest(_ARENA)

    def _evict_oldest(self, partition: int) -> bool:
        kept = self._kept[partition]
        while kept:
            ledger, sent, size_bytes = kept.popleft()
            self._kept_bytes[partition] -= size_bytes
            if ledger.evict(sent):
                return True
        return False

    def _sweep(self, partition: int) -> None:
        """Removes the entries of finished flows, of which there would be many if chunks are small."""
        kept = deque(entry for entry in self._kept[partition] if entry[0].keeps(entry[1]))
        self._kept[partition] = kept
        self._kept_bytes[partition] = sum(size_bytes for _, _, size_bytes in kept)
        self._sweep_chunks[partition] = max(_SWEEP_CHUNKS, 2 * len(kept))
