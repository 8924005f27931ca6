"""Checks the conditions of a pipeline file. Reports unknown names, and comparisons that are never or always true."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from stagemesh.common.plugins.descriptors import OptionSpec
from stagemesh.pipeline.conditions import (
    FLAG,
    Bounds,
    Comparison,
    Condition,
    Fact,
    InputKind,
    Term,
    describe_condition,
    find_facts,
)
from stagemesh.pipeline.document import KeyPath, Problems, suggest
from stagemesh.pipeline.graph import Stage
from stagemesh.pipeline.schema import InputTerm, OptionTerm, OutputTerm
from stagemesh.pipeline.schema import Term as TermEntry

_LARGE = 1e300
_MEDIA: Collection[InputKind] = ("image", "audio", "video")


@dataclass(frozen=True)
class ConditionResolver:
    """Converts the conditions of a pipeline file to checked conditions. Reports errors to `problems`."""

    problems: Problems
    options: Mapping[str, OptionSpec]
    """The options that requests may set, by name."""
    ambiguous: Mapping[str, Sequence[str]]
    """The names of the stages that have an ambiguous option, by option name.

    An option is ambiguous if its default differs between stages.
    """
    outputs: Collection[str]
    media: bool
    """Whether at least one stage accepts media: images, audio or video."""
    streams: bool = False
    """Whether at least one edge carries the input that a client streams."""

    def resolve(self, path: KeyPath, entries: Sequence[TermEntry]) -> Condition:
        """Returns the checked condition that consists of the terms `entries`. Omits invalid terms.

        `path` is the position of the terms in the pipeline file, for error messages.
        """
        condition: Condition = ()
        for number, entry in enumerate(entries):
            condition += self._terms((*path, number), entry)
        if all(self._makes_a_difference(path, term) for term in condition) and find_facts(condition) is None:
            self.problems.add(path, f"{describe_condition(condition)}: no request can fulfil this; remove a term")
        return condition

    def _terms(self, path: KeyPath, entry: TermEntry) -> Condition:
        match entry:
            case OptionTerm():
                return self._option_terms(path, entry.option, entry.comparisons)
            case InputTerm() if entry.input in _MEDIA and not self.media:
                text = f"no stage accepts {entry.input}, and requests with it are rejected; remove the condition"
            case InputTerm(input="stream") if not self.streams:
                text = "no edge leads from @input, so that no client can stream its input; remove the condition"
            case InputTerm():
                return (Term(Fact("input", entry.input), Comparison.IS, float(entry.given)),)
            case OutputTerm() if entry.output not in self.outputs:
                text = f"unknown output {entry.output!r}; {suggest(entry.output, self.outputs)}"
            case OutputTerm():
                return (Term(Fact("output", entry.output), Comparison.IS, float(entry.wanted)),)
        self.problems.add(path, text)
        return ()

    def _option_terms(self, path: KeyPath, name: str, comparisons: Mapping[Comparison, float]) -> Condition:
        if name not in self.options:
            remedy = suggest(name, self.options)
            text = f"no stage has an option {name!r}, and `options` does not declare it; {remedy}"
        elif name in self.ambiguous:
            stages = " and ".join(self.ambiguous[name])
            text = f"stages {stages} have option {name!r} with different defaults; declare another one under `options`"
        elif not comparisons:
            keys = ", ".join(comparison.key for comparison in Comparison)
            text = f"option {name!r} is not compared with anything; add one of {keys}"
        else:
            spec = self.options[name]
            if isinstance(spec.default, str):
                self.problems.add(path, f"option {name!r} is a text; conditions compare numbers and flags")
                return ()
            # Values between infinite bounds would not be numbers.
            numbers = Bounds(float(spec.default), max(spec.minimum, -_LARGE), min(spec.maximum, _LARGE))
            bounds = FLAG._replace(default=spec.default) if isinstance(spec.default, bool) else numbers
            return tuple(Term(Fact("option", name), how, value, bounds) for how, value in comparisons.items())
        self.problems.add(path, text)
        return ()

    def _makes_a_difference(self, path: KeyPath, term: Term) -> bool:
        bounds = f"the option is between {term.bounds.minimum:g} and {term.bounds.maximum:g}"
        if find_facts((term,)) is None:
            text = f"{term}: this never holds ({bounds}); compare it with another value"
        elif find_facts((), unless=[(term,)]) is None:
            text = f"{term}: this always holds ({bounds}); remove it, or compare it with another value"
        else:
            return True
        self.problems.add(path, text)
        return False


def _common_texts(one: OptionSpec, other: OptionSpec) -> tuple[str, ...]:
    if not one.allowed_texts or not other.allowed_texts:
        return one.allowed_texts or other.allowed_texts
    return tuple(each for each in one.allowed_texts if each in other.allowed_texts)


def merge_options(
    stages: Mapping[str, Stage], declared: Mapping[str, OptionSpec], problems: Problems
) -> tuple[Mapping[str, OptionSpec], Mapping[str, Sequence[str]]]:
    """Merges the options of all stages with `declared`, the options that the pipeline file declares.

    Returns two mappings by option name:

    - The options that requests may set.
    - The ambiguous options, whose default differs between stages. The values are the names of the stages with the
      option.

    Reports an error to `problems` if the file declares an option that a stage already has.
    """
    options: dict[str, OptionSpec] = {}
    owners: dict[str, list[str]] = {}
    ambiguous: dict[str, Sequence[str]] = {}
    for stage in stages.values():
        for name, spec in stage.signature.options.items():
            owners.setdefault(name, []).append(stage.name)
            known = options.setdefault(name, spec)
            if known.default != spec.default:
                ambiguous[name] = owners[name]
            if type(known.default) is not type(spec.default):
                text = f"stages {' and '.join(owners[name])} have option {name!r} with different types; rename one"
                problems.add(("stages", stage.name), text)
            # A value that a request gives without a stage must be allowed by all stages that have the option.
            options[name] = replace(
                known,
                minimum=max(known.minimum, spec.minimum),
                maximum=min(known.maximum, spec.maximum),
                allowed_texts=_common_texts(known, spec),
            )
            if known.allowed_texts and spec.allowed_texts and not options[name].allowed_texts:
                text = f"stages {' and '.join(owners[name])} have option {name!r} without a common text; rename one"
                problems.add(("stages", stage.name), text)
    for name in declared.keys() & owners.keys():
        problems.add(("options", name), f"stage {owners[name][0]!r} has option {name!r} already; choose another name")
    return {**options, **declared}, ambiguous
