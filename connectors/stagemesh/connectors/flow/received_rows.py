"""The rows that have arrived over an edge, and the queue of its packets.

Drops the rows that a new producer sends again.
"""

from collections import deque
from collections.abc import Callable, Collection, Mapping

from stagemesh.common.errors import InvalidChunkError, NotReadyError
from stagemesh.common.notification import Notifier
from stagemesh.connectors.packets import MetadataValue, Packet

CONTEXT, TOKEN_START = "context_frames", "token_start"
"""Metadata keys of a packet.

CONTEXT is the key for the number of repeated rows at the front of the packet. TOKEN_START is the key for the index of
the token to which the packet's first row belongs.
"""


def add_rows(rows: dict[str, int], packet: Packet) -> None:
    """Adds the packet's rows to `rows`, which maps each tensor name to a number of rows.

    The number of rows of a tensor is its length along the first axis, or 1 if it has no axes. A ticket is one row.
    """
    for name, tensor in packet.tensors.items():
        rows[name] = rows.get(name, 0) + (tensor.shape[0] if tensor.ndim else 1)
    if packet.tickets:
        for name in packet.tickets:
            rows[name] = rows.get(name, 0) + 1


class ReceivedRows:
    """Counts the received rows of each tensor, and drops the rows that a new producer sends again.

    `edge` is the edge's name in error messages. `counted` is the number of rows that have been received before.
    """

    def __init__(self, *, edge: str, counted: Mapping[str, int] | None = None) -> None:
        self._edge = edge
        self.counted: dict[str, int] = dict(counted or {})
        """The number of received rows by tensor name."""
        self._replayed: dict[str, int] | None = None
        """The next row that a repeating producer will send, by tensor name. None if all further rows are new."""
        self.has_context = False
        """Whether a packet with left context has arrived. The row counts then depend on how chunks were cut."""

    @property
    def is_repeating(self) -> bool:
        """Whether the present producer has not yet sent all rows that arrived from previous producers."""
        return self._replayed is not None

    def check_rows(self, first_rows: Mapping[str, int]) -> None:
        """Raises NotReadyError (ROWS_MISSING) if a producer that begins at `first_rows` would omit rows that are
        needed.

        `first_rows` maps each tensor's name to the first row that the producer would send.
        """
        for name, first in first_rows.items():
            counted = 0 if self.has_context else self.counted.get(name, 0)
            if first > counted:
                raise NotReadyError(
                    f"edge {self._edge}: the new flow begins at row {first} of tensor {name!r}, but only {counted} "
                    "of its rows have arrived; start the producer from an earlier checkpoint or from the beginning",
                    reason="ROWS_MISSING",
                    metadata={"edge": self._edge, "tensor": name, "rows": str(counted)},
                )

    def begin(self, first_rows: Mapping[str, int]) -> None:
        """Prepares for the packets of another producer.

        `first_rows` maps each tensor's name to the first row that the producer sends. A missing name means row 0.
        """
        self._replayed = {name: first_rows.get(name, 0) for name in self.counted}
        self._end_replay()

    def new_part(self, packet: Packet) -> Packet | None:
        """Counts the rows of a packet. Returns the packet without the rows that have already arrived.

        Returns None if no row is new. Raises InvalidChunkError (ATTEMPTS_DIFFER) if a packet with left context has both
        old and new rows.
        """
        self.has_context = self.has_context or CONTEXT in packet.metadata
        if self._replayed is None:
            add_rows(self.counted, packet)
            return packet
        sent: dict[str, int] = {}
        add_rows(sent, packet)
        already = {name: self.counted.get(name, 0) - self._replayed.get(name, 0) for name in sent}
        add_rows(self._replayed, packet)
        skips: dict[str, int] = {}
        has_new = False
        for name, rows in sent.items():
            skips[name] = skip = min(rows, max(0, already[name]))
            has_new = has_new or rows > skip
            self.counted[name] = max(self.counted.get(name, 0), self._replayed[name])
        self._end_replay()
        if not has_new:
            return None
        return self._without(packet, skips) if any(skips.values()) else packet

    # -- inner workings

    def _end_replay(self) -> None:
        """Stops dropping rows if the current producer has sent all rows that arrived from previous producers."""
        replayed = self._replayed
        if replayed is not None and all(replayed.get(name, 0) >= rows for name, rows in self.counted.items()):
            self._replayed = None

    def _without(self, packet: Packet, skips: Mapping[str, int]) -> Packet:
        """Returns the packet without the first rows of its tensors. `skips` maps each tensor name to a number of rows.

        Raises InvalidChunkError (ATTEMPTS_DIFFER) if the packet has left context.
        """
        if packet.metadata.get(CONTEXT):
            raise self._attempts_differ("cut chunks with left context at different rows")
        tensors = {
            name: tensor[skips[name] :] if tensor.ndim else tensor
            for name, tensor in packet.tensors.items()
            if tensor.ndim or not skips[name]
        }
        tickets = {name: ticket for name, ticket in packet.tickets.items() if not skips[name]}
        metadata: Mapping[str, MetadataValue] = packet.metadata
        start = metadata.get(TOKEN_START)
        skipped = {skips[name] for name in packet.tensors}
        if isinstance(start, int) and len(skipped) == 1:
            metadata = {**metadata, TOKEN_START: start + skipped.pop()}
        return Packet(tensors, metadata, tickets)

    def _attempts_differ(self, difference: str) -> InvalidChunkError:
        return InvalidChunkError(
            f"edge {self._edge}: the new attempt of its producer {difference}",
            reason="ATTEMPTS_DIFFER",
            metadata={"edge": self._edge},
        )


