"""The packets of an edge that are to be read, the count of their rows, and the credit that reading them grants."""

from collections import deque
from collections.abc import Callable, Mapping

from stagemesh.common.errors import InvalidChunkError, NotReadyError
from stagemesh.common.notifier import Notifier
from stagemesh.common.tensors import Array
from stagemesh.connectors.edge import MetadataValue, Packet

CONTEXT, TOKEN_START = "context_frames", "token_start"
"""Metadata keys: the number of rows repeated at a packet's front, and the token at which its rows start."""


def rows_of(tensor: Array) -> int:
    """Returns a tensor's length along its first axis; a tensor without axes is one row."""
    return tensor.shape[0] if tensor.ndim else 1


def add_rows(rows: dict[str, int], packet: Packet) -> None:
    """Adds a packet's rows to the count of each tensor."""
    for name, tensor in packet.tensors.items():
        rows[name] = rows.get(name, 0) + (tensor.shape[0] if tensor.ndim else 1)


class RowPosition:
    """Counts the rows of an edge's packets. Of another producer's packets, it drops the rows counted before."""

    def __init__(self, *, edge: str) -> None:
        self._edge = edge
        self._counted: dict[str, int] = {}
        self._replayed: dict[str, int] | None = None
        """Rows that the present producer has sent, by tensor; None if it cannot repeat counted rows."""
        self._has_context = False

    @property
    def repeats(self) -> bool:
        """Whether the present producer has yet to reach the rows that were counted before it."""
        return self._replayed is not None

    def check(self, first_rows: Mapping[str, int]) -> None:
        """Raises NotReadyError (ROWS_MISSING) if a flow that begins at these rows would leave rows out."""
        for name, first in first_rows.items():
            counted = 0 if self._has_context else self._counted.get(name, 0)
            if first > counted:
                raise NotReadyError(
                    f"edge {self._edge}: the new flow begins at row {first} of tensor {name!r}, but only {counted} "
                    "rows of it have arrived; start its producer from an earlier checkpoint or from the beginning",
                    reason="ROWS_MISSING",
                    metadata={"edge": self._edge, "tensor": name, "rows": str(counted)},
                )

    def begin(self, first_rows: Mapping[str, int]) -> None:
        """Expects another producer's packets, which begin at `first_rows` (0 for a tensor that it does not name)."""
        self._replayed = {name: first_rows.get(name, 0) for name in self._counted}
        self._end_replay()

    def take(self, packet: Packet) -> Packet | None:
        """Counts a packet; returns the part whose rows are new, or None if no row is new."""
        self._has_context = self._has_context or CONTEXT in packet.metadata
        if self._replayed is not None:
            return self._new_part(packet, self._replayed)
        add_rows(self._counted, packet)
        return packet

    def check_end(self) -> None:
        """Raises InvalidChunkError if a producer has sent fewer rows than were counted before it."""
        if self._replayed is not None:
            raise InvalidChunkError(
                f"edge {self._edge}: the new attempt of its producer sent fewer rows than the one before; "
                "a stage must reproduce its output from the same seed",
                reason="ATTEMPTS_DIFFER",
                metadata={"edge": self._edge},
            )

    def _new_part(self, packet: Packet, replayed: dict[str, int]) -> Packet | None:
        skips: dict[str, int] = {}
        rows = 0
        for name, tensor in packet.tensors.items():
            count, reached = rows_of(tensor), replayed.get(name, 0)
            skips[name] = skip = min(count, max(0, self._counted.get(name, 0) - reached))
            replayed[name] = reached + count
            self._counted[name] = max(self._counted.get(name, 0), replayed[name])
            rows += count - skip
        self._end_replay()
        if not rows:
            return None
        return _without(packet, skips, edge=self._edge) if any(skips.values()) else packet

    def _end_replay(self) -> None:
        """Expects no repeated rows any more if every tensor has reached its count."""
        replayed = self._replayed
        if replayed is not None and all(replayed.get(name, 0) >= rows for name, rows in self._counted.items()):
            self._replayed = None


