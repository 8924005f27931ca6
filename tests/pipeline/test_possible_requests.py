"""The graphs of pipelines, and their flows, whose checks are compared with routes of all possible requests."""

from collections.abc import Iterator
from itertools import pairwise, product
from pathlib import Path

from hypothesis import assume, given, settings
from hypothesis import strategies as st

from stagemesh.common.errors import InvalidPipelineError
from stagemesh.common.plugins.descriptors import INPUT, EngineDescriptor, OptionSpec, Signature
from stagemesh.common.wire.tensors import TensorSpec
from stagemesh.pipeline import Edge, Limits, Pipeline, PipelineOutput, Stage
from stagemesh.pipeline.conditions import Comparison, Condition, Fact, Facts, Term, find_facts, holds
from stagemesh.pipeline.document import Origin, Problems
from stagemesh.pipeline.edge_resolver import find_cycle, topological_order
from stagemesh.pipeline.graph import Arc, ancestors
from stagemesh.pipeline.possible_requests import check_flows
from tests.pipeline.files import installed

NUMBERS = TensorSpec.parse("float32[n]")
BOUNDS = OptionSpec(default=1.0, minimum=0.0, maximum=4.0)
LEVELS = [n / 4 for n in range(17)]
INPUTS = [(0.0, 0.0), (1.0, 0.0), (0.0, 1.0)]
"""Whether a request has images, and whether its input is streamed. No request has both."""
ENGINES = {
    name: EngineDescriptor(factory="", signature=lambda *_: Signature(), needs_model=False, joins=name == "many")
    for name in ("many", "one")
}

_TERMS = st.one_of(
    st.builds(Term, st.just(Fact("option", "level")), st.sampled_from(Comparison), st.integers(0, 4), st.just(BOUNDS)),
    st.builds(
        Term,
        st.sampled_from(
            [Fact("input", "image"), Fact("input", "stream"), Fact("output", "first"), Fact("output", "last")]
        ),
        st.just(Comparison.IS),
        st.sampled_from([0.0, 1.0]),
    ),
)
_CONDITIONS = st.lists(_TERMS, max_size=2).map(tuple)
_FEW_CONDITIONS = st.sampled_from([False, False, False, True]).flatmap(
    lambda some: _CONDITIONS if some else st.just(())
)


def _edges(producer: int | None, consumer: int) -> st.SearchStrategy[Edge]:
    """`producer` is None for an edge from the client's streamed input."""
    usual = ("x",) if producer is None or producer % 2 else ("y",)

    def edge(condition: Condition, brings: tuple[str, ...], *, apart: bool) -> Edge:
        ends = INPUT if producer is None else f"s{producer}", f"s{consumer}"
        return Edge(
            name="->".join(ends), producer=ends[0], consumer=ends[1], condition=condition, apart=apart, brings=brings
        )

    return st.builds(
        edge,
        condition=_CONDITIONS,
        apart=st.sampled_from([False, False, True]),
        brings=st.sampled_from([usual, usual, usual, ("x", "y")]),
    )


