"""Where an edge stands, by rows: what an end has taken, and what of another producer's packets is new to it."""

from collections.abc import Mapping

from stagemesh.common.errors import InvalidChunkError, NotReadyError
from stagemesh.common.tensors import Array
from stagemesh.connectors.edge import MetadataValue, Packet

CONTEXT, TOKEN_START = "context_frames", "token_start"
"""What a packet's metadata say: that rows are repeated at its front, and at which token its rows start."""


def rows_of(tensor: Array) -> int:
    """Its length along the first axis; what has no axis is one row."""
    return tensor.shape[0] if tensor.ndim else 1


def add_rows(rows: dict[str, int], packet: Packet) -> None:
    """Counts a packet's rows in, each tensor by itself."""
    for name, tensor in packet.tensors.items():
        rows[name] = rows.get(name, 0) + (tensor.shape[0] if tensor.ndim else 1)


class RowPosition:
    """Counts the rows of an edge's packets, and drops from another producer's what has been counted already."""

    def __init__(self, *, edge: str) -> None:
        self._edge = edge
        self._taken: dict[str, int] = {}
        self._at: dict[str, int] | None = None
        """Where the present producer is, as long as it may repeat something."""
        self._has_context = False

    @property
    def repeats(self) -> bool:
        """Whether the present producer has yet to come to where the edge stands."""
        return self._at is not None

    def check(self, first_rows: Mapping[str, int]) -> None:
        """Raises NotReadyError (ROWS_MISSING) where a flow that begins with these rows would leave some out."""
        for name, first in first_rows.items():
            taken = 0 if self._has_context else self._taken.get(name, 0)
            if first > taken:
                raise NotReadyError(
                    f"edge {self._edge}: the new flow begins at row {first} of tensor {name!r}, and {taken} rows of it "
                    "can be counted here; have its producer start from an earlier checkpoint, or from the beginning",
                    reason="ROWS_MISSING",
                    metadata={"edge": self._edge, "tensor": name, "rows": str(taken)},
                )

    def begin(self, first_rows: Mapping[str, int]) -> None:
        """Another producer's packets come from now on; rows before `first_rows` (0 where not named) do not."""
        self._at = {name: first_rows.get(name, 0) for name in self._taken}
        self._settle()

    def take(self, packet: Packet) -> Packet | None:
        """What is new of a packet; None where nothing is."""
        self._has_context = self._has_context or CONTEXT in packet.metadata
        if self._at is not None:
            return self._rest(packet, self._at)
        add_rows(self._taken, packet)
        return packet

    def check_end(self) -> None:
        """Raises InvalidChunkError where a producer has brought less than was taken of its predecessor."""
        if self._at is not None:
            raise InvalidChunkError(
                f"edge {self._edge}: the new attempt of its producer brought fewer rows than the one before; "
                "a stage must make the same again from the same seed",
                reason="ATTEMPTS_DIFFER",
                metadata={"edge": self._edge},
            )

    def _rest(self, packet: Packet, at: dict[str, int]) -> Packet | None:
        skips: dict[str, int] = {}
        rows = 0
        for name, tensor in packet.tensors.items():
            count, reached = rows_of(tensor), at.get(name, 0)
            skips[name] = skip = min(count, max(0, self._taken.get(name, 0) - reached))
            at[name] = reached + count
            self._taken[name] = max(self._taken.get(name, 0), at[name])
            rows += count - skip
        self._settle()
        if not rows:
            return None
        return _without(packet, skips, edge=self._edge) if any(skips.values()) else packet

    def _settle(self) -> None:
        """Nothing is repeated any more once all tensors have come to where they were."""
        if self._at is not None and all(self._at.get(name, 0) >= taken for name, taken in self._taken.items()):
            self._at = None


def _without(packet: Packet, skips: Mapping[str, int], *, edge: str) -> Packet:
    """The packet without so many rows at the front of each tensor."""
    if packet.metadata.get(CONTEXT):
        raise InvalidChunkError(
            f"edge {edge}: the new attempt of its producer cut chunks with left context in other places",
            reason="ATTEMPTS_DIFFER",
            metadata={"edge": edge},
        )
    tensors = {
        name: tensor[skips[name] :] if tensor.ndim else tensor
        for name, tensor in packet.tensors.items()
        if tensor.ndim or not skips[name]
    }
    metadata: Mapping[str, MetadataValue] = packet.metadata
    start = metadata.get(TOKEN_START)
    if isinstance(start, int) and len(set(skips.values())) == 1:
        metadata = {**metadata, TOKEN_START: start + next(iter(skips.values()))}
    return Packet(tensors, metadata)
