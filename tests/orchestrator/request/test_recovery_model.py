"""An exhaustive check of the model of one request, random walks through larger ones, and planted defects."""

import random
from collections.abc import Collection

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stagemesh.common.errors import StagemeshError
from stagemesh.orchestrator.request import output_record, recovery, validation
from stagemesh.orchestrator.request.recovery import ActionKind
from stagemesh.pipeline import Edge, Route
from tools.recovery_model.explore import CHAIN, explore
from tools.recovery_model.orchestrators import Model
from tools.recovery_model.replicas import Call, Processes
from tools.recovery_model.states import edge, route_of

_EDGE = route_of(edge("1", "a", "b"))
_JOIN = route_of(edge("1", "a", "c"), edge("2", "b", "c"))
_PAIR = route_of(edge("1", "a", "b"), edge("2", "a", "b"))
_DIAMOND = route_of(edge("1", "a", "b"), edge("2", "a", "c", chunk="whole"), edge("3", "b", "d"), edge("4", "c", "d"))


@pytest.mark.parametrize(
    ("model", "crashes", "faults", "states"),
    [
        pytest.param(Model(CHAIN), 1, 0, 60_000, id="one crash in a chain of three"),
        pytest.param(Model(_EDGE), 2, 0, 60_000, id="two crashes"),
        pytest.param(Model(_EDGE, rows=1), 0, 1, 10_000, id="a fault"),
        pytest.param(Model(_EDGE, rows=1, replicas=2), 0, 1, 10_000, id="a fault with two replicas"),
    ],
)
def test_every_state_of_a_small_request_leads_to_its_end(model: Model, crashes: int, faults: int, states: int) -> None:
    explored = explore(model, crashes=crashes, faults=faults)
    assert explored.trace == []
    assert explored.states >= states, f"the model has only {explored.states:,} states"


@settings(max_examples=200, deadline=None)
@given(
    st.sampled_from([CHAIN, _JOIN, _PAIR, _DIAMOND]),
    st.integers(1, 2),
    st.booleans(),
    st.binary(min_size=50, max_size=300),
)
def test_a_larger_request_ends_whatever_happens(route: Route, replicas: int, checkpoints: bool, choices: bytes) -> None:
    model = Model(route, rows=3, replicas=replicas, checkpoints=checkpoints)
    world = model.begin(crashes=4, faults=4)
    for choice in choices:
        moves = list(model.faults(world)) if choice % 8 == 0 else list(model.next(world))
        if moves:
            _, world = moves[choice // 8 % len(moves)]
    rng = random.Random(0)
    for _ in range(4000):
        if world.client.is_done:
            return
        moves = list(model.next(world))
        assert moves, f"the request hangs: {world}"
        _, world = rng.choice(moves)
    pytest.fail(f"the request does not end: {world}")


def _without_rebinding(route: Route, states: recovery.States) -> list[recovery.Action]:
    return [action for action in _NEXT_ACTIONS(route, states) if action.kind is not ActionKind.REBIND_INPUTS]


def _attached_or_started(model: Model, processes: Processes, p: int, call: Call, **_: object) -> Processes:
    return _EXECUTE(model, processes, p, call, attach_only=False)


def _attempt_of_producer(flow: Edge, states: recovery.States) -> int:
    return states[flow.producer].attempt


def _without_producers(route: Route, states: recovery.States, restarting: Collection[str]) -> set[str]:
    return set(restarting)


def _one(earlier_calls: int) -> int:
    return 1


def _never(error: StagemeshError | None) -> bool:
    return False


_NEXT_ACTIONS, _EXECUTE = recovery.next_actions, Model.execute
_KEY = "two attempts of a stage share a flow's key"
_DEFECTS: dict[str, tuple[str, object, str, object]] = {
    "attempts restart at 1": ("the request fails: CANCELLED", validation, "first_attempt", _one),
    "attaching calls start a step": ("the request hangs", Model, "execute", _attached_or_started),
    "a flow has its producer's attempt": (_KEY, recovery, "attempt_of", _attempt_of_producer),
    "a resumed producer goes on": ("a row is left out", recovery, "_with_producers", _without_producers),
    "consumers are not rebound": ("the request hangs", recovery, "next_actions", _without_rebinding),
    "requests fail if taken over": ("the request fails: STALE_ATTEMPT", output_record, "is_taken_over", _never),
}


@pytest.mark.parametrize("defect", _DEFECTS)
def test_a_planted_defect_is_found(defect: str, monkeypatch: pytest.MonkeyPatch) -> None:
    effect, target, name, planted = _DEFECTS[defect]
    monkeypatch.setattr(target, name, planted)
    size = {"crashes": 1, "faults": 1} if "request fails" in effect else {"crashes": 2, "faults": 0}
    explored = explore(Model(_EDGE), **size)
    assert explored.trace, f"none of {explored.states:,} states shows that {defect}"
    assert (explored.trace[-1], len(explored.trace) < 30) == (effect, True), explored.trace