@st.composite
def _pipelines(draw: st.DrawFn) -> Pipeline:
    """Two to four stages. Earlier stages feed each stage but the first; the last two stages make the outputs.

    In every second pipeline, clients can stream their input to some stages, which then may have no other producer.
    """
    count = draw(st.integers(2, 4))
    stages: dict[str, Stage] = {}
    edges: list[Edge] = []
    input_edges: list[Edge] = []
    streamed = draw(st.sampled_from([set[int](), draw(st.sets(st.integers(1, count - 1)))]))
    for n in range(count):
        optional = frozenset(draw(st.sampled_from(["xy", "xy", "xy", "x", ""])))
        signature = Signature(accepts=dict.fromkeys("xy", NUMBERS), optional=optional) if n else Signature()
        engine = draw(st.sampled_from(["many", "many", "many", "one"]))
        stages[f"s{n}"] = Stage(name=f"s{n}", engine=engine, signature=signature, condition=draw(_FEW_CONDITIONS))
        least = draw(st.integers(0, 1)) if n in streamed else min(n, 2)
        producers = draw(st.sets(st.integers(0, n - 1), min_size=least)) if n else set[int]()
        input_edges += [draw(_edges(None, n))] if n in streamed else []
        edges += [draw(_edges(producer, n)) for producer in sorted(producers)]
    outputs = {
        "first": PipelineOutput(name="first", source=f"s{count - 2}.x", kind="tensor", sample_rate_hz=0),
        "last": PipelineOutput(name="last", source=f"s{count - 1}.x", kind="tensor", sample_rate_hz=0),
    }
    conditions = [stage.condition for stage in stages.values()] + [edge.condition for edge in edges]
    # A condition on streamed input is rejected if there is none.
    assume(input_edges or not any(term.fact.name == "stream" for condition in conditions for term in condition))
    limits = Limits(max_in_flight=1)
    return Pipeline("p", "g", stages, tuple(edges), outputs, limits, Path("p.yaml"), input_edges=tuple(input_edges))


def _requests() -> Iterator[tuple[list[str], Facts]]:
    for level, (image, stream) in product(LEVELS, INPUTS):
        inputs = {Fact("input", "image"): image, Fact("input", "stream"): stream}
        for outputs in (["first"], ["last"], ["first", "last"]):
            yield outputs, {Fact("option", "level"): level, **inputs}


def _is_sound(pipeline: Pipeline) -> bool:
    """Returns whether every request is served, and whether every stage and edge serves a request.

    A request is not served, but rejected, if a stage that only the client feeds lacks the request's kind of input.
    """
    used = set[str]()
    for outputs, facts in _requests():
        route = pipeline.route(outputs, facts)
        if any(_lacks_input(pipeline, stage, streams=route.streams) for stage in route.unfed):
            continue
        known = {**facts, **{Fact("output", name): 1.0 for name in outputs}}
        for stage in route.stages:
            incoming = (*route.incoming[stage.name], *route.inputs[stage.name])
            if not holds(stage.condition, known) or not _is_fed(stage, incoming):
                return False
        used |= {stage.name for stage in route.stages} | {edge.name for edge in (*route.edges, *route.input_edges)}
    return used == pipeline.stages.keys() | {edge.name for edge in (*pipeline.edges, *pipeline.input_edges)}


def _lacks_input(pipeline: Pipeline, stage: Stage, *, streams: bool) -> bool:
    """Returns whether only the client feeds a stage, in the other way than this request does."""
    takes_stream = any(edge.consumer == stage.name for edge in pipeline.input_edges)
    return not pipeline.incoming(stage.name) and takes_stream != streams


def _is_fed(stage: Stage, incoming: tuple[Edge, ...]) -> bool:
    if not stage.signature.accepts:
        return True
    needed = stage.signature.accepts.keys() - stage.signature.optional
    together = [edge for edge in incoming if not edge.apart]
    brought = [name for edge in together for name in edge.brings]
    return (
        bool(incoming)
        and (stage.engine == "many" or len(incoming) == 1)
        and (not together or needed <= set(brought))
        and len(brought) == len(set(brought))
        and all(needed <= set(edge.brings) for edge in incoming if edge.apart)
    )


def _is_accepted(pipeline: Pipeline) -> bool:
    problems = Problems({(): Origin(1, "p.yaml:1", "p.yaml:1")})
    with installed(engines=ENGINES):
        check_flows(problems, pipeline, (*pipeline.edges, *pipeline.input_edges))
    try:
        problems.raise_any()
    except InvalidPipelineError:
        return False
    return True


@settings(max_examples=300, deadline=None)
@given(_pipelines())
def test_a_pipeline_is_accepted_exactly_when_it_serves_every_request(pipeline: Pipeline) -> None:
    assert _is_accepted(pipeline) == _is_sound(pipeline)


