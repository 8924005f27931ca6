"""A constant-time allocator of whole pages in a fixed memory range. The allocator's own data is outside the range.

Source: M. Masmano et al., "TLSF: a new dynamic memory allocator for real-time systems", ECRTS 2004 (two-level
segregated fit). Free runs of pages are grouped into size classes by their number of pages. Runs of fewer than 64 pages
have one class for each number of pages. For longer runs, there are 32 classes between each power of two and the next. A
bit mask indicates which classes contain a free run, so that the smallest sufficient class is found without a search.
"""

PAGE_BYTES = 4096

_STEP_BITS = 5
_EXACT_PAGES = 2 << _STEP_BITS


class PageAllocator:
    """An allocator of runs of pages, which merges adjacent free runs. Computes offsets without accessing the memory."""

    def __init__(self, size_bytes: int) -> None:
        if size_bytes < PAGE_BYTES or size_bytes % PAGE_BYTES:
            raise ValueError(f"size_bytes is {size_bytes}; it must be a multiple of {PAGE_BYTES} from {PAGE_BYTES}")
        self.size_bytes = size_bytes
        self.free_bytes = size_bytes
        pages = size_bytes // PAGE_BYTES
        # The keys are the first pages of runs in order of release. The last run is reused first, because it is most
        # likely still in the processor's cache.
        self._classes: list[dict[int, None]] = [{} for _ in range(_size_class(pages) + 1)]
        self._nonempty = 0
        self._free_length: dict[int, int] = {}
        self._free_start: dict[int, int] = {}
        """Maps the page number after the end of each free run to the run's first page number."""
        self._taken: dict[int, int] = {}
        self._insert(0, pages)

    @property
    def used_bytes(self) -> int:
        """The number of bytes in allocated pages."""
        return self.size_bytes - self.free_bytes

    @property
    def largest_free_bytes(self) -> int:
        """The size of the longest free run in bytes, or 0 if no page is free."""
        if not self._nonempty:
            return 0
        longest = self._classes[self._nonempty.bit_length() - 1]
        return max(self._free_length[start] for start in longest) * PAGE_BYTES

    def allocate(self, size_bytes: int) -> int | None:
        """Allocates a run of contiguous pages for `size_bytes` bytes. Allocates at least one page.

        Returns the run's offset in bytes, or None if no free run is long enough.
        """
        pages = (size_bytes + PAGE_BYTES - 1) // PAGE_BYTES or 1
        # Rounds up, because every run of the next class is long enough. A run of the size's class may be too short.
        size_class = pages if pages < _EXACT_PAGES else _size_class(pages - 1) + 1
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
        """Frees the run that begins at the byte offset `offset`, and merges it with adjacent free runs.

        Raises KeyError if no allocated run begins at `offset`.
        """
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
        """Removes the first free run with at least `pages` pages from the size class of `pages`.

        Returns the run's first page number, or None if that class contains no such run. Called only if all larger
        classes are empty.
        """
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
    """Returns the index of the size class for free runs of `pages` pages."""
    if pages < _EXACT_PAGES:
        return pages
    shift = pages.bit_length() - _STEP_BITS - 1
    return (shift << _STEP_BITS) + (pages >> shift)
