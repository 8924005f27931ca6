"""Resolves the file's `when`s: names, types, and whether they ever make a difference."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from stagemesh.common.descriptors import OptionSpec
from stagemesh.orchestrator.spec.checks.problems import Problems, suggest
from stagemesh.orchestrator.spec.checks.satisfiability import find_facts
from stagemesh.orchestrator.spec.conditions import (
    Comparison,
    Condition,
    Fact,
    InputKind,
    Term,
    describe_condition,
)
from stagemesh.orchestrator.spec.model import Stage
from stagemesh.orchestrator.spec.schema import OptionShape, TermShape
from stagemesh.orchestrator.spec.source.origins import KeyPath

_MEDIA: Collection[InputKind] = ("image", "audio", "video")
_FLAGS: Mapping[bool, float] = {True: 1.0, False: 0.0}


@dataclass(frozen=True)
class WhenResolver:
    """Turns the file's conditions into checked ones; what is wrong goes to `problems`."""

    problems: Problems
    options: Mapping[str, OptionSpec]
    """What a request may set."""
    ambiguous: Mapping[str, Sequence[str]]
    """Options that stages have with different defaults, and those stages."""
    outputs: Collection[str]
    media: bool
    """Whether a stage takes pictures, sound and films."""

    def resolve(self, path: KeyPath, shapes: Sequence[TermShape]) -> Condition:
        """The condition at `path`, without what is wrong of it."""
        condition: Condition = ()
        for number, shape in enumerate(shapes):
            condition += self._terms((*path, number), shape)
        if all(self._makes_a_difference(path, term) for term in condition) and find_facts(condition) is None:
            self.problems.add(path, f"{describe_condition(condition)}: no request is so; remove one of them")
        return condition

    def _terms(self, path: KeyPath, shape: TermShape) -> Condition:
        subjects = [name for name in ("option", "input", "output") if getattr(shape, name) is not None]
        if len(subjects) != 1:
            named = " and ".join(subjects) or "nothing"
            self.problems.add(
                path, f"a condition names {named}; name one of option, input, output, and use a list for more"
            )
            return ()
        if shape.option is not None:
            return self._of_option(path, shape.option, shape.comparisons, flag=shape.flag_name)
        if shape.comparisons:
            keys = ", ".join(comparison.value for comparison in shape.comparisons)
            self.problems.add(path, f"{keys} is for options; write `given` of an input and `wanted` of an output")
            return ()
        return self._of_input(path, shape) if shape.input is not None else self._of_output(path, shape)

    def _of_option(
        self, path: KeyPath, name: str, comparisons: Mapping[Comparison, float], *, flag: str | None
    ) -> Condition:
        if name not in self.options:
            remedy = suggest(name, self.options)
            self.problems.add(path, f"no stage has an option {name!r}, and `options` declares none; {remedy}")
        elif name in self.ambiguous:
            stages = " and ".join(self.ambiguous[name])
            self.problems.add(
                path,
                f"stages {stages} have option {name!r} with different defaults; declare another one under `options`",
            )
        elif flag is not None:
            self.problems.add(path, f"option {name!r} is a number; write `is` in the place of `{flag}`")
        elif not comparisons:
            keys = ", ".join(comparison.value for comparison in Comparison)
            self.problems.add(path, f"option {name!r} is compared with nothing; add one of {keys}")
        else:
            bounds = self.options[name]
            return tuple(Term(Fact("option", name), how, value, bounds) for how, value in comparisons.items())
        return ()

    def _of_input(self, path: KeyPath, shape: TermShape) -> Condition:
        assert shape.input is not None, "the caller looked"
        if shape.wanted is not None:
            self.problems.add(path, "`wanted` is for outputs; write `given` of an input")
            return ()
        if shape.input in _MEDIA and not self.media:
            self.problems.add(
                path, f"no stage takes {shape.input}, and requests with it are refused; remove the condition"
            )
            return ()
        return (Term(Fact("input", shape.input), Comparison.IS, _FLAGS[shape.given is not False]),)

    def _of_output(self, path: KeyPath, shape: TermShape) -> Condition:
        assert shape.output is not None, "the caller looked"
        if shape.given is not None:
            self.problems.add(path, "`given` is for inputs; write `wanted` of an output")
            return ()
        if shape.output not in self.outputs:
            self.problems.add(path, f"no output {shape.output!r}; {suggest(shape.output, self.outputs)}")
            return ()
        return (Term(Fact("output", shape.output), Comparison.IS, _FLAGS[shape.wanted is not False]),)

    def _makes_a_difference(self, path: KeyPath, term: Term) -> bool:
        bounds = f"it goes from {term.bounds.minimum:g} to {term.bounds.maximum:g}"
        if find_facts((term,)) is None:
            self.problems.add(path, f"{term}: that is never so ({bounds}); compare it with another value")
            return False
        if find_facts((), unless=[(term,)]) is None:
            self.problems.add(
                path, f"{term}: that is always so ({bounds}); remove it, or compare it with another value"
            )
            return False
        return True


def pipeline_options(
    stages: Mapping[str, Stage], own: Mapping[str, OptionShape], problems: Problems
) -> tuple[Mapping[str, OptionSpec], Mapping[str, Sequence[str]]]:
    """What requests may set, and the options of which it depends on the stage what they are when left out."""
    options: dict[str, OptionSpec] = {}
    owners: dict[str, list[str]] = {}
    ambiguous: dict[str, Sequence[str]] = {}
    for stage in stages.values():
        for name, spec in stage.signature.options.items():
            owners.setdefault(name, []).append(stage.name)
            known = options.setdefault(name, spec)
            if known.default != spec.default:
                ambiguous[name] = owners[name]
            # All that have it are given the same value.
            options[name] = replace(
                known, minimum=max(known.minimum, spec.minimum), maximum=min(known.maximum, spec.maximum)
            )
    for name, shape in own.items():
        if name in owners:
            problems.add(
                ("options", name), f"stage {owners[name][0]!r} has option {name!r} already; choose another name"
            )
        options[name] = shape.spec
    return options, ambiguous