def test_a_stage_that_reads_a_prompt_may_exclude_streamed_input() -> None:
    prompted = (Term(Fact("input", "stream"), Comparison.IS, 0.0),)
    reads = Signature(accepts={"x": NUMBERS})
    stages = {
        "s0": Stage(name="s0", engine="many", signature=Signature(), condition=prompted),
        "s1": Stage(name="s1", engine="many", signature=reads),
    }
    outputs = {
        "first": PipelineOutput(name="first", source="s0.x", kind="tensor", sample_rate_hz=0),
        "last": PipelineOutput(name="last", source="s1.x", kind="tensor", sample_rate_hz=0),
    }
    edge = Edge(name="@input->s1", producer=INPUT, consumer="s1", brings=("x",))
    pipeline = Pipeline("p", "g", stages, (), outputs, Limits(max_in_flight=1), Path("p.yaml"), input_edges=(edge,))
    assert _is_sound(pipeline)
    assert _is_accepted(pipeline)


@given(_CONDITIONS, st.lists(_CONDITIONS, max_size=3))
def test_facts_are_found_if_and_only_if_some_exist(given_: Condition, unless: list[Condition]) -> None:
    worlds = [
        {
            Fact("option", "level"): level,
            Fact("input", "image"): image,
            Fact("input", "stream"): stream,
            Fact("output", "first"): first,
            Fact("output", "last"): last,
        }
        for level, (image, stream), first, last in product(LEVELS, INPUTS, (0.0, 1.0), (0.0, 1.0))
    ]
    fitting = [world for world in worlds if holds(given_, world) and not any(holds(each, world) for each in unless)]
    found = find_facts(given_, unless=unless)
    assert (found is not None) == bool(fitting)
    assert found is None or (holds(given_, found) and not any(holds(each, found) for each in unless))


_NAMES = [f"s{i}" for i in range(9)]


@st.composite
def _dags(draw: st.DrawFn) -> tuple[list[str], set[Arc]]:
    """Nodes in any order, with arcs that all follow one hidden order."""
    hidden = draw(st.permutations(_NAMES))
    pairs = [Arc(a, b) for i, a in enumerate(hidden) for b in hidden[i + 1 :]]
    return draw(st.permutations(_NAMES)), draw(st.sets(st.sampled_from(pairs)))


_ARCS = st.sets(st.builds(Arc, st.sampled_from(_NAMES), st.sampled_from(_NAMES)), max_size=14)


@given(_dags())
def test_producers_come_before_consumers(dag: tuple[list[str], set[Arc]]) -> None:
    nodes, arcs = dag
    order = topological_order(nodes, arcs)
    assert sorted(order) == sorted(nodes)
    assert all(order.index(arc.producer) < order.index(arc.consumer) for arc in arcs)


@given(_dags())
def test_a_dag_has_no_cycle(dag: tuple[list[str], set[Arc]]) -> None:
    assert find_cycle(*dag) == ()


@given(_ARCS)
def test_a_cycle_is_found_if_and_only_if_there_is_no_order(arcs: set[Arc]) -> None:
    cycle = find_cycle(_NAMES, arcs)
    assert bool(cycle) == (len(topological_order(_NAMES, arcs)) < len(_NAMES))
    assert all(Arc(*pair) in arcs for pair in pairwise(cycle))
    assert not cycle or cycle[0] == cycle[-1]


@given(_dags(), st.sets(st.sampled_from(_NAMES), min_size=1))
def test_ancestors_are_exactly_the_nodes_upstream(dag: tuple[list[str], set[Arc]], targets: set[str]) -> None:
    _, arcs = dag
    needed = ancestors(targets, arcs)
    assert targets <= needed
    assert all(arc.producer in needed for arc in arcs if arc.consumer in needed)
    assert all(
        any(arc in arcs and arc.consumer in needed for arc in arcs if arc.producer == node) for node in needed - targets
    )


def test_independent_stages_keep_the_files_order() -> None:
    assert topological_order(["c", "a", "b"], {Arc("a", "b")}) == ("c", "a", "b")


def test_a_loop_to_itself_is_a_cycle() -> None:
    assert find_cycle(["a"], {Arc("a", "a")}) == ("a", "a")
