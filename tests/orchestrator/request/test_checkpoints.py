"""Checkpoints of steps: which are retained, and the limits of their sizes."""

from pathlib import Path
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stagemesh.common.notification import Notifier
from stagemesh.orchestrator.planning.planner import PlannedStep
from stagemesh.orchestrator.planning.replacement_replicas import StateBudget
from stagemesh.orchestrator.request.failures import Failures
from stagemesh.orchestrator.request.output_record import RequestRecord
from stagemesh.orchestrator.request.recovery import StepState
from stagemesh.orchestrator.request.step_calls import StepCalls
from stagemesh.orchestrator.request.validation import validate
from stagemesh.pipeline.graph import Route
from stagemesh.rpc.channels import MAX_MESSAGE_BYTES
from stagemesh.v1 import orchestrator_pb2, request_pb2, stage_pb2, tensor_pb2
from tests.orchestrator.mesh import load


class Owner:
    """Has a state until the budget drops it."""

    def __init__(self) -> None:
        self.has_state = False

    def keep(self, budget: StateBudget, size_bytes: int) -> None:
        self.has_state = budget.keep(self, size_bytes, drop=self._drop)

    def _drop(self) -> None:
        self.has_state = False


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 12)), max_size=40))
def test_the_limit_always_holds_and_the_newest_states_stay(steps: list[tuple[int, int]]) -> None:
    budget, owners, sizes = StateBudget(10), [Owner() for _ in range(6)], dict[int, int]()
    for number, size_bytes in steps:
        owners[number].keep(budget, size_bytes)
        sizes.pop(number, None)
        if size_bytes <= 10:
            sizes[number] = size_bytes
        while sum(sizes.values()) > 10:
            del sizes[next(iter(sizes))]
        assert {i for i, owner in enumerate(owners) if owner.has_state} == set(sizes)
        assert budget.size_bytes == sum(sizes.values()) <= 10


def test_a_released_state_leaves_room_for_others() -> None:
    budget, first, second = StateBudget(10), Owner(), Owner()
    first.keep(budget, 6)
    budget.release(first)
    budget.release(first)
    second.keep(budget, 10)
    assert (second.has_state, budget.size_bytes) == (True, 10)


def checkpoint(steps: int, size_bytes: int = 100) -> stage_pb2.Checkpoint:
    made = stage_pb2.Checkpoint(steps=steps, rows={"latents": steps})
    made.tensors.add().inline = bytes(size_bytes)
    return made


def step_state(budget: StateBudget) -> StepState:
    return StepState(step=cast("PlannedStep", None), budget=budget)


def is_kept(state: StepState) -> bool:
    assert (state.checkpoint is None) == (state.checkpoint_rows is None)
    return state.checkpoint is not None


def test_a_step_whose_state_is_dropped_has_no_checkpoint() -> None:
    budget = StateBudget(300)
    first, second = step_state(budget), step_state(budget)
    first.store_checkpoint(checkpoint(1))
    second.store_checkpoint(checkpoint(1))
    assert is_kept(first)
    second.store_checkpoint(checkpoint(2, size_bytes=200))
    assert second.checkpoint is not None
    assert second.checkpoint.steps == 2
    assert not is_kept(first)


def test_a_checkpoint_that_is_too_large_replaces_an_older_one_by_none() -> None:
    budget = StateBudget(300)
    state = step_state(budget)
    state.store_checkpoint(checkpoint(1))
    state.store_checkpoint(checkpoint(2, size_bytes=400))
    assert not is_kept(state)
    assert budget.size_bytes == 0


@pytest.mark.parametrize(
    ("prompt_bytes", "state_bytes", "fits"),
    [
        (10, 6 << 20, True),
        (1 << 20, 6 << 20, True),
        (2 << 20, 6 << 20, False),
        (MAX_MESSAGE_BYTES - (1 << 20), 10, True),
        (MAX_MESSAGE_BYTES - (1 << 20), 1 << 20, False),
    ],
)
def test_a_checkpoint_is_useful_if_it_fits_into_a_message_with_the_input(
    tmp_path: Path, prompt_bytes: int, state_bytes: int, *, fits: bool
) -> None:
    state = tensor_pb2.Tensor(name="state", inline=bytes(state_bytes))
    checkpoint = stage_pb2.Checkpoint(steps=3, tensors=[state])
    assert _calls(tmp_path, prompt_bytes).can_resume_from(checkpoint) is fits


def test_a_checkpoint_without_a_state_is_useless(tmp_path: Path) -> None:
    calls = _calls(tmp_path, prompt_bytes=10)
    assert not calls.can_resume_from(stage_pb2.Checkpoint(steps=3, rows={"text": 3}))
    assert calls.can_resume_from(stage_pb2.Checkpoint(steps=3, token_ids=[5, 6, 7]))


def _calls(folder: Path, prompt_bytes: int) -> StepCalls:
    given = orchestrator_pb2.GenerateRequest(input=request_pb2.Input(text="x" * prompt_bytes))
    request, changed = validate(given, load(folder)), Notifier()
    return StepCalls(
        request, Route((), (), {}), {}, record=RequestRecord(), failures=Failures(changed), changed=changed
    )
