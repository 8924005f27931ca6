"""A buddy allocator over a power-of-two range: O(log n), no memory of its own inside the range.

Source: Knuth, The Art of Computer Programming, vol. 1, 2.5, "buddy system".
"""

PAGE_BYTES = 4096


class BuddyAllocator:
    """Hands out page-aligned blocks whose sizes are powers of two. Knows offsets only, never the memory."""

    def __init__(self, size_bytes: int) -> None:
        if size_bytes < PAGE_BYTES or size_bytes & (size_bytes - 1):
            raise ValueError(f"size_bytes is {size_bytes}; it must be a power of two from {PAGE_BYTES}")
        self.size_bytes = size_bytes
        self.used_bytes = 0
        self._orders = (size_bytes // PAGE_BYTES).bit_length()
        self._free: list[set[int]] = [set() for _ in range(self._orders)]
        self._free[-1].add(0)
        self._taken: dict[int, int] = {}

    def allocate(self, size_bytes: int) -> int | None:
        """The offset of a block of at least `size_bytes`, or None when none is free."""
        order = self._order(size_bytes)
        found = next((bigger for bigger in range(order, self._orders) if self._free[bigger]), None)
        if found is None:
            return None
        offset = self._free[found].pop()
        for smaller in range(found - 1, order - 1, -1):
            self._free[smaller].add(offset + (PAGE_BYTES << smaller))
        self._taken[offset] = order
        self.used_bytes += PAGE_BYTES << order
        return offset

    def release(self, offset: int) -> None:
        """Takes a block back and merges it with its free neighbours. A block that is not taken is a KeyError."""
        order = self._taken.pop(offset)
        self.used_bytes -= PAGE_BYTES << order
        while order < self._orders - 1:
            buddy = offset ^ (PAGE_BYTES << order)
            if buddy not in self._free[order]:
                break
            self._free[order].remove(buddy)
            offset = min(offset, buddy)
            order += 1
        self._free[order].add(offset)

    def block_bytes(self, offset: int) -> int:
        """The size of a taken block."""
        return PAGE_BYTES << self._taken[offset]

    @staticmethod
    def _order(size_bytes: int) -> int:
        pages = max(1, -(-size_bytes // PAGE_BYTES))
        return (pages - 1).bit_length()
