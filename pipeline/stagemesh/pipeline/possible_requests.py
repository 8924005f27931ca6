"""Checks that a pipeline can serve every request: stages receive their inputs, and requested outputs are produced."""

from collections.abc import Sequence
from functools import reduce
from itertools import chain, combinations

from stagemesh.common.plugins.descriptors import EngineDescriptor
from stagemesh.common.plugins.entry_points import load_descriptor
from stagemesh.pipeline.conditions import (
    ALL,
    NONE,
    STREAMED,
    Condition,
    Facts,
    RequestSet,
    RequestSets,
    TooManyCasesError,
    describe_condition,
    describe_facts,
    wanted,
)
from stagemesh.pipeline.document import Problems
from stagemesh.pipeline.graph import Edge, Pipeline, PipelineOutput, Stage


def check_flows(problems: Problems, pipeline: Pipeline, edges: Sequence[Edge]) -> None:
    """Checks that the pipeline can serve every request. Reports errors to `problems`.

    A request that wants an output whose stages lack the request's kind of input is rejected, and is not considered: a
    streamed request for a stage that needs a prompt, or a request with a prompt for a stage that only "@input" feeds.

    Each stage, edge and output must already be valid individually. Producers must precede consumers in the pipeline's
    stages. `edges` contains all edges of the pipeline in the order of the file.
    """
    try:
        _FlowChecker(problems, pipeline, edges).check()
    except TooManyCasesError:
        text = "the conditions (`when`) distinguish too many cases to check them; use fewer conditions"
        problems.add(("stages",), text)


