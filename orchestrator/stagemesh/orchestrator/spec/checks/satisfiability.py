"""Whether requests exist that conditions tell apart: by trying every case that makes a difference."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain, pairwise

from stagemesh.orchestrator.spec.conditions import Comparison, Condition, Fact, Facts, InputKind, Term

_BESIDE_TOKENS: Sequence[InputKind] = ("text", "image", "audio", "video")
_NEVER: Sequence[Condition] = tuple(
    tuple(Term(Fact("input", kind), Comparison.IS, 1.0) for kind in ("tokens", other)) for other in _BESIDE_TOKENS
)
"""What no request is like: its prompt is tokens, or it is something else."""


def find_facts(given: Condition, *, unless: Iterable[Condition] = ()) -> Facts | None:
    """Facts under which `given` holds and none of `unless` does; None where no request is such.

    Exact: a fact is tried at its bounds, at its default, at every value that it is compared with, and between them.
    """
    others = tuple(unless)
    values = _values(dict.fromkeys(chain(given, *others)))
    never = tuple(condition for condition in _NEVER if all(term.fact in values for term in condition))
    return _search({}, given, others + never, values)


def _search(
    known: dict[Fact, float], given: Condition, unless: Sequence[Condition], values: Mapping[Fact, Sequence[float]]
) -> Facts | None:
    required = _left(given, known)
    open_conditions = [left for condition in unless if (left := _left(condition, known)) is not None]
    if required is None or () in open_conditions:
        return None
    undecided = next(chain(required, *open_conditions), None)
    if undecided is None:
        return known
    for value in values[undecided.fact]:
        found = _search({**known, undecided.fact: value}, required, open_conditions, values)
        if found is not None:
            return found
    return None


def _left(condition: Condition, known: Facts) -> Condition | None:
    """The terms that are not decided yet; None where one fails."""
    if not all(term.holds(known[term.fact]) for term in condition if term.fact in known):
        return None
    return tuple(term for term in condition if term.fact not in known)


def _values(terms: Iterable[Term]) -> Mapping[Fact, Sequence[float]]:
    """The values of each fact that stand for all, those that are usual first."""
    by_fact: dict[Fact, list[Term]] = {}
    for term in terms:
        by_fact.setdefault(term.fact, []).append(term)
    return {fact: _values_of(fact, found) for fact, found in by_fact.items()}


def _values_of(fact: Fact, terms: Sequence[Term]) -> Sequence[float]:
    bounds = terms[0].bounds
    if fact.kind != "option":
        return (0.0, 1.0)
    compared = [term.value for term in terms if bounds.minimum <= term.value <= bounds.maximum]
    points = sorted({bounds.minimum, bounds.maximum, bounds.default, *compared})
    between = [low + (high - low) / 2 for low, high in pairwise(points)]
    return tuple(dict.fromkeys([bounds.default, *points, *between]))
