"""The part of a pipeline that one request takes."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from stagemesh.orchestrator.spec.conditions import Fact, Facts, holds
from stagemesh.orchestrator.spec.graph import ancestors

if TYPE_CHECKING:
    from collections.abc import Collection

    from stagemesh.orchestrator.spec.model import Edge, Pipeline, PipelineOutput, Stage


@dataclass(frozen=True)
class Route:
    """The stages that run for a request, producers before consumers, and the edges that carry something."""

    stages: "tuple[Stage, ...]"
    edges: "tuple[Edge, ...]"
    outputs: "Mapping[str, PipelineOutput]"
    """Those that are wanted."""

    @cached_property
    def incoming(self) -> "Mapping[str, tuple[Edge, ...]]":
        """The edges that feed each stage."""
        return {stage.name: tuple(edge for edge in self.edges if edge.consumer == stage.name) for stage in self.stages}

    @cached_property
    def outgoing(self) -> "Mapping[str, tuple[Edge, ...]]":
        """The edges that each stage feeds."""
        return {stage.name: tuple(edge for edge in self.edges if edge.producer == stage.name) for stage in self.stages}

    def absent(self, stage: "Stage") -> tuple[str, ...]:
        """The tensors that a stage accepts and that no edge brings it."""
        brought = {tensor for edge in self.incoming[stage.name] for tensor in edge.brings}
        return tuple(name for name in stage.signature.accepts if name not in brought)


def find_route(pipeline: "Pipeline", outputs: "Collection[str]", facts: Facts) -> Route:
    """What a request that wants these outputs takes of a pipeline that has passed every check."""
    known = {**facts, **{Fact("output", name): 1.0 for name in outputs}}
    runs = {stage.name for stage in pipeline.stages.values() if holds(stage.when, known)}
    open_edges = [edge for edge in pipeline.edges if runs >= set(edge.arc) and holds(edge.when, known)]
    wanted = {name: pipeline.outputs[name] for name in outputs}
    needed = ancestors((output.stage for output in wanted.values()), {edge.arc for edge in open_edges})
    return Route(
        stages=tuple(stage for stage in pipeline.stages.values() if stage.name in needed),
        edges=tuple(edge for edge in open_edges if edge.consumer in needed),
        outputs=wanted,
    )