class _FlowChecker:
    """Computes the set of requests for which each stage runs, and the set for which each edge carries packets.

    Reports an error if a set shows that the pipeline cannot serve a request.
    """

    def __init__(self, problems: Problems, pipeline: Pipeline, edges: Sequence[Edge]) -> None:
        self._problems, self._pipeline, self._edges = problems, pipeline, edges
        stages = pipeline.stages
        # Diagrams remain small if the facts of connected stages are close to each other in the order of facts.
        conditions = [
            *((wanted(name),) for name in pipeline.all_outputs),
            *(each for stage in stages.values() for each in self._conditions_at(stage)),
        ]
        self._sets = sets = RequestSets(chain.from_iterable(conditions))
        # The requests for which each edge carries packets, provided that its consumer runs.
        self._open = {
            edge.name: sets.where(_own_condition(edge) + (() if edge.is_input else stages[edge.producer].condition))
            for edge in edges
        }
        self._needed: dict[str, RequestSet] = {}
        self._runs: dict[str, RequestSet] = {}
        for stage in reversed(list(stages.values())):
            self._needed[stage.name] = needed = self._needed_when(stage)
            self._runs[stage.name] = sets.both(sets.where(stage.condition), needed)
        rejected = reduce(sets.either, map(self._lacks_input, stages.values()), NONE)
        self._accepted = sets.difference(ALL, rejected)
        """The requests that are not rejected because a stage lacks their kind of input."""

    def check(self) -> None:
        """Checks all outputs and stages. Reports each error once, at the line of the file that must be changed."""
        for output in self._pipeline.all_outputs.values():
            self._check_made(output)
        for stage in self._pipeline.stages.values():
            if self._check_runs(stage):
                self._check_fed(stage)
                self._check_joined(stage)

    def _conditions_at(self, stage: Stage) -> list[Condition]:
        return [stage.condition, *map(_own_condition, self._incoming(stage))]

    def _incoming(self, stage: Stage) -> list[Edge]:
        return [edge for edge in self._edges if edge.consumer == stage.name]

    def _lacks_input(self, stage: Stage) -> RequestSet:
        """Returns the set of requests for which a stage that reads the client's input lacks this kind of input."""
        sets, incoming = self._sets, self._incoming(stage)
        if not self._pipeline.input_edges or not all(edge.is_input for edge in incoming):
            return NONE
        streamed, needed = sets.where((STREAMED,)), self._needed[stage.name]
        return sets.difference(needed, streamed) if incoming else sets.both(needed, streamed)

    def _needed_when(self, stage: Stage) -> RequestSet:
        """Returns the set of requests that need an output of a stage, for the client or for a stage that runs.

        The stage runs for those of these requests that fulfil its condition.
        """
        sets = self._sets
        outputs, edges = self._pipeline.all_outputs.values(), self._pipeline.outgoing(stage.name)
        ways = [sets.where((wanted(output.name),)) for output in outputs if output.stage == stage.name]
        ways += [sets.both(self._open[edge.name], self._runs[edge.consumer]) for edge in edges]
        return reduce(sets.either, ways, NONE)

    def _check_made(self, output: PipelineOutput) -> None:
        stage = self._pipeline.stages[output.stage]
        requests = self._sets.both(self._sets.where((wanted(output.name),)), self._accepted)
        facts = self._sets.find_facts(self._sets.difference(requests, self._sets.where(stage.condition)))
        if facts is not None:
            self._problems.add(
                ("outputs", output.name),
                f"output {output.name!r} is not made when {describe_facts(facts)}: stage {stage.name!r} runs only when "
                f"{describe_condition(stage.condition)}; use `when: {{output: {output.name}}}` there, or conditions on "
                "its edges",
            )

    def _check_runs(self, stage: Stage) -> bool:
        if self._find(stage) is None:
            self._problems.add(
                ("stages", stage.name),
                f"stage {stage.name!r} never runs: its conditions and those of the edges towards the outputs "
                "contradict each other; change one",
            )
            return False
        for index, edge in enumerate(self._edges):
            if edge.consumer == stage.name and self._find(stage, [edge]) is None:
                self._problems.add(("edges", index), f"edge {edge.name!r} never carries anything: {self._why(edge)}")
                return False
        return True

    def _why(self, edge: Edge) -> str:
        """Returns the reason why an edge never carries anything, and the remedy."""
        requests = self._sets.both(self._runs[edge.consumer], self._open[edge.name])
        for stage in self._pipeline.stages.values():
            together = self._sets.both(requests, self._runs[stage.name])
            if not self._incoming(stage) and self._sets.find_facts(together) is not None:
                return (
                    f"requests that use it also need stage {stage.name!r}, which reads a prompt, while streamed input "
                    "has none; give the edges from there `when: {input: stream, given: false}`"
                )
        return "its condition contradicts those of its stages; change one"

    def _check_fed(self, stage: Stage) -> None:
        incoming = self._incoming(stage)
        facts = self._find(stage, unless=incoming) if incoming else None
        if facts is not None:
            self._problems.add(
                ("stages", stage.name),
                f"no edge feeds stage {stage.name!r} when {describe_facts(facts)}; give the stage a `when`, or let an "
                "edge feed it in this case",
            )
            return
        for tensor in stage.signature.accepts if incoming else ():
            if tensor not in stage.signature.optional:
                self._check_brought(stage, tensor)

    def _check_brought(self, stage: Stage, tensor: str) -> None:
        """Reports an error if a request could send the stage an input without the required tensor `tensor`."""
        together = [edge for edge in self._incoming(stage) if not edge.apart]
        for edge in self._incoming(stage):
            if edge.apart and tensor not in edge.brings:
                self._problems.add(
                    ("stages", stage.name),
                    f"stage {stage.name!r} does not join edge {edge.name!r} with others (`join`), but requires "
                    f"{tensor!r} with it; join these edges, or bring {tensor!r} over this edge",
                )
                return
        bringing = [edge for edge in together if tensor in edge.brings]
        for edge in together:
            facts = self._find(stage, [edge], unless=bringing)
            if facts is not None:
                self._problems.add(
                    ("stages", stage.name),
                    f"no edge brings stage {stage.name!r} its {tensor!r} when {describe_facts(facts)}; give the stage "
                    "the same condition, or let another edge bring it in this case",
                )
                return

    def _check_joined(self, stage: Stage) -> None:
        joins = stage.is_external or load_descriptor(EngineDescriptor, stage.engine).joins
        for first, second in combinations(self._incoming(stage), 2):
            both = sorted(set(first.brings) & set(second.brings))
            clash = bool(both) and not first.apart and not second.apart
            if (joins and not clash) or self._find(stage, [first, second]) is None:
                continue
            if not joins:
                text = (
                    f"engine {stage.engine!r} accepts only one edge, but edges {first.name!r} and {second.name!r} both "
                    f"lead to stage {stage.name!r}; join them in a function stage before it"
                )
            else:
                text = (
                    f"edges {first.name!r} and {second.name!r} both bring stage {stage.name!r} its {', '.join(both)}; "
                    "give it `join: any`, rename one by a transform, or give them conditions that exclude each other"
                )
            self._problems.add(("edges", self._edges.index(second)), text)

    def _find(self, stage: Stage, taken: Sequence[Edge] = (), *, unless: Sequence[Edge] = ()) -> Facts | None:
        """Returns the facts of one request for which the stage runs, or None if there is no such request.

        For this request, every edge in `taken` carries packets, and no edge in `unless` carries packets.
        """
        sets, runs = self._sets, self._sets.both(self._runs[stage.name], self._accepted)
        requests = reduce(sets.both, (self._open[edge.name] for edge in taken), runs)
        return sets.find_facts(reduce(sets.difference, (self._open[edge.name] for edge in unless), requests))


def _own_condition(edge: Edge) -> Condition:
    return (STREAMED, *edge.condition) if edge.is_input else edge.condition
