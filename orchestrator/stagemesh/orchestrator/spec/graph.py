"""Functions on directed graphs: topological order, cycles and ancestors. Nodes are names."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple


class Arc(NamedTuple):
    """A directed edge from a producer to a consumer."""

    producer: str
    consumer: str


def topological_order(nodes: Sequence[str], arcs: Collection[Arc]) -> tuple[str, ...]:
    """Sorts nodes so that producers precede consumers. Otherwise preserves the given order.

    Omits nodes that are on a cycle or downstream of a cycle.
    """
    waits_for = {node: {arc.producer for arc in arcs if arc.consumer == node} for node in nodes}
    order: list[str] = []
    while ready := next((node for node, producers in waits_for.items() if producers <= set(order)), None):
        order.append(ready)
        del waits_for[ready]
    return tuple(order)


def find_cycle(nodes: Sequence[str], arcs: Collection[Arc]) -> tuple[str, ...]:
    """Returns the nodes of one cycle, or an empty tuple if there is none. The first node is repeated at the end."""
    stuck = set(nodes) - set(topological_order(nodes, arcs))
    producers = {arc.consumer: arc.producer for arc in arcs if {arc.producer, arc.consumer} <= stuck}
    if not producers:
        return ()
    # Every stuck node has a stuck producer, so that a walk upstream reaches a node of the walk again.
    walk = [next(node for node in nodes if node in producers)]
    while (producer := producers[walk[-1]]) not in walk:
        walk.append(producer)
    return (producer, *reversed(walk[walk.index(producer) :]))


def ancestors(targets: Iterable[str], arcs: Collection[Arc]) -> frozenset[str]:
    """Returns the target nodes and all nodes from which a target can be reached."""
    upstream: Mapping[str, set[str]] = {arc.consumer: set() for arc in arcs}
    for arc in arcs:
        upstream[arc.consumer].add(arc.producer)
    found, fresh = set[str](), set(targets)
    while fresh:
        found |= fresh
        fresh = {producer for node in fresh for producer in upstream.get(node, ())} - found
    return frozenset(found)
