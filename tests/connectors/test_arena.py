"""The arena and its allocator."""

import asyncio
import resource

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from stagemesh.connectors import shm
from stagemesh.connectors.allocator import PAGE_BYTES, BuddyAllocator
from stagemesh.connectors.arena import Arena, Region
from stagemesh.connectors.errors import InvalidChunkError, NotReadyError
from stagemesh.connectors.tensors import Array, describe_tensor
from stagemesh.v1 import tensor_pb2


class AllocatorModel(RuleBasedStateMachine):
    """The allocator against a plain list of blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.allocator = BuddyAllocator(64 * PAGE_BYTES)
        self.blocks: dict[int, int] = {}

    @rule(size=st.integers(0, 70 * PAGE_BYTES))
    def allocate(self, size: int) -> None:
        offset = self.allocator.allocate(size)
        if offset is None:
            assert size > PAGE_BYTES // 2 or len(self.blocks) > 0
            return
        block = self.allocator.block_bytes(offset)
        assert block >= size
        assert offset % block == 0
        assert all(offset + block <= at or at + length <= offset for at, length in self.blocks.items())
        self.blocks[offset] = block

    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        if self.blocks:
            offset = data.draw(st.sampled_from(sorted(self.blocks)))
            del self.blocks[offset]
            self.allocator.release(offset)

    @invariant()
    def counts(self) -> None:
        assert self.allocator.used_bytes == sum(self.blocks.values())

    def teardown(self) -> None:
        for offset in self.blocks:
            self.allocator.release(offset)
        assert self.allocator.allocate(64 * PAGE_BYTES) == 0


TestAllocator = AllocatorModel.TestCase
TestAllocator.settings = settings(max_examples=60, stateful_step_count=60, deadline=None)


def _message(region: Region, tensor: Array, **changes: int) -> tensor_pb2.Tensor:
    message = describe_tensor("x", tensor)
    place = {"offset": region.tensor_offsets["x"], "size_bytes": tensor.nbytes, "generation": region.generation}
    message.shm.CopyFrom(tensor_pb2.ShmRegion(**{**place, **changes}))
    return message


async def test_reader_sees_what_was_written() -> None:
    arena = Arena(1 << 20)
    tensor = np.arange(10_000, dtype=np.int32).reshape(100, 100)[::2, ::3]
    region = await arena.write({"n": np.zeros(3, np.uint8), "x": tensor})
    peer = shm.attach(arena.advertise())
    assert peer is not None
    np.testing.assert_array_equal(peer.view(_message(region, tensor)), tensor)


@pytest.mark.parametrize(
    "changes", [{"offset": 0}, {"offset": 1 << 40}, {"generation": 7}, {"offset": (1 << 20) + 8192}]
)
async def test_region_that_is_not_its_own_is_refused(changes: dict[str, int]) -> None:
    arena = Arena(1 << 20)
    tensor = np.arange(5000, dtype=np.int32)
    region = await arena.write({"x": tensor})
    peer = shm.attach(arena.advertise())
    assert peer is not None
    with pytest.raises(InvalidChunkError):
        peer.view(_message(region, tensor, **changes))


async def test_freed_region_is_never_read_as_new_data() -> None:
    arena = Arena(1 << 20)
    tensor = np.arange(5000, dtype=np.int32)
    region = await arena.write({"x": tensor})
    peer = shm.attach(arena.advertise())
    assert peer is not None
    old = _message(region, tensor)
    region.release()
    again = await arena.write({"x": tensor})
    assert again.tensor_offsets == region.tensor_offsets
    with pytest.raises(InvalidChunkError, match="no longer its own"):
        peer.view(old)


async def test_writers_wait_in_line_for_room() -> None:
    arena = Arena(1 << 20)
    first = [await arena.write({"x": np.zeros(1 << 19, np.uint8)}) for _ in range(2)]
    waiting = [asyncio.create_task(arena.write({"x": np.full(1 << 18, n, np.uint8)})) for n in range(3)]
    await asyncio.sleep(0)
    assert not any(task.done() for task in waiting)
    waiting[0].cancel()
    first[0].release()
    regions = await asyncio.gather(*waiting[1:])
    assert {region.view("x", 1)[0] for region in regions} == {1, 2}


async def test_no_memory_is_a_clear_error_at_start() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
    try:
        with pytest.raises(NotReadyError, match="arena_bytes"):
            Arena(16 << 20)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
