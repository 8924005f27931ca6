"""The account of the memory that one flow uses in an arena that several flows share."""


class MemoryAccount:
    """The memory use of one flow: `held_bytes` bytes in its regions, and `waiting` allocations that wait for space.

    `Arena` charges the account for each region until the region is freed, and limits the account to a fair share.
    """

    __slots__ = ("held_bytes", "waiting")

    def __init__(self) -> None:
        self.held_bytes = 0
        self.waiting = 0
