from dataclasses import replace

import pytest

from stagemesh.client.retries import Attempts, RetryPolicy
from stagemesh.common.errors import InvalidRequestError, NotReadyError, StagemeshError, UnavailableError

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


@pytest.mark.parametrize(
    ("error", "timeout_s", "pause_s"),
    [
        pytest.param(NotReadyError("loading", retry_after_s=8), None, 8, id="named by the server"),
        pytest.param(UnavailableError("gone", retry_after_s=60), None, None, id="too long"),
        pytest.param(UnavailableError("gone"), 0.05, None, id="beyond the deadline"),
        pytest.param(InvalidRequestError("empty"), None, None, id="invalid request"),
    ],
)
def test_the_error_determines_pauses(error: StagemeshError, timeout_s: float | None, pause_s: float | None) -> None:
    attempts = Attempts(POLICY, timeout_s=timeout_s)
    attempts.begin()
    assert attempts.pause_s(error) == pause_s


def test_an_invalid_policy_is_rejected() -> None:
    with pytest.raises(ValueError, match="attempts >= 1"):
        RetryPolicy(attempts=0)
    with pytest.raises(ValueError, match="max_asked_pause_s is -1"):
        RetryPolicy(max_asked_pause_s=-1)
