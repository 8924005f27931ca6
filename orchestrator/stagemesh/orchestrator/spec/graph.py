"""Directed graphs of names: topological order, cycles and ancestors."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple


class Arc(NamedTuple):
    """A directed connection from a producer to a consumer."""

    producer: str
    consumer: str


def topological_order(nodes: Sequence[str], arcs: Collection[Arc]) -> tuple[str, ...]:
    """Returns the nodes with producers before consumers, and otherwise in the given order.

    Omits nodes on a cycle and nodes downstream of a cycle.
    """
    waits_for = {node: {arc.producer for arc in arcs if arc.consumer == node} for node in nodes}
    order: list[str] = []
    while ready := next((node for node, producers in waits_for.items() if producers <= set(order)), None):
        order.append(ready)
        del waits_for[ready]
    return tuple(order)


def find_cycle(nodes: Sequence[str], arcs: Collection[Arc]) -> tuple[str, ...]:
    """Returns the nodes of one cycle, with the first node repeated at the end. Empty if there is no cycle."""
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
    """Returns the targets and everything upstream of them."""
    upstream: Mapping[str, set[str]] = {arc.consumer: set() for arc in arcs}
    for arc in arcs:
        upstream[arc.consumer].add(arc.producer)
    found, fresh = set[str](), set(targets)
    while fresh:
        found |= fresh
        fresh = {producer for node in fresh for producer in upstream.get(node, ())} - found
    return frozenset(found)
