"""Conditions on a request, and the sets of requests that meet them.

A condition is a conjunction of comparisons. Each compares a fact about the request with a number. For an option, it
is the option's value. For a kind of input, it is 1 if the request has such input, and 0 otherwise. For an output,
it is 1 if the output is requested, and 0 otherwise. A set of requests is a decision diagram over such facts.
"""

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import reduce
from itertools import chain, pairwise
from typing import Literal, NamedTuple, TypeAlias

InputKind: TypeAlias = Literal["text", "tokens", "image", "audio", "video", "tensors", "stream"]
"""The kinds of input that a request may contain. A request with the kind "stream" has no other one."""


class Bounds(NamedTuple):
    """The default and the inclusive bounds of a fact."""

    default: float
    minimum: float
    maximum: float


FLAG = Bounds(default=0.0, minimum=0.0, maximum=1.0)
"""The bounds of each fact about an input or output. The value of such a fact is 0 or 1."""


class Fact(NamedTuple):
    """A numeric property of a request, such as the value of an option."""

    kind: Literal["option", "input", "output"]
    name: str

    def describe(self, value: float) -> str:
        """Returns a statement in plain English that the fact has this value."""
        match self.kind:
            case "option":
                return f"option {self.name} is {value:g}"
            case "input" if self.name == "stream":
                return f"the input is {'' if value else 'not '}streamed"
            case "input":
                return f"the input has {'' if value else 'no '}{self.name}"
            case "output":
                return f"output {self.name} is {'' if value else 'not '}wanted"


Facts: TypeAlias = Mapping[Fact, float]
"""The values of facts about one request. A fact that is missing has its default value."""


class Comparison(Enum):
    """A comparison operator: its key in a pipeline file, and its function."""

    IS = "is", operator.eq
    IS_NOT = "is_not", operator.ne
    OVER = "over", operator.gt
    AT_LEAST = "at_least", operator.ge
    UNDER = "under", operator.lt
    AT_MOST = "at_most", operator.le

    def __init__(self, key: str, holds: Callable[[float, float], bool]) -> None:
        self.key, self.holds = key, holds


@dataclass(frozen=True)
class Term:
    """A comparison of a fact with a value. `bounds` are the bounds and the default of the fact."""

    fact: Fact
    comparison: Comparison
    value: float
    bounds: Bounds = FLAG

    def holds(self, value: float) -> bool:
        """Returns whether the comparison is true if the fact has this value."""
        return self.comparison.holds(value, self.value)

    def __str__(self) -> str:
        if self.fact.kind != "option" or self.comparison is Comparison.IS:
            return self.fact.describe(self.value)
        words = self.comparison.key.removeprefix("is_").replace("_", " ")
        return f"option {self.fact.name} is {words} {self.value:g}"


Condition: TypeAlias = tuple[Term, ...]
"""A conjunction of terms. An empty condition is always true."""


def holds(condition: Condition, facts: Facts) -> bool:
    """Returns whether a condition is true for a request with these facts."""
    return all(term.holds(facts.get(term.fact, term.bounds.default)) for term in condition)


STREAMED = Term(Fact("input", "stream"), Comparison.IS, 1.0)
"""A term that is true if the client streams the input while the request runs."""


def wanted(output: str) -> Term:
    """Returns a term that is true if the output with this name is requested."""
    return Term(Fact("output", output), Comparison.IS, 1.0)


def describe_condition(condition: Condition) -> str:
    """Returns a description of a condition in plain English. An empty condition is described as "always"."""
    return " and ".join(map(str, condition)) or "always"


def describe_facts(facts: Facts) -> str:
    """Returns a description of facts in plain English. An empty mapping is described as "always"."""
    return " and ".join(fact.describe(value) for fact, value in facts.items()) or "always"


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
