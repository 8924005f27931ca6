"""The consequences of a loss in single cases."""

from collections.abc import Iterable
from types import SimpleNamespace
from typing import cast

from stagemesh.orchestrator.request.recovery import (
    Action,
    ActionKind,
    AttemptState,
    Phase,
    Restart,
    find_superfluous,
    is_checkpoint_useful,
    next_actions,
    plan_restarts,
)
from stagemesh.pipeline import Edge, Route, Stage
from stagemesh.pipeline.graph import PipelineOutput
from stagemesh.pipeline.schema import Chunk


def _edge(name: str, producer: str, consumer: str, chunk: Chunk = "step") -> Edge:
    return Edge(name=name, producer=producer, consumer=consumer, chunk=chunk)


def _route(stages: Iterable[str], *edges: Edge, output_stages: Iterable[str] = ()) -> Route:
    outputs = {name: PipelineOutput(source=name, name=name, kind="text", sample_rate_hz=0) for name in output_stages}
    return Route(tuple(cast("Stage", SimpleNamespace(name=name)) for name in stages), edges, outputs)


def _names(route: Route) -> list[str]:
    return [stage.name for stage in route.stages]


_A_B, _B_C = _edge("a->b", "a", "b"), _edge("b->c", "b", "c")
_CHAIN = _route("abc", _A_B, _B_C, output_stages="ac")
_BOUND = {"a->b": 1, "b->c": 1}


def _running(**changes: AttemptState) -> dict[str, AttemptState]:
    bound = {"a": {"a->b": 1}, "b": _BOUND, "c": {"b->c": 1}}
    return {name: AttemptState(phase=Phase.RUNNING, bound=bound[name]) for name in _names(_CHAIN)} | changes


def _apply(route: Route, states: dict[str, AttemptState], *, lost: set[str], fresh: set[str]) -> None:
    found = plan_restarts(route, states, lost=lost, fresh=fresh)
    for stage in found.void:
        states[stage].checkpoint_rows = None
    for stage in found.unneeded:
        states[stage].phase = Phase.FINISHED
    for stage, restart in found.restarted.items():
        checkpoint_rows = states[stage].checkpoint_rows if restart.resumes else None
        states[stage] = AttemptState(restart.attempt, Phase.UNPLACED, {}, checkpoint_rows or {}, checkpoint_rows)


def test_only_the_lost_stage_restarts() -> None:
    assert plan_restarts(_CHAIN, _running(), lost={"b"}).restarted == {"b": Restart(2, resumes=False)}


def test_a_stage_that_waits_for_a_replica_ends_when_its_consumers_have_finished_without_it() -> None:
    phase = Phase.UNPLACED
    states = _running(b=AttemptState(2, phase))
    assert find_superfluous(_CHAIN, states) == []
    states["c"].phase = Phase.FINISHED
    assert find_superfluous(_CHAIN, states) == ["b"]
    assert find_superfluous(_CHAIN, _running(a=AttemptState(2, phase), b=AttemptState(phase=Phase.FINISHED))) == []


def test_the_consumer_is_rebound_first_and_the_producer_last() -> None:
    states = _running()
    _apply(_CHAIN, states, lost={"b"}, fresh=set())
    assert next_actions(_CHAIN, states) == [Action(ActionKind.PLACE, "b")]
    states["b"].phase = Phase.PLACED
    assert next_actions(_CHAIN, states) == [Action(ActionKind.REBIND_INPUTS, "c", ("b->c",))]
    states["c"].bound = {"b->c": 2}
    assert next_actions(_CHAIN, states) == [Action(ActionKind.START, "b")]
    states["b"].phase, states["b"].bound = Phase.RUNNING, {"a->b": 2, "b->c": 2}
    assert next_actions(_CHAIN, states) == [Action(ActionKind.REBIND_OUTPUTS, "a", ("a->b",))]
    states["a"].bound = {"a->b": 2}
    assert next_actions(_CHAIN, states) == []


