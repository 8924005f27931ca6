"""Checks that whatever a request is like, each stage that runs is fed and each output that is wanted is made."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations
from typing import TypeAlias

from stagemesh.orchestrator.spec.checks.problems import Problems
from stagemesh.orchestrator.spec.checks.satisfiability import find_facts
from stagemesh.orchestrator.spec.checks.stages import Catalog
from stagemesh.orchestrator.spec.conditions import (
    Condition,
    Facts,
    Term,
    describe_condition,
    describe_facts,
    wanted,
)
from stagemesh.orchestrator.spec.model import Edge, PipelineOutput, Stage

Ways: TypeAlias = Sequence[Condition]
"""Conditions of which one must hold."""


@dataclass(frozen=True)
class FlowChecker:
    """Looks at a pipeline whose parts are right by themselves; what does not fit together goes to `problems`."""

    catalog: Catalog
    problems: Problems
    stages: Mapping[str, Stage]
    """Producers before consumers."""
    edges: Sequence[Edge]
    """In the file's order."""
    outputs: Mapping[str, PipelineOutput]

    def check(self) -> None:
        """Notes each problem once, where its remedy goes."""
        for output in self.outputs.values():
            self._check_made(output)
        for stage in self.stages.values():
            if self._check_runs(stage):
                self._check_fed(stage)
                self._check_joined(stage)

    @cached_property
    def _needed(self) -> Mapping[str, Ways]:
        """When each stage runs: where an output of its own is wanted, or a stage that runs takes what it makes."""
        needed: dict[str, Ways] = {}
        for stage in reversed(list(self.stages.values())):
            ways: list[Condition] = [
                (wanted(output.name),) for output in self.outputs.values() if output.stage == stage.name
            ]
            ways += [
                edge.when + way for edge in self.edges if edge.producer == stage.name for way in needed[edge.consumer]
            ]
            needed[stage.name] = _least([stage.when + way for way in ways])
        return needed

    def _taken(self, edge: Edge) -> Condition:
        """When an edge carries something, its consumer running."""
        return edge.when + self.stages[edge.producer].when

    def _check_made(self, output: PipelineOutput) -> None:
        stage = self.stages[output.stage]
        world = find_facts((wanted(output.name),), unless=[stage.when])
        if world is not None:
            self.problems.add(
                ("outputs", output.name),
                f"output {output.name!r} is not made when {describe_facts(world)}: stage {stage.name!r} runs only when "
                f"{describe_condition(stage.when)}; use `when: {{output: {output.name}}}` there, or conditions on its "
                "edges",
            )

    def _check_runs(self, stage: Stage) -> bool:
        if not self._needed[stage.name]:
            self.problems.add(
                ("stages", stage.name),
                f"stage {stage.name!r} never runs: its conditions and those on the way to every output contradict each "
                "other; change one",
            )
            return False
        for index, edge in enumerate(self.edges):
            if edge.consumer == stage.name and not self._find(stage, [edge]):
                self.problems.add(
                    ("edges", index),
                    f"edge {edge.name!r} carries nothing ever: its condition contradicts those of its stages; change "
                    "one",
                )
                return False
        return True

    def _check_fed(self, stage: Stage) -> None:
        incoming = self._incoming(stage)
        if not incoming:
            return
        world = self._find(stage, [], unless=[self._taken(edge) for edge in incoming])
        if world is not None:
            self.problems.add(
                ("stages", stage.name),
                f"nothing feeds stage {stage.name!r} when {describe_facts(world)}; give it a `when` of its own, or let "
                "an edge bring it something then",
            )
            return
        for tensor in stage.signature.accepts:
            if tensor not in stage.signature.optional:
                self._check_brought(stage, tensor)

    def _check_brought(self, stage: Stage, tensor: str) -> None:
        """That every input of a stage has a tensor that it needs."""
        together = [edge for edge in self._incoming(stage) if not edge.apart]
        for edge in self._incoming(stage):
            if edge.apart and tensor not in edge.brings:
                self.problems.add(
                    ("stages", stage.name),
                    f"stage {stage.name!r} takes what edge {edge.name!r} brings by itself (`join`), and it needs "
                    f"{tensor!r} with it; let these edges join, or bring it over this one",
                )
                return
        bringing = [self._taken(edge) for edge in together if tensor in edge.brings]
        for edge in together:
            world = self._find(stage, [edge], unless=bringing)
            if world is not None:
                self.problems.add(
                    ("stages", stage.name),
                    f"no edge brings stage {stage.name!r} its {tensor!r} when {describe_facts(world)}; give it the "
                    "same condition, or let another edge bring it then",
                )
                return

    def _check_joined(self, stage: Stage) -> None:
        joins = self.catalog.engine(stage.engine).joins
        for first, second in combinations(self._incoming(stage), 2):
            both = sorted(set(first.brings) & set(second.brings))
            clash = bool(both) and not first.apart and not second.apart
            if (joins and not clash) or self._find(stage, [first, second]) is None:
                continue
            index = self.edges.index(second)
            if not joins:
                text = (
                    f"engine {stage.engine!r} is fed by one edge, and edges {first.name!r} and {second.name!r} both "
                    f"lead to stage {stage.name!r}; join them in a function stage before it"
                )
            else:
                text = (
                    f"edges {first.name!r} and {second.name!r} both bring stage {stage.name!r} its {', '.join(both)}; "
                    "give it `join: any`, rename one by a transform, or give them conditions that exclude each other"
                )
            self.problems.add(("edges", index), text)

    def _incoming(self, stage: Stage) -> list[Edge]:
        return [edge for edge in self.edges if edge.consumer == stage.name]

    def _find(self, stage: Stage, taken: Sequence[Edge], *, unless: Sequence[Condition] = ()) -> Facts | None:
        """A request in which the stage runs and these edges feed it, and none of `unless` holds."""
        also: Condition = tuple(term for edge in taken for term in self._taken(edge))
        found = (find_facts(way + also, unless=unless) for way in self._needed[stage.name])
        return next((world for world in found if world is not None), None)


def _least(ways: Sequence[Condition]) -> Ways:
    """The same without what is impossible or said twice: stages that take turns leave no more ways than one."""
    possible = [way for way in ways if find_facts(way) is not None]
    shortened = [_shortened(way, possible) for way in possible]
    least: list[frozenset[Term]] = []
    for way in sorted(map(frozenset, shortened), key=len):
        if not any(other <= way for other in least):
            least.append(way)
    return [tuple(sorted(way, key=str)) for way in least]


def _shortened(way: Condition, ways: Ways) -> Condition:
    """A way without the terms that make no difference, because one of the ways holds then as well."""
    for term in way:
        shorter = tuple(other for other in way if other != term)
        if find_facts(shorter, unless=ways) is None:
            way = shorter
    return way
