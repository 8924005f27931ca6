"""Counts the memory that one flow holds in an arena that several flows share."""


class MemoryAccount:
    """Is charged for each region of a flow until the region is freed. `Arena` limits it to a fair share."""

    __slots__ = ("held_bytes", "waiting")

    def __init__(self) -> None:
        self.held_bytes = 0
        self.waiting = 0
