"""A suspended call runs only when it is advanced, and leaves no thread."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError

import pytest
import torch

from stagemesh.services.engines.diffusion.model.suspended_call import SuspendedCall


@pytest.fixture(autouse=True)
def _leaves_no_thread() -> Iterator[None]:
    yield
    assert not [thread for thread in threading.enumerate() if thread.name == "suspended call"]


def _count_to_three(suspend: Callable[[int], None]) -> bool:
    for point in (1, 2, 3):
        suspend(point)
    return torch.is_grad_enabled()


def test_two_calls_alternate_and_return_without_gradients() -> None:
    calls = [SuspendedCall(_count_to_three) for _ in range(2)]
    assert [[call.advance() for call in calls] for _ in range(4)] == [[1, 1], [2, 2], [3, 3], [None, None]]
    assert [(call.ended, call.result) for call in calls] == [(True, False)] * 2


def test_an_error_of_the_call_is_raised_where_it_is_advanced() -> None:
    def fail(suspend: Callable[[int], None]) -> None:
        suspend(1)
        raise ZeroDivisionError

    call = SuspendedCall(fail)
    assert call.advance() == 1
    with pytest.raises(ZeroDivisionError):
        call.advance()
    assert call.ended


@pytest.mark.parametrize("advances", [0, 1, 3, 4])
def test_a_closed_call_ends_though_it_handles_errors(advances: int) -> None:
    cleaned_up: list[bool] = []

    def insist(suspend: Callable[[int], None]) -> None:
        for point in (1, 2, 3):
            try:
                suspend(point)
            except Exception:  # noqa: BLE001  # as models do
                cleaned_up.append(False)
            finally:
                cleaned_up.append(True)

    call = SuspendedCall(insist)
    for _ in range(advances):
        call.advance()
    call.close()
    call.close()
    assert call.ended
    assert cleaned_up == [True] * min(advances, 3)
    if advances < 4:
        with pytest.raises(CancelledError):
            assert call.result