class PacketQueue(ReceivedRows):
    """The packets of an edge that have arrived but have not been read. All attempts of an inlet share the queue.

    The queue contains only rows that no earlier producer of the edge has sent.
    """

    def __init__(self, *, edge: str, ticket_kinds: Collection[str] = ()) -> None:
        super().__init__(edge=edge)
        self.ticket_kinds = ticket_kinds
        """The kinds of tickets that the reader accepts."""
        self.handed_over_bytes = 0
        """The total size of the state for which tickets have arrived, in bytes."""
        self.has_ended = False
        """Whether all packets of the edge have arrived. Packets may still be unread."""
        self.changed = Notifier()
        """A notifier that fires when a packet arrives, and when the current attempt ends, fails or is replaced."""
        self._packets: deque[tuple[Packet, Callable[[], None]]] = deque()

    @property
    def waiting(self) -> int:
        """The number of unread packets."""
        return len(self._packets)

    @property
    def waiting_bytes(self) -> int:
        """The total number of payload bytes in the unread packets."""
        return sum(packet.size_bytes for packet, _ in self._packets)

    def accept(self, packet: Packet, consume: Callable[[], None]) -> None:
        """Queues the new rows of a packet. Raises InvalidChunkError if the packet contradicts a previous attempt.

        Args:
            packet: The packet as it arrived.
            consume: Called when the packet is read, or immediately if no row is new.
        """
        new = self.new_part(packet)
        if packet.tickets:
            self.handed_over_bytes += sum(ticket.size_bytes for ticket in packet.tickets.values())
        if new is None:
            consume()
        else:
            self._packets.append((new, consume))

    def accept_end(self) -> None:
        """Records that no packets follow the queued packets.

        Raises InvalidChunkError (ATTEMPTS_DIFFER) if the producer has sent fewer rows than the previous producer.
        """
        if self.is_repeating:
            raise self._attempts_differ(
                "sent fewer rows than the previous attempt; a stage must reproduce its output from the same seed"
            )
        self.has_ended = True

    def pop(self) -> Packet:
        """Removes and returns the oldest packet. Calls the packet's `consume` callback."""
        packet, consume = self._packets.popleft()
        consume()
        return packet

    def clear(self) -> None:
        """Drops all unread packets, without calling their `consume` callbacks."""
        self._packets.clear()
