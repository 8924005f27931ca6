"""The page allocator against a plain list of runs."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from stagemesh.connectors.arena.memory import PAGE_BYTES, PageAllocator

PAGES = 300


class AllocatorModel(RuleBasedStateMachine):
    """Keeps the allocated runs in a dict. Free runs are the gaps between them."""

    def __init__(self) -> None:
        super().__init__()
        self.allocator = PageAllocator(PAGES * PAGE_BYTES)
        self.runs: dict[int, int] = {}

    def free_runs(self) -> list[int]:
        """Returns the lengths of the free runs in bytes."""
        lengths, end = [], 0
        for offset, size in [*sorted(self.runs.items()), (PAGES * PAGE_BYTES, 0)]:
            lengths.append(offset - end)
            end = offset + size
        return lengths

    @rule(size=st.integers(0, 40 * PAGE_BYTES) | st.integers(0, PAGES * PAGE_BYTES + 1))
    def allocate(self, size: int) -> None:
        longest = max(self.free_runs())
        offset = self.allocator.allocate(size)
        length = max(1, -(-size // PAGE_BYTES)) * PAGE_BYTES
        assert (offset is not None) == (length <= longest)
        if offset is not None:
            assert offset % PAGE_BYTES == 0
            assert 0 <= offset <= PAGES * PAGE_BYTES - length
            assert all(offset + length <= at or at + taken <= offset for at, taken in self.runs.items())
            self.runs[offset] = length

    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        if self.runs:
            offset = data.draw(st.sampled_from(sorted(self.runs)))
            del self.runs[offset]
            self.allocator.release(offset)

    @invariant()
    def counts(self) -> None:
        assert self.allocator.used_bytes == sum(self.runs.values())
        assert self.allocator.largest_free_bytes == max(self.free_runs())

    def teardown(self) -> None:
        for offset in self.runs:
            self.allocator.release(offset)
        assert self.allocator.allocate(PAGES * PAGE_BYTES) == 0


TestAllocator = AllocatorModel.TestCase
TestAllocator.settings = settings(max_examples=100, stateful_step_count=50, deadline=None)


def test_memory_freed_last_is_used_first() -> None:
    allocator = PageAllocator(64 * PAGE_BYTES)
    runs = [offset for _ in range(16) if (offset := allocator.allocate(4 * PAGE_BYTES)) is not None]
    for offset in runs[1::2]:
        allocator.release(offset)
    assert [allocator.allocate(4 * PAGE_BYTES) for _ in range(8)] == runs[1::2][::-1]


def test_run_that_is_not_taken_cannot_be_released() -> None:
    allocator = PageAllocator(64 * PAGE_BYTES)
    offset = allocator.allocate(1)
    assert offset is not None
    allocator.release(offset)
    with pytest.raises(KeyError):
        allocator.release(offset)


@pytest.mark.parametrize("size_bytes", [0, -PAGE_BYTES, 1, PAGE_BYTES + 1])
def test_size_is_whole_pages(size_bytes: int) -> None:
    with pytest.raises(ValueError, match="multiple of 4096"):
        PageAllocator(size_bytes)


def test_any_number_of_pages_can_be_used_to_the_last() -> None:
    allocator = PageAllocator(1000 * PAGE_BYTES)
    assert len({allocator.allocate(PAGE_BYTES) for _ in range(1000)} - {None}) == 1000
    assert allocator.allocate(1) is None
    assert allocator.largest_free_bytes == 0
