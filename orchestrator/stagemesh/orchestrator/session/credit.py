"""The number of bytes that a client may append to a session."""

from stagemesh.common.errors import OverloadedError


class Credit:
    """Counts the bytes that a client has appended, and limits those that no stage has consumed to a window.

    All limits are totals since the session was opened, as in InputGrant.
    """

    __slots__ = ("_consumed", "_pieces", "_window_bytes", "limit_bytes", "received_bytes")

    def __init__(self, window_bytes: int) -> None:
        self.received_bytes = 0
        """The total size of the accepted pieces, in bytes."""
        self.limit_bytes = window_bytes
        """The total number of bytes that the client may append, as it was reported to the client."""
        self._consumed = 0
        self._window_bytes = window_bytes
        # A deque would need a kilobyte of memory in each idle session.
        self._pieces: list[tuple[int, int]] = []
        """For each piece that is not consumed: the bytes of its packets that are not consumed, and its size."""

    def check(self, size_bytes: int) -> None:
        """Raises OverloadedError (INPUT_OVER_CREDIT) if a piece of this size exceeds the limit."""
        if self.received_bytes + size_bytes > self.limit_bytes:
            raise OverloadedError(
                f"a piece of {size_bytes:,} bytes exceeds the credit: {self.received_bytes:,} of {self.limit_bytes:,} "
                "bytes have been appended; wait for `grant`",
                reason="INPUT_OVER_CREDIT",
            )

    def add(self, size_bytes: int, *, packet_bytes: int = 0) -> None:
        """Counts an accepted piece.

        `packet_bytes` is the size of its packets, which stages consume later. If it is 0, the piece is consumed now.
        """
        self.received_bytes += size_bytes
        if packet_bytes:
            self._pieces.append((packet_bytes, size_bytes))
        else:
            self._consumed += size_bytes

    def consume(self, packet_bytes: int) -> None:
        """Records that the stages have consumed this number of bytes of packets, oldest first."""
        done = 0
        for left, size_bytes in self._pieces:
            if packet_bytes < left:
                self._pieces[done] = (left - packet_bytes, size_bytes)
                break
            packet_bytes -= left
            self._consumed += size_bytes
            done += 1
        del self._pieces[:done]

    def raise_limit(self) -> bool:
        """Raises the limit if the client has used at least half of the window. Returns whether it is higher now."""
        if self.limit_bytes - self.received_bytes > self._window_bytes // 2:
            return False
        former, self.limit_bytes = self.limit_bytes, self._consumed + self._window_bytes
        return self.limit_bytes > former