class PacketQueue:
    """The packets of an edge, over all its attempts, that have arrived and are to be read."""

    def __init__(self, *, edge: str) -> None:
        self.rows = RowPosition(edge=edge)
        self.has_ended = False
        """Whether every packet of the edge has arrived."""
        self.changed = Notifier()
        """Fired when a packet has arrived, or when the present attempt has ended or failed."""
        self._packets: deque[tuple[Packet, int, Callable[[int], None]]] = deque()

    @property
    def waiting(self) -> int:
        """Number of packets to be read."""
        return len(self._packets)

    @property
    def waiting_bytes(self) -> int:
        """Payload bytes of the packets to be read."""
        return sum(packet.size_bytes for packet, _, _ in self._packets)

    def accept(self, packet: Packet, consume: Callable[[int], None]) -> None:
        """Queues the rows of a packet that have not arrived before. Raises InvalidChunkError if attempts differ.

        Args:
            packet: The packet as it arrived.
            consume: Called with the packet's size in bytes when it is read, or at once if none of its rows is new.
        """
        new = self.rows.take(packet)
        if new is None:
            consume(packet.size_bytes)
        else:
            self._packets.append((new, packet.size_bytes, consume))

    def accept_end(self) -> None:
        """Ends the edge after the queued packets. Raises InvalidChunkError if rows that arrived before are missing."""
        self.rows.check_end()
        self.has_ended = True

    def pop(self) -> Packet:
        """Returns the oldest packet, which counts as consumed from now on."""
        packet, size_bytes, consume = self._packets.popleft()
        consume(size_bytes)
        return packet

    def clear(self) -> None:
        """Drops the packets to be read."""
        self._packets.clear()


class Credit:
    """The payload bytes that a producer may send, counted from the flow's first chunk."""

    def __init__(self, window_bytes: int) -> None:
        self.limit_bytes = window_bytes
        self.received_bytes = 0
        self._window_bytes = window_bytes
        self._reported_bytes = window_bytes
        self._consumed_bytes = self._demanded_bytes = 0

    @property
    def available_bytes(self) -> int:
        """Bytes that may still be sent."""
        return max(0, self.limit_bytes - self.received_bytes)

    def consume(self, size_bytes: int) -> bool:
        """Counts bytes as read; returns whether that raises the limit, which it does in steps of a quarter window."""
        self._consumed_bytes += size_bytes
        limit_bytes = self._consumed_bytes + self._window_bytes
        is_raised = limit_bytes - self.limit_bytes >= max(1, self._window_bytes // 4)
        if is_raised:
            self.limit_bytes = limit_bytes
        return self._meet_demand() or is_raised

    def demand(self, size_bytes: int) -> bool:
        """Grants that many bytes once everything before is read; returns whether that raises the limit now."""
        self._demanded_bytes = size_bytes
        return self._meet_demand()

    def report(self) -> int:
        """Returns the limit if it was raised since the last report, or else 0."""
        if self.limit_bytes <= self._reported_bytes:
            return 0
        self._reported_bytes = self.limit_bytes
        return self.limit_bytes

    def _meet_demand(self) -> bool:
        if not self._demanded_bytes or self._consumed_bytes != self.received_bytes:
            return False
        limit_bytes, self._demanded_bytes = self.received_bytes + self._demanded_bytes, 0
        is_raised = limit_bytes > self.limit_bytes
        self.limit_bytes = max(self.limit_bytes, limit_bytes)
        return is_raised


def _without(packet: Packet, skips: Mapping[str, int], *, edge: str) -> Packet:
    """Returns the packet without the first `skips` rows of each tensor."""
    if packet.metadata.get(CONTEXT):
        raise InvalidChunkError(
            f"edge {edge}: the new attempt of its producer cut chunks with left context at other rows",
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
