"""What one flow holds of memory that flows share."""


class MemoryAccount:
    """Regions of an arena are charged to it until they are freed; see `Arena` for the share that it may hold."""

    __slots__ = ("held_bytes", "waiting")

    def __init__(self) -> None:
        self.held_bytes = 0
        self.waiting = 0
