from dataclasses import replace

import pytest

from stagemesh.client.retries import Attempts, RetryPolicy
from stagemesh.common.errors import InvalidRequestError, NotReadyError, UnavailableError

POLICY = RetryPolicy(attempts=4, first_pause_s=0.1, max_pause_s=0.3)


def _pauses(attempts: Attempts, error: UnavailableError) -> list[float | None]:
    pauses: list[float | None] = []
    while None not in pauses:
        attempts.begin()
        pauses.append(attempts.pause_s(error))
    return pauses


def test_pauses_double_up_to_a_limit() -> None:
    pauses = _pauses(Attempts(POLICY, timeout_s=None), UnavailableError("gone"))
    assert pauses == [pytest.approx(0.1), pytest.approx(0.2), pytest.approx(0.3), None]


def test_an_unreachable_endpoint_is_attempted_until_its_time_has_passed() -> None:
    patient = replace(POLICY, reach_s=60.0)
    attempts = Attempts(patient, timeout_s=None)
    for _ in range(3 * patient.attempts):
        attempts.begin()
        assert attempts.pause_s(UnavailableError("gone")) is not None
    # The server was reached. The number of attempts counts again.
    attempts.begin()
    assert attempts.pause_s(NotReadyError("loading", retry_after_s=1)) is None


def test_the_pause_that_the_server_names_takes_precedence() -> None:
    attempts = Attempts(POLICY, timeout_s=None)
    attempts.begin()
    assert attempts.pause_s(NotReadyError("loading", retry_after_s=8)) == 8


def test_a_too_long_pause_that_the_server_names_is_an_error() -> None:
    attempts = Attempts(POLICY, timeout_s=None)
    attempts.begin()
    assert attempts.pause_s(UnavailableError("gone", retry_after_s=60)) is None


def test_a_pause_beyond_the_deadline_is_an_error() -> None:
    attempts = Attempts(POLICY, timeout_s=0.05)
    attempts.begin()
    assert attempts.pause_s(UnavailableError("gone")) is None


def test_an_invalid_request_is_not_sent_again() -> None:
    attempts = Attempts(POLICY, timeout_s=None)
    attempts.begin()
    assert attempts.pause_s(InvalidRequestError("empty")) is None


def test_an_invalid_policy_is_rejected() -> None:
    with pytest.raises(ValueError, match="attempts >= 1"):
        RetryPolicy(attempts=0)
    with pytest.raises(ValueError, match="max_asked_pause_s is -1"):
        RetryPolicy(max_asked_pause_s=-1)
