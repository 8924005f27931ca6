"""Conditions on a request. A condition is a conjunction of comparisons.

Each comparison compares a fact about the request with a number. Facts are numbers too. For an option, the fact is the
option's value. For a kind of input, the fact is 1 if the request has such input, and 0 otherwise. For an output, the
fact is 1 if the output is requested, and 0 otherwise.
"""

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
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
    """A comparison operator. The value of each member is the operator's key in a pipeline file."""

    IS = "is"
    IS_NOT = "is_not"
    OVER = "over"
    AT_LEAST = "at_least"
    UNDER = "under"
    AT_MOST = "at_most"


_HOLDS: Mapping[Comparison, Callable[[float, float], bool]] = {
    Comparison.IS: operator.eq,
    Comparison.IS_NOT: operator.ne,
    Comparison.OVER: operator.gt,
    Comparison.AT_LEAST: operator.ge,
    Comparison.UNDER: operator.lt,
    Comparison.AT_MOST: operator.le,
}


@dataclass(frozen=True)
class Term:
    """A comparison of a fact with a value. `bounds` are the bounds and the default of the fact."""

    fact: Fact
    comparison: Comparison
    value: float
    bounds: Bounds = FLAG

    def holds(self, value: float) -> bool:
        """Returns whether the comparison is true if the fact has this value."""
        return _HOLDS[self.comparison](value, self.value)

    def __str__(self) -> str:
        if self.fact.kind != "option" or self.comparison is Comparison.IS:
            return self.fact.describe(self.value)
        words = self.comparison.value.removeprefix("is_").replace("_", " ")
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
