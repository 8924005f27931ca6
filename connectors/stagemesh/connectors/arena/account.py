"""Accounts for the memory that one flow uses in an arena that several flows share."""


class MemoryAccount:
    """The memory use of one flow. `Arena` charges it for each region until the region is freed.

    `held_bytes` is the number of bytes in the flow's regions, and `waiting` is the number of its waiting allocations.
    `Arena` limits each account to a fair share.
    """

    __slots__ = ("held_bytes", "waiting")

    def __init__(self) -> None:
        self.held_bytes = 0
        self.waiting = 0
