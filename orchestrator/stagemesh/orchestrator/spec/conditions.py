"""Conditions on a request: a closed set of typed comparisons, all of which must hold.

Everything that can be compared is a number: an option has its value; a kind of input is 1 where the request has it, an
output 1 where it is wanted, and 0 otherwise.
"""

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Literal, NamedTuple, TypeAlias

from stagemesh.common.descriptors import OptionSpec

InputKind: TypeAlias = Literal["text", "tokens", "image", "audio", "video", "tensors"]
"""What a request may bring."""

FLAG = OptionSpec(default=0.0, minimum=0.0, maximum=1.0)
"""The bounds of what a request has or has not."""


class Fact(NamedTuple):
    """Something about a request that is a number."""

    kind: Literal["option", "input", "output"]
    name: str

    def describe(self, value: float) -> str:
        """Its value as people say it."""
        match self.kind:
            case "option":
                return f"option {self.name} is {value:g}"
            case "input":
                return f"the input has {'' if value else 'no '}{self.name}"
            case "output":
                return f"output {self.name} is {'' if value else 'not '}wanted"


Facts: TypeAlias = Mapping[Fact, float]
"""What is known of a request; what is left out has its default."""


class Comparison(Enum):
    """How a fact is compared; the value is the pipeline file's key."""

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
    """One comparison of one fact, which lies within `bounds`."""

    fact: Fact
    comparison: Comparison
    value: float
    bounds: OptionSpec = FLAG

    def holds(self, value: float) -> bool:
        """Whether it holds where the fact has this value."""
        return _HOLDS[self.comparison](value, self.value)

    def __str__(self) -> str:
        """As people say it."""
        if self.fact.kind != "option" or self.comparison is Comparison.IS:
            return self.fact.describe(self.value)
        return f"option {self.fact.name} is {_SAID[self.comparison]} {self.value:g}"


_SAID: Mapping[Comparison, str] = {
    Comparison.IS_NOT: "not",
    Comparison.OVER: "over",
    Comparison.AT_LEAST: "at least",
    Comparison.UNDER: "under",
    Comparison.AT_MOST: "at most",
}

Condition: TypeAlias = tuple[Term, ...]
"""Terms that must all hold; no terms hold always."""


def holds(condition: Condition, facts: Facts) -> bool:
    """Whether a request fulfils a condition."""
    return all(term.holds(facts.get(term.fact, term.bounds.default)) for term in condition)


def wanted(output: str) -> Term:
    """That a request wants an output."""
    return Term(Fact("output", output), Comparison.IS, 1.0)


def describe_condition(condition: Condition) -> str:
    """A condition as people say it."""
    return " and ".join(map(str, condition)) or "always"


def describe_facts(facts: Facts) -> str:
    """Facts as people say them."""
    return " and ".join(fact.describe(value) for fact, value in facts.items()) or "always"
