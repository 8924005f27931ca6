from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from stagemesh.pipeline.edge_resolver import find_cycle, topological_order
from stagemesh.pipeline.graph import Arc, ancestors

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
