"""Decides who gets room in a full arena: the allocations that wait for free memory, and the share of each flow.

Flows share the arena's memory fairly. A flow that already uses arena memory must wait for an allocation if its total
would exceed the number of free bytes. Source: A. Choudhury and E. Hahne, "Dynamic queue length thresholds for
shared-memory packet switches", 1998 (alpha = 1).
"""

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from stagemesh.connectors.arena.memory import PageAllocator
from stagemesh.connectors.base import MemoryAccount

if TYPE_CHECKING:
    from stagemesh.connectors.arena.arena import Region

Take: TypeAlias = Callable[[int, MemoryAccount], "Region | None"]
"""A function that allocates a number of bytes for an account. Returns None if not enough memory is free."""


class _Allocation(NamedTuple):
    """A pending request for arena memory. The request waits because not enough memory is free."""

    size_bytes: int
    account: MemoryAccount


class FairShare:
    """The allocations of one arena that wait for free memory. Serves them in order of arrival.

    An allocation of an account that would exceed its fair share does not block the allocations of other accounts.
    """

    def __init__(self, allocator: PageAllocator, take: Take) -> None:
        self._allocator, self._take = allocator, take
        self._waiting: dict[asyncio.Future[Region], _Allocation] = {}
        """The allocations in order of arrival. Each future returns the allocated region."""
        self._is_blocked = False
        """Whether an allocation within its fair share waits, so that all later allocations must wait, too."""
        self._is_scheduled = False

    @property
    def waiting(self) -> int:
        """The number of allocations that wait for free memory."""
        return len(self._waiting)

    def must_wait(self, account: MemoryAccount) -> bool:
        """Returns whether an allocation for `account` must wait, because earlier allocations wait."""
        if self._is_scheduled:
            self._admit()
        return self._is_blocked or bool(account.waiting)

    async def wait(self, size_bytes: int, account: MemoryAccount) -> "Region":
        """Waits until `size_bytes` bytes are free for `account`. Returns their region.

        Raises the error that is passed to `close`.
        """
        turn: asyncio.Future[Region] = asyncio.get_running_loop().create_future()
        allocation = _Allocation(size_bytes, account)
        if not account.waiting and not self._exceeds_share(allocation):
            self._is_blocked = True
        self._waiting[turn] = allocation
        account.waiting += 1
        try:
            return await turn
        except asyncio.CancelledError:
            self._leave(turn)
            if turn.done() and not turn.cancelled() and turn.exception() is None:
                turn.result().release()
            self.wake()
            raise

    def wake(self) -> None:
        """Schedules a retry of the waiting allocations, because memory was freed."""
        if self._waiting and not self._is_scheduled:
            self._is_scheduled = True
            next(iter(self._waiting)).get_loop().call_soon(self._admit)

    def close(self, error: Exception) -> None:
        """Fails all waiting allocations with `error`. Call it after the last other call."""
        for turn in list(self._waiting):
            self._leave(turn)
            if not turn.done():
                turn.set_exception(error)
        # It refers to the arena, which would otherwise wait for the garbage collector.
        del self._take

    def _exceeds_share(self, allocation: _Allocation) -> bool:
        # Also applies to the only account in use, so that a flow that uses memory never makes other flows wait behind
        # its own allocation.
        held_bytes = allocation.account.held_bytes
        return held_bytes > 0 and held_bytes + allocation.size_bytes > self._allocator.free_bytes

    def _admit(self) -> None:
        """Serves the waiting allocations in order of arrival. Stops at the first allocation that does not fit.

        Skips the allocations of accounts that would exceed their fair share.
        """
        self._is_scheduled = self._is_blocked = False
        skipped: set[MemoryAccount] = set()
        for turn, allocation in list(self._waiting.items()):
            if turn.done() or allocation.account in skipped:
                continue
            region = self._take(allocation.size_bytes, allocation.account)
            if region is not None:
                self._leave(turn)
                turn.set_result(region)
            elif self._exceeds_share(allocation):
                skipped.add(allocation.account)
            else:
                self._is_blocked = True
                return

    def _leave(self, turn: "asyncio.Future[Region]") -> None:
        allocation = self._waiting.pop(turn, None)
        if allocation is not None:
            allocation.account.waiting -= 1
        if not self._waiting:
            self._is_blocked = False
