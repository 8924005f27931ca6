"""Chunks that have arrived and are kept for whoever asks for them again, within a budget."""

from collections import defaultdict, deque

from stagemesh.connectors.arena.arena import Arena
from stagemesh.connectors.flow.outlet_attempt import OutletAttempt
from stagemesh.connectors.flow.sent_chunk import SentChunk

RETAINED_SHARE = 4
"""Of the arena, and of a worker's share of it, this part at most."""

_ARENA = 0
_SWEPT_FROM = 1024
"""Chunks that are remembered before those of flows that are over are looked for."""


class Retention:
    """A replica's. What lies in a worker's share has a budget of its own, for the worker can use no other room."""

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._kept: defaultdict[int, deque[tuple[OutletAttempt, SentChunk, int]]] = defaultdict(deque)
        self._kept_bytes: defaultdict[int, int] = defaultdict(int)
        self._swept_at: defaultdict[int, int] = defaultdict(lambda: _SWEPT_FROM)

    def keep(self, flow: OutletAttempt, sent: SentChunk) -> None:
        """Keeps a chunk that has arrived, and no more of them than the budget."""
        share, room_bytes = (
            self._arena.partition_of(sent.regions[0]) if sent.regions else (_ARENA, self._arena.size_bytes)
        )
        self._kept[share].append((flow, sent, sent.size_bytes))
        self._kept_bytes[share] += sent.size_bytes
        while self._kept_bytes[share] > room_bytes // RETAINED_SHARE:
            self._evict_oldest(share)
        if len(self._kept[share]) > self._swept_at[share]:
            self._sweep(share)
        self._arena.wake()

    def evict_oldest(self) -> bool:
        """Drops the oldest chunk in the arena itself; says whether there was one that was still kept."""
        return self._evict_oldest(_ARENA)

    def _evict_oldest(self, share: int) -> bool:
        kept = self._kept[share]
        while kept:
            flow, sent, size_bytes = kept.popleft()
            self._kept_bytes[share] -= size_bytes
            if flow.evict(sent):
                return True
        return False

    def _sweep(self, share: int) -> None:
        """Forgets the chunks of flows that are over, which would be many where they are small."""
        kept = deque(entry for entry in self._kept[share] if entry[0].keeps(entry[1]))
        self._kept[share] = kept
        self._kept_bytes[share] = sum(size_bytes for _, _, size_bytes in kept)
        self._swept_at[share] = max(_SWEPT_FROM, 2 * len(kept))
