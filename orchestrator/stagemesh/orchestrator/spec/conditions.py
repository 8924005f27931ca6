"""Conditions on a request: a closed set of typed comparisons, all of which must hold.

Every fact about a request is a number. The value of an option is the option's value. The value of a kind of input is 1
if the request has such input, and 0 otherwise. The value of an output is 1 if the request wants it, and 0 otherwise.
"""

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Literal, NamedTuple, TypeAlias

from stagemesh.common.descriptors import OptionSpec

InputKind: TypeAlias = Literal["text", "tokens", "image", "audio", "video", "tensors"]
"""A kind of input that a request may contain."""

FLAG = OptionSpec(default=0.0, minimum=0.0, maximum=1.0)
"""The bounds of facts about inputs and outputs."""


class Fact(NamedTuple):
    """A property of a request that has a number as its value."""

    kind: Literal["option", "input", "output"]
    name: str

    def describe(self, value: float) -> str:
        """Describes the fact with this value in plain English."""
        match self.kind:
            case "option":
                return f"option {self.name} is {value:g}"
            case "input":
                return f"the input has {'' if value else 'no '}{self.name}"
            case "output":
                return f"output {self.name} is {'' if value else 'not '}wanted"


Facts: TypeAlias = Mapping[Fact, float]
"""The known facts about a request. A fact that is absent has its default value."""


class Comparison(Enum):
    """A way to compare a fact. The value is the key in the pipeline file."""

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
    """One comparison of one fact. `bounds` are the bounds and the default of the fact's value."""

    fact: Fact
    comparison: Comparison
    value: float
    bounds: OptionSpec = FLAG

    def holds(self, value: float) -> bool:
        """Returns whether the comparison holds if the fact has this value."""
        return _HOLDS[self.comparison](value, self.value)

    def __str__(self) -> str:
        if self.fact.kind != "option" or self.comparison is Comparison.IS:
            return self.fact.describe(self.value)
        words = self.comparison.value.removeprefix("is_").replace("_", " ")
        return f"option {self.fact.name} is {words} {self.value:g}"


Condition: TypeAlias = tuple[Term, ...]
"""Terms that must all hold. An empty condition always holds."""


def holds(condition: Condition, facts: Facts) -> bool:
    """Returns whether a request with these facts fulfils a condition."""
    return all(term.holds(facts.get(term.fact, term.bounds.default)) for term in condition)


def wanted(output: str) -> Term:
    """Returns the term that holds if a request wants an output."""
    return Term(Fact("output", output), Comparison.IS, 1.0)


def describe_condition(condition: Condition) -> str:
    """Describes a condition in plain English."""
    return " and ".join(map(str, condition)) or "always"


def describe_facts(facts: Facts) -> str:
    """Describes facts in plain English."""
    return " and ".join(fact.describe(value) for fact, value in facts.items()) or "always"
