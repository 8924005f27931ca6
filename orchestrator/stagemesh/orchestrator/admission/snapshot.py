"""What admission has at one moment, for those who watch it."""

from dataclasses import dataclass


@dataclass(frozen=True)
class CallerLoad:
    """What one caller has; "" are all those without a name."""

    caller: str
    in_flight: int
    in_flight_bytes: int
    queued: int
    queued_bytes: int


@dataclass(frozen=True)
class AdmissionSnapshot:
    """Requests that run and wait, with the bytes that they are taken for, in all and by caller."""

    in_flight: int
    in_flight_bytes: int
    queued: int
    queued_bytes: int
    expected_wait_s: float
    """Of one of priority 0 by a caller who has nothing here."""
    returning: int
    """Who was refused and told when to come back, and may still."""
    callers: tuple[CallerLoad, ...]
