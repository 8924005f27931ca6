"""A snapshot of admission for operators."""

from dataclasses import dataclass


@dataclass(frozen=True)
class CallerLoad:
    """The numbers and bytes of one caller's requests. All requests without a caller name belong to the caller ""."""

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
    """The expected wait in seconds of a new request, if it has priority 0 and its caller has no other requests."""
    returning: int
    """The number of rejected requests that have a retry time and may be sent again."""
    callers: tuple[CallerLoad, ...]