def test_each_attempt_receives_the_clients_input_once_it_runs() -> None:
    route = Route((cast("Stage", SimpleNamespace(name="a")),), (), {}, input_edges=(_edge("in", "@input", "a"),))
    states = {"a": AttemptState()}
    assert next_actions(route, states) == [Action(ActionKind.START, "a")]
    states["a"].phase = Phase.RUNNING
    assert next_actions(route, states) == [Action(ActionKind.SEND_INPUT, "a", ("in",))]
    states["a"].bound = {"in": 1}
    assert next_actions(route, states) == []
    _apply(route, states, lost={"a"}, fresh=set())
    states["a"].phase = Phase.RUNNING
    assert next_actions(route, states) == [Action(ActionKind.SEND_INPUT, "a", ("in",))]


def test_a_stage_resumes_if_its_consumers_keep_running() -> None:
    states = _running(b=AttemptState(phase=Phase.RUNNING, bound=_BOUND, checkpoint_rows={"t": 3}))
    assert plan_restarts(_CHAIN, states, lost={"b"}).restarted["b"].resumes
    together = plan_restarts(_CHAIN, states, lost={"b", "c"})
    assert not together.restarted["b"].resumes
    assert together.void == {"b"}


def test_a_checkpoint_before_the_first_row_is_always_useful() -> None:
    states = _running(b=AttemptState(phase=Phase.RUNNING, bound=_BOUND, checkpoint_rows={"t": 0}))
    assert plan_restarts(_CHAIN, states, lost={"b", "c"}).restarted["b"].resumes


def test_a_resumed_stage_cannot_feed_a_new_consumer() -> None:
    states = _running(b=AttemptState(phase=Phase.RUNNING, bound=_BOUND, first_rows={"t": 3}))
    assert set(plan_restarts(_CHAIN, states, lost={"c"}).restarted) == {"b", "c"}


def test_a_stage_restarts_if_its_chunks_cannot_begin_after_the_first_row() -> None:
    route = _route("ab", _edge("a->b", "a", "b", chunk="whole"))
    state = AttemptState(phase=Phase.RUNNING, bound={"a->b": 1})
    assert not is_checkpoint_useful(route, {"a": state, "b": state}, "a", {"t": 1})
    assert is_checkpoint_useful(route, {"a": state, "b": state}, "a", {"t": 0})


def test_a_stage_that_applies_the_transform_restarts_from_its_start() -> None:
    edge = Edge(name="a->b", producer="a", consumer="b", transform="t", transforms_at_producer=True)
    state = AttemptState(phase=Phase.RUNNING, bound={"a->b": 1})
    assert not is_checkpoint_useful(_route("ab", edge), {"a": state, "b": state}, "a", {"t": 1})


def test_a_checkpoint_of_rows_that_no_consumer_gets_is_not_stored() -> None:
    states = _running(c=AttemptState(2, Phase.RUNNING, {"b->c": 2}))
    assert not is_checkpoint_useful(_CHAIN, states, "b", {"t": 1})
    assert is_checkpoint_useful(_CHAIN, _running(), "b", {"t": 1})


def test_a_producer_that_cannot_send_again_restarts() -> None:
    states = _running(a=AttemptState(phase=Phase.FINISHED, bound={"a->b": 1}))
    assert plan_restarts(_CHAIN, states, lost={"a"}).restarted == {}
    assert plan_restarts(_CHAIN, states, lost=set(), fresh={"a"}).restarted == {"a": Restart(2, resumes=False)}


def test_a_lost_stage_that_nothing_needs_is_finished() -> None:
    states = _running(c=AttemptState(phase=Phase.FINISHED, bound={"b->c": 1}))
    found = plan_restarts(_CHAIN, states, lost={"b"})
    assert found.unneeded == {"b"}
    assert not found.restarted
