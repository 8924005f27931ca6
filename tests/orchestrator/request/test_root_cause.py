from itertools import permutations

import pytest

from stagemesh.common.errors import (
    CancelledRequestError,
    InternalError,
    InvalidRequestError,
    NotFoundError,
    NotReadyError,
    StaleAttemptError,
    UnavailableError,
)
from stagemesh.orchestrator.request.failures import Failure, root_cause

LOST = Failure("b", UnavailableError("gone", reason="REPLICA_LOST"))
BROKE = Failure("b", InternalError("broke"))
ECHO = Failure("c", InternalError("broke", metadata={"stage": "b"}))
NO_PRODUCER = Failure("c", UnavailableError("replica b-0 went away", reason="PEER_LOST"))
NOT_EXPECTED = Failure("a", NotFoundError("expects nothing", reason="UNKNOWN_FLOW"))
STOPPED = Failure("a", CancelledRequestError("the consumer stopped reading"))


@pytest.mark.parametrize("root", [LOST, BROKE])
def test_the_root_cause_is_found_in_any_order_of_failures(root: Failure) -> None:
    for failures in permutations([root, ECHO, NO_PRODUCER, NOT_EXPECTED, STOPPED]):
        assert root_cause(failures) is root


def test_a_lost_replica_explains_the_failures_of_adjacent_stages() -> None:
    assert root_cause([BROKE, LOST]) is LOST


@pytest.mark.parametrize(("failure", "conclusive"), [(LOST, True), (BROKE, True), (ECHO, False), (NO_PRODUCER, False)])
def test_only_a_conclusive_cause_ends_the_wait(failure: Failure, conclusive: bool) -> None:
    assert failure.is_conclusive is conclusive


def test_of_two_causes_the_first_counts() -> None:
    first, second = Failure("a", InvalidRequestError("one")), Failure("b", InvalidRequestError("two"))
    assert root_cause([first, second]) is first


@pytest.mark.parametrize(
    "failure",
    [
        LOST,
        NO_PRODUCER,
        NOT_EXPECTED,
        Failure("a", NotReadyError("it drains")),
        Failure("a", StaleAttemptError("replaced", metadata={"edge": "a->b"})),
    ],
)
def test_a_loss_is_recoverable(failure: Failure) -> None:
    assert failure.is_recoverable


@pytest.mark.parametrize("failure", [BROKE, ECHO, STOPPED, Failure("a", StaleAttemptError("made elsewhere"))])
def test_an_error_of_the_stage_itself_is_not_recoverable(failure: Failure) -> None:
    assert not failure.is_recoverable
