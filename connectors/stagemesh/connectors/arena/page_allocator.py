"""An allocator of whole pages over a fixed range: constant time, no memory of its own inside the range.

Source: M. Masmano et al., "TLSF: a new dynamic memory allocator for real-time systems", ECRTS 2004 (two-level
segregated fit). Free runs are kept by size class: 32 classes between each power of two and the next, one page apart
below 64 pages. One bit a class says whether it has a run, so that the smallest that fits is found without a search.
"""

PAGE_BYTES = 4096

_STEP_BITS = 5
_EXACT_PAGES = 2 << _STEP_BITS


class PageAllocator:
    """Hands out runs of pages and joins them again when they come back. Knows offsets only, never the memory."""

    def __init__(self, size_bytes: int) -> None:
        if size_bytes < PAGE_BYTES or size_bytes % PAGE_BYTES:
            raise ValueError(f"size_bytes is {size_bytes}; it must be a multiple of {PAGE_BYTES} from {PAGE_BYTES}")
        self.size_bytes = size_bytes
        self.free_bytes = size_bytes
        pages = size_bytes // PAGE_BYTES
        # Dicts of a run's first page keep the order of insertion: the last one freed, still in the cache, goes first.
        self._classes: list[dict[int, None]] = [{} for _ in range(_size_class(pages) + 1)]
        self._nonempty = 0
        self._free_length: dict[int, int] = {}
        self._free_start: dict[int, int] = {}
        """Of the free run that ends before the page."""
        self._taken: dict[int, int] = {}
        self._insert(0, pages)

    @property
    def used_bytes(self) -> int:
        """Bytes in runs that are taken."""
        return self.size_bytes - self.free_bytes

    @property
    def largest_free_bytes(self) -> int:
        """The longest free run."""
        if not self._nonempty:
            return 0
        longest = self._classes[self._nonempty.bit_length() - 1]
        return max(self._free_length[start] for start in longest) * PAGE_BYTES

    def allocate(self, size_bytes: int) -> int | None:
        """The offset of a run of at least `size_bytes` and one page, or None when there is none."""
        pages = (size_bytes + PAGE_BYTES - 1) // PAGE_BYTES or 1
        if pages < _EXACT_PAGES:
            size_class = pages
        else:
            # Every run of the next class fits, those of its own class only perhaps.
            shift = pages.bit_length() - _STEP_BITS - 1
            size_class = (shift << _STEP_BITS) + ((pages + (1 << shift) - 1) >> shift)
        larger = self._nonempty >> size_class
        if larger:
            size_class += (larger & -larger).bit_length() - 1
            runs = self._classes[size_class]
            start, _ = runs.popitem()
            if not runs:
                self._nonempty ^= 1 << size_class
        else:
            found = self._search(pages)
            if found is None:
                return None
            start = found
        length = self._free_length.pop(start)
        del self._free_start[start + length]
        if length > pages:
            self._insert(start + pages, length - pages)
        self._taken[start] = pages
        self.free_bytes -= pages * PAGE_BYTES
        return start * PAGE_BYTES

    def release(self, offset: int) -> None:
        """Takes a run back and joins it with its free neighbours. A run that is not taken is a KeyError."""
        start = offset // PAGE_BYTES
        length = self._taken.pop(start)
        self.free_bytes += length * PAGE_BYTES
        after = self._free_length.pop(start + length, 0)
        if after:
            self._unlink(start + length, after)
            del self._free_start[start + length + after]
            length += after
        before = self._free_start.pop(start, None)
        if before is not None:
            self._unlink(before, start - before)
            length += start - before
            start = before
        self._insert(start, length)

    def _insert(self, start: int, length: int) -> None:
        size_class = length if length < _EXACT_PAGES else _size_class(length)
        self._classes[size_class][start] = None
        self._nonempty |= 1 << size_class
        self._free_length[start] = length
        self._free_start[start + length] = start

    def _unlink(self, start: int, length: int) -> None:
        size_class = length if length < _EXACT_PAGES else _size_class(length)
        runs = self._classes[size_class]
        del runs[start]
        if not runs:
            self._nonempty ^= 1 << size_class

    def _search(self, pages: int) -> int | None:
        """Unlinks a run of `pages`' own class that is long enough: looked for where there is none of a larger class."""
        size_class = _size_class(pages)
        if size_class >= len(self._classes):
            return None
        for start in self._classes[size_class]:
            length = self._free_length[start]
            if length >= pages:
                self._unlink(start, length)
                return start
        return None


def _size_class(pages: int) -> int:
    """The class that a run of `pages` belongs to."""
    if pages < _EXACT_PAGES:
        return pages
    shift = pages.bit_length() - _STEP_BITS - 1
    return (shift << _STEP_BITS) + (pages >> shift)
