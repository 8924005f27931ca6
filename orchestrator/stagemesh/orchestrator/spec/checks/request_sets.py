"""Represents sets of requests, so that conditions can be combined and tested for contradictions.

A set is a decision diagram (Bryant, "Graph-based algorithms for Boolean function manipulation", 1986) over the facts
that conditions compare. Each node of the diagram tests one fact. The node has one child for each value of the fact that
can change a comparison. The size of a diagram increases with the number of interdependent facts, not with the number of
paths through a pipeline.
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import reduce
from itertools import chain, pairwise
from typing import NamedTuple, TypeAlias

from stagemesh.orchestrator.spec.conditions import Comparison, Condition, Fact, Facts, InputKind, Term

_EXCLUDED: Mapping[InputKind, Sequence[InputKind]] = {
    "tokens": ("text", "image", "audio", "video"),
    "stream": ("text", "tokens", "image", "audio", "video", "tensors"),
}
_IMPOSSIBLE: Sequence[Condition] = tuple(
    tuple(Term(Fact("input", kind), Comparison.IS, 1.0) for kind in (one, other))
    for one, others in _EXCLUDED.items()
    for other in others
)
"""Conditions that no request fulfils. A prompt consists either of tokens or of other inputs, never of both. A request
whose input is streamed has no prompt.
"""
MAX_NODES = 50_000

RequestSet: TypeAlias = int
"""A set of requests, represented by the index of the root node of its decision diagram."""

NONE: RequestSet = 0
ALL: RequestSet = 1


class TooManyCasesError(Exception):
    """Raised if the sets of requests in a pipeline need more than MAX_NODES nodes."""


class _Node(NamedTuple):
    level: int
    """The index of the fact that the node tests. The nodes ALL and NONE test no fact and have the highest level."""
    children: tuple[RequestSet, ...]


class RequestSets:
    """Creates and combines sets of requests. `terms` are all comparisons that conditions of the sets may contain.

    Each set is represented by a number. Two sets are equal if and only if their numbers are equal. All methods raise
    TooManyCasesError if the sets together have more than 50,000 nodes.
    """

    def __init__(self, terms: Iterable[Term]) -> None:
        self._values = _values_by_fact(terms)
        self._facts = list(self._values)
        self._nodes = [_Node(len(self._facts), ())] * 2
        self._sets: dict[_Node, RequestSet] = {}
        self._differences: dict[tuple[RequestSet, RequestSet], RequestSet] = {}
        excluded = [each for each in _IMPOSSIBLE if all(term.fact in self._values for term in each)]
        self._possible = reduce(self.difference, map(self.where, excluded), ALL)

    def where(self, condition: Condition) -> RequestSet:
        """Returns the set of requests that fulfil a condition."""
        return reduce(self.both, map(self._where_term, condition), ALL)

    def difference(self, first: RequestSet, second: RequestSet) -> RequestSet:
        """Returns the set of requests that are in the first set but not in the second."""
        if first == NONE or second in (ALL, first):
            return NONE
        if second == NONE:
            return first
        key = (first, second)
        if key not in self._differences:
            level = min(self._nodes[first].level, self._nodes[second].level)
            pairs = zip(self._children(first, level), self._children(second, level), strict=True)
            self._differences[key] = self._set(level, [self.difference(*pair) for pair in pairs])
        return self._differences[key]

    def both(self, first: RequestSet, second: RequestSet) -> RequestSet:
        """Returns the intersection of two sets."""
        return self.difference(first, self.difference(ALL, second))

    def either(self, first: RequestSet, second: RequestSet) -> RequestSet:
        """Returns the union of two sets."""
        return self.difference(ALL, self.difference(self.difference(ALL, first), second))

    def find_facts(self, requests: RequestSet) -> Facts | None:
        """Returns facts such that every possible request with these facts is in the set `requests`.

        Prefers the default value of each fact. Returns None if no possible request is in the set.
        """
        node = self.both(requests, self._possible)
        if node == NONE:
            return None
        found: dict[Fact, float] = {}
        while node != ALL:
            level, children = self._nodes[node]
            # Every node but NONE leads to ALL.
            index = next(i for i, child in enumerate(children) if child != NONE)
            found[self._facts[level]] = self._values[self._facts[level]][index]
            node = children[index]
        others = self.difference(self._possible, requests)
        for fact in tuple(found):
            fewer = {other: value for other, value in found.items() if other != fact}
            if not self._contains(others, fewer):
                found = fewer
        return found

    def _contains(self, requests: RequestSet, facts: Facts) -> bool:
        """Returns whether the set `requests` contains at least one request that has the properties `facts`."""
        pending, seen = [requests], {NONE}
        while pending:
            if (node := pending.pop()) == ALL:
                return True
            if node not in seen:
                seen.add(node)
                level, children = self._nodes[node]
                fact = self._facts[level]
                pending += [children[self._values[fact].index(facts[fact])]] if fact in facts else children
        return False

    def _where_term(self, term: Term) -> RequestSet:
        values = self._values[term.fact]
        return self._set(self._facts.index(term.fact), [int(term.holds(value)) for value in values])

    def _children(self, requests: RequestSet, level: int) -> Sequence[RequestSet]:
        node = self._nodes[requests]
        return node.children if node.level == level else [requests] * len(self._values[self._facts[level]])

    def _set(self, level: int, children: Sequence[RequestSet]) -> RequestSet:
        if len(set(children)) == 1:
            return children[0]
        node = _Node(level, tuple(children))
        if node not in self._sets:
            if len(self._nodes) >= MAX_NODES:
                raise TooManyCasesError
            self._sets[node] = len(self._nodes)
            self._nodes.append(node)
        return self._sets[node]


def find_facts(given: Condition, *, unless: Iterable[Condition] = ()) -> Facts | None:
    """Returns facts of a request that fulfils `given` and none of `unless`, or None if there is no such request.

    The result is exact. For each fact, the search considers the bounds, the default, every compared value, and one
    value between each two adjacent values.
    """
    others = tuple(unless)
    sets = RequestSets(chain(given, *others))
    return sets.find_facts(reduce(sets.difference, map(sets.where, others), sets.where(given)))


def _values_by_fact(terms: Iterable[Term]) -> Mapping[Fact, Sequence[float]]:
    """Returns representative values of each fact. The first value of each fact is its default.

    Any other possible value of a fact gives the same result in all comparisons as one of the representative values.
    """
    by_fact: dict[Fact, list[Term]] = {}
    for term in terms:
        by_fact.setdefault(term.fact, []).append(term)
    return {fact: _representative_values(fact, found) for fact, found in by_fact.items()}


def _representative_values(fact: Fact, terms: Sequence[Term]) -> Sequence[float]:
    bounds = terms[0].bounds
    if fact.kind != "option":
        return (0.0, 1.0)
    compared = [term.value for term in terms if bounds.minimum <= term.value <= bounds.maximum]
    points = sorted({bounds.minimum, bounds.maximum, bounds.default, *compared})
    between = [low + (high - low) / 2 for low, high in pairwise(points)]
    return tuple(dict.fromkeys([bounds.default, *points, *between]))
