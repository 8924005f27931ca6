"""The state of admission at one moment, for operators."""

from dataclasses import dataclass


@dataclass(frozen=True)
class CallerLoad:
    """The requests of one caller. The caller "" represents all callers without a name."""

    caller: str
    in_flight: int
    in_flight_bytes: int
    queued: int
    queued_bytes: int


@dataclass(frozen=True)
class AdmissionSnapshot:
    """The numbers and estimated bytes of running and waiting requests, in total and by caller."""

    in_flight: int
    in_flight_bytes: int
    queued: int
    queued_bytes: int
    expected_wait_s: float
    """The expected wait in seconds of a new request with priority 0 from a caller without other requests."""
    returning: int
    """The number of rejected requests that have a retry slot."""
    callers: tuple[CallerLoad, ...]
