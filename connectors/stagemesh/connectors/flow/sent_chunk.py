"""A chunk as its producer keeps it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from stagemesh.common.tensors import Tensors
from stagemesh.connectors.arena.arena import Region
from stagemesh.connectors.base import ArenaRange, Connector
from stagemesh.connectors.edge import MetadataValue
from stagemesh.connectors.stream import wire


@dataclass(eq=False, slots=True)
class SentChunk:
    """A chunk that has its number; kept until it is committed, evicted, or the flow is over."""

    seq: int
    shape: wire.PacketShape | None = None
    """None for a tail."""
    tensors: Tensors | None = None
    metadata: Mapping[str, MetadataValue] | None = None
    regions: tuple[Region, ...] = ()
    """Where the tensors lie, held; empty for those that are inline."""
    places: Sequence[ArenaRange] = ()
    """Of each tensor."""
    tail: wire.Tail | None = None
    lease_id: int = 0
    reader: Connector | None = None
    """By which the consumer has yet to read it."""

    @property
    def size_bytes(self) -> int:
        """Payload bytes."""
        return self.shape.size_bytes if self.shape else 0

    def arrived(self) -> None:
        """The consumer has it, or will not read it."""
        if self.reader is not None:
            self.reader.expect_reads(-1)
            self.reader = None

    def let_go(self) -> None:
        """Gives its memory back."""
        self.arrived()
        self.tensors = None
        regions, self.regions = self.regions, ()
        for region in regions:
            region.release()
