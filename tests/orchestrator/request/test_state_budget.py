"""The total size of the states that an orchestrator keeps is limited."""

from typing import cast

from hypothesis import given
from hypothesis import strategies as st

from stagemesh.orchestrator.planning.planner import PlannedStep
from stagemesh.orchestrator.planning.replacement_replicas import StateBudget
from stagemesh.orchestrator.request.recovery import StepState
from stagemesh.v1 import stage_pb2


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
