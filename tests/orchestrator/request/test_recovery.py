"""The consequences of a loss: single cases, and a model of flowing rows in which stages are lost at random."""

import random
from collections.abc import Iterable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stagemesh.orchestrator.request.recovery import (
    Action,
    ActionKind,
    AttemptState,
    Phase,
    Restart,
    attempt_of,
    find_superfluous,
    is_checkpoint_useful,
    is_open,
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


def test_an_attempt_of_a_flow_is_never_reused() -> None:
    states = _running()
    seen = {1}
    for stage in ("a", "b", "b", "a"):
        _apply(_CHAIN, states, lost=set(), fresh={stage})
        attempt = attempt_of(_A_B, states)
        assert attempt not in seen
        seen.add(attempt)


_ROWS = 3


@dataclass
class _Step:
    """A model of one attempt on a replica."""

    made: int
    """The number of rows that the attempt has emitted or skipped."""
    begins: int
    outlets: dict[str, int] = field(default_factory=dict[str, int])
    """The attempt of the outgoing flow, by edge."""
    inlets: dict[str, int] = field(default_factory=dict[str, int])
    taken: dict[str, int] = field(default_factory=dict[str, int])
    """The number of rows that have arrived, by edge."""
    origin: dict[str, int] = field(default_factory=dict[str, int])
    """The first row of the expected flow, by edge."""


class _Mesh:
    """Stages that emit one row for each row of all their producers, and carry out the actions of `recovery`."""

    def __init__(self, route: Route) -> None:
        self.route = route
        self.states: dict[str, AttemptState] = {name: AttemptState() for name in _names(route)}
        self.steps: dict[str, _Step] = {}
        self.fresh: set[str] = set()

    def lose(self, stages: list[str]) -> None:
        _apply(self.route, self.states, lost=set(stages), fresh=set())

    def recover(self) -> None:
        if self.fresh:
            _apply(self.route, self.states, lost=set(), fresh=self.fresh)
            self.fresh = set()

    def do(self, action: Action, *, kept: bool) -> None:
        state = self.states[action.stage]
        match action.kind:
            case ActionKind.PLACE:
                state.phase = Phase.PLACED
            case ActionKind.START:
                self._start(action.stage)
            case ActionKind.REBIND_INPUTS:
                self._rebind_inputs(action.stage, action.edges)
            case ActionKind.REBIND_OUTPUTS:
                self._rebind_outputs(action.stage, action.edges, kept=kept)
            case ActionKind.SEND_INPUT:
                raise AssertionError("no route of the model has streamed input")

    def _start(self, stage: str) -> None:
        state = self.states[stage]
        begins = state.first_rows.get("t", 0)
        step = self.steps[stage] = _Step(begins, begins)
        for flow in self.route.outgoing[stage]:
            if is_open(flow, self.states):
                consumer, attempt = self.steps[flow.consumer], attempt_of(flow, self.states)
                assert consumer.inlets[flow.name] == attempt, "its consumer expects it"
                assert consumer.origin[flow.name] == begins, "and knows from where on"
                assert consumer.taken[flow.name] >= begins, "and misses nothing"
                step.outlets[flow.name] = attempt
        for flow in self.route.incoming[stage]:
            step.inlets[flow.name] = attempt_of(flow, self.states)
            step.taken[flow.name] = step.origin[flow.name] = 0
        state.bound = {**step.inlets, **step.outlets}
        state.phase = Phase.RUNNING

    def _rebind_inputs(self, stage: str, edges: tuple[str, ...]) -> None:
        step = self.steps[stage]
        flows = [flow for flow in self.route.incoming[stage] if flow.name in edges]
        short = [flow for flow in flows if step.taken[flow.name] < self.states[flow.producer].first_rows.get("t", 0)]
        self.fresh |= {flow.producer for flow in short}
        for flow in flows if not short else ():
            attempt = attempt_of(flow, self.states)
            assert attempt > step.inlets[flow.name], "a flow has a name of its own"
            step.inlets[flow.name] = attempt
            step.origin[flow.name] = self.states[flow.producer].first_rows.get("t", 0)
            self.states[stage].bound = {**self.states[stage].bound, flow.name: attempt}

    def _rebind_outputs(self, stage: str, edges: tuple[str, ...], *, kept: bool) -> None:
        step = self.steps[stage]
        if not kept or any(edge not in step.outlets for edge in edges):
            self.fresh.add(stage)
            return
        for flow in self.route.outgoing[stage]:
            if flow.name in edges:
                assert step.begins == 0, "the new consumer needs all rows"
                assert self.steps[flow.consumer].taken[flow.name] == 0
                step.outlets[flow.name] = attempt_of(flow, self.states)
                self.states[stage].bound = {**self.states[stage].bound, flow.name: step.outlets[flow.name]}

    def crosses(self, flow: Edge) -> bool:
        """Transfers one row, if there is one and both ends agree on the attempt. Returns whether it did."""
        producer, consumer = self.steps.get(flow.producer), self.steps.get(flow.consumer)
        if producer is None or consumer is None or self.states[flow.consumer].phase is not Phase.RUNNING:
            return False
        alive = self.states[flow.producer].phase in (Phase.RUNNING, Phase.FINISHED)
        joined = producer.outlets.get(flow.name) == consumer.inlets.get(flow.name)
        if not (alive and joined and consumer.taken[flow.name] < producer.made):
            return False
        assert consumer.taken[flow.name] >= producer.begins, "no row is left out"
        consumer.taken[flow.name] += 1
        return True

    def works(self, stage: str) -> bool:
        """Makes a row at the stage, or finishes it, if possible. Returns whether it did."""
        state, step = self.states[stage], self.steps.get(stage)
        if state.phase is not Phase.RUNNING or step is None:
            return False
        if step.made < _ROWS:
            if any(step.taken[flow.name] <= step.made for flow in self.route.incoming[stage]):
                return False
            step.made += 1
            return True
        for flow in self.route.outgoing[stage]:
            if is_open(flow, self.states) and self.steps[flow.consumer].taken.get(flow.name, 0) < _ROWS:
                return False
        state.phase = Phase.FINISHED
        return True

    def checkpoint(self, stage: str) -> None:
        state = self.states[stage]
        if state.phase is Phase.RUNNING:
            rows = {"t": self.steps[stage].made}
            if is_checkpoint_useful(self.route, self.states, stage, rows):
                state.checkpoint_rows = rows

    @property
    def is_done(self) -> bool:
        return all(state.phase is Phase.FINISHED for state in self.states.values())


_ROUTES = [
    _CHAIN,
    _route(
        ("top", "left", "right", "end"),
        _edge("1", "top", "left"),
        _edge("2", "top", "right", chunk="whole"),
        _edge("3", "left", "end"),
        _edge("4", "right", "end"),
        output_stages=["end"],
    ),
    _route("ab", _edge("1", "a", "b"), _edge("2", "a", "b")),
]


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(_ROUTES), st.integers(0, 1 << 32))
def test_every_row_arrives_everywhere_once_whatever_is_lost(route: Route, seed: int) -> None:
    mesh, rng = _Mesh(route), random.Random(seed)
    for _ in range(rng.randrange(120)):
        chance = rng.random()
        if chance < 0.06:
            mesh.lose(rng.sample(_names(route), rng.choice([1, 2])))
        elif chance < 0.2:
            mesh.checkpoint(rng.choice(_names(route)))
        else:
            _do_something(mesh, rng)
    _run_to_the_end(mesh)
    for flow in route.edges:
        consumer = mesh.steps[flow.consumer]
        # A stage that resumed after its last row needs nothing more, nor does one whose consumers have finished.
        if not route.outgoing[flow.consumer] and not consumer.begins:
            assert consumer.taken[flow.name] == _ROWS


def _do_something(mesh: _Mesh, rng: random.Random) -> None:
    """Performs one possible step, chosen at random."""
    actions = next_actions(mesh.route, mesh.states)
    if actions and rng.random() < 0.6:
        mesh.do(rng.choice(actions), kept=rng.random() < 0.7)
        mesh.recover()
        return
    flows = rng.sample(mesh.route.edges, len(mesh.route.edges))
    stages = rng.sample(_names(mesh.route), len(_names(mesh.route)))
    if rng.random() < 0.6:
        any(mesh.crosses(flow) for flow in flows)
    else:
        any(mesh.works(stage) for stage in stages)


def _run_to_the_end(mesh: _Mesh) -> None:
    for _ in range(200):
        if mesh.is_done:
            return
        for action in next_actions(mesh.route, mesh.states):
            if action in next_actions(mesh.route, mesh.states):
                mesh.do(action, kept=True)
                mesh.recover()
        for flow in mesh.route.edges:
            while mesh.crosses(flow):
                pass
        for stage in _names(mesh.route):
            mesh.works(stage)
    pytest.fail(f"it hangs: {mesh.states}")
