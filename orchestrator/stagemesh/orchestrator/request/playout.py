"""The play-out of a stream of audio by a listener who starts with its first part and never skips."""

from dataclasses import dataclass


@dataclass(slots=True)
class Playout:
    """The continuity of one stream. An underrun is a time in which the listener waits for the next part.

    All times are in seconds on one clock: that of the orchestrator when it sends the parts, or that of a client when it
    receives them.
    """

    dry_s: float
    """The time at which all audio so far has been played. Initially the time of the first part."""
    underrun_s: float = 0.0
    """The sum of all underruns."""
    longest_underrun_s: float = 0.0

    def add(self, at_s: float, *, duration_s: float) -> None:
        """Adds a part of `duration_s` seconds, which was sent or received at `at_s`."""
        waited_s = max(0.0, at_s - self.dry_s)
        self.underrun_s += waited_s
        self.longest_underrun_s = max(self.longest_underrun_s, waited_s)
        self.dry_s = max(self.dry_s, at_s) + duration_s
