"""Types for a checked pipeline, and for the routes of requests through a pipeline.

The types extend the entries of a pipeline file with values that the checks derive from these entries.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, NamedTuple

from pydantic import Field, SkipValidation

from stagemesh.common.plugins.descriptors import EXTERNAL, TEXT, OptionSpec, OutputKind, Signature
from stagemesh.common.process.media_config import MediaConfig
from stagemesh.common.wire.chunk_sizes import ChunkPolicy, FramesPolicy, PlayoutPace
from stagemesh.pipeline.conditions import STREAMED, Condition, Fact, Facts, holds
from stagemesh.pipeline.schema import EdgeEntry, Limits, OutputEntry, SessionsEntry, StageEntry

_FUNCTION = "function"
SPEECH = "@speech"
"""The output in which the stage that detects turns reports speech. Only sessions can request it."""


class Arc(NamedTuple):
    """A directed edge from a producer to a consumer."""

    producer: str
    consumer: str


class Stage(StageEntry, frozen=True):
    """A stage of a pipeline. It runs a part of the model on one engine."""

    name: str
    signature: SkipValidation[Signature]
    model_path: Path | None = None
    """The folder or file of the model. None if the stage has no model or if the model was not looked up."""
    condition: SkipValidation[Condition] = ()
    """The condition that a request must fulfil for the stage to run. Empty if there is no condition."""
    is_main: bool = True
    """Whether a request's sampling parameters and adapter mean this stage if the request does not name a stage."""
    assisted: str = ""
    """The name of the decode stage for which a prefill stage computes prompts. Empty for any other stage."""
    addresses: tuple[str, ...] = ()
    """The addresses of an external stage's replicas, each "host:port". Empty if the replicas register themselves."""

    @property
    def model_name(self) -> str:
        """The model's name or path as written in the pipeline file. Empty if the stage has no model."""
        return self.model or ""

    @property
    def group_name(self) -> str:
        """The name of the stage's colocation group. A stage without `group` is alone in a group with its own name."""
        return self.group or self.name

    @property
    def accepts_prompt(self) -> bool:
        """Whether the stage can receive the client's prompt if no edge leads to it."""
        return not self.signature.accepts or (self.engine == _FUNCTION and self.signature.needs_text_alone)

    @property
    def is_external(self) -> bool:
        """Whether the stage's replicas are processes that Stagemesh does not start."""
        return self.engine == EXTERNAL


class Edge(EdgeEntry, frozen=True):
    """An edge of a pipeline. It transfers tensors from a producer stage, or from the client, to a consumer stage."""

    name: str = ""
    tensors: tuple[str, ...] = ()
    """The names of the producer's tensors that the edge transfers."""
    transforms_at_producer: bool = False
    """Whether the producer applies the edge's transform, because the consumer is external. Otherwise, the consumer
    does.
    """
    brings: tuple[str, ...] = ()
    """The names of the tensors that the consumer receives from the edge, after the edge's transform."""
    apart: bool = False
    """Whether each packet of the edge is a separate input of the consumer.

    If False, packets of this edge are joined with packets of other edges to form an input.
    """
    condition: SkipValidation[Condition] = ()
    """The condition that a request must fulfil for the edge to carry packets. Empty if there is no condition."""
    pace: Annotated[SkipValidation[PlayoutPace | None], Field(exclude=True)] = None
    """The speed of the edge's stages, in the edge of a request whose chunks depend on it. None in a pipeline."""

    @property
    def policy(self) -> ChunkPolicy:
        """The chunk policy of the edge."""
        policy = super().policy
        return replace(policy, pace=self.pace) if isinstance(policy, FramesPolicy) else policy

    @property
    def arc(self) -> Arc:
        """The edge as a pair of stage names, for graph functions."""
        return Arc(self.producer, self.consumer)


class PipelineOutput(OutputEntry, frozen=True):
    """An output of a pipeline that clients may request: a tensor that a stage emits. `source` names the tensor."""

    name: str
    kind: OutputKind
    sample_rate_hz: int
    emitted_type: str = ""
    """The media type of the file that the tensors form. Empty unless `kind` is "media"."""
    folder_uri: str = ""
    """The URI of the folder in which the output is stored. Empty if the output is sent."""

    @property
    def file_type(self) -> str:
        """The media type of the output if it is one file, otherwise empty."""
        return self.media_type or self.emitted_type


@dataclass(frozen=True)
class ExplainedValue:
    """A value of the pipeline and its origin, for `stagemesh pipeline explain`.

    `key` is the dotted key of the value in the pipeline file. `origin` is "file:line", "default", "variable X" or
    "override".
    """

    key: str
    value: str
    origin: str


@dataclass(frozen=True)
class Route:
    """The stages and edges that one request uses. Producers precede consumers in `stages`."""

    stages: tuple[Stage, ...]
    edges: tuple[Edge, ...]
    outputs: Mapping[str, PipelineOutput]
    """The requested outputs, by name."""
    input_edges: tuple[Edge, ...] = ()
    """The edges over which the client's input is streamed. Empty unless the request streams its input."""
    streams: bool = False
    """Whether the client streams the request's input. Such a request has no prompt."""

    @cached_property
    def incoming(self) -> Mapping[str, tuple[Edge, ...]]:
        """The edges from other stages of the route that lead to each stage, by the name of the stage."""
        return {stage.name: tuple(edge for edge in self.edges if edge.consumer == stage.name) for stage in self.stages}

    @cached_property
    def outgoing(self) -> Mapping[str, tuple[Edge, ...]]:
        """The edges of the route that start at each stage, by the name of the stage."""
        return {stage.name: tuple(edge for edge in self.edges if edge.producer == stage.name) for stage in self.stages}

    @cached_property
    def inputs(self) -> Mapping[str, tuple[Edge, ...]]:
        """The input edges of each stage, by the name of the stage."""
        return {
            stage.name: tuple(edge for edge in self.input_edges if edge.consumer == stage.name) for stage in self.stages
        }

    @cached_property
    def input_tensors(self) -> frozenset[str]:
        """The names of the tensors that the input edges transfer. A client may stream only these kinds of input."""
        return frozenset(name for edge in self.input_edges for name in edge.tensors)

    @cached_property
    def unfed(self) -> tuple[Stage, ...]:
        """The stages that lack their input: a prompt if the input is streamed, or streamed input if it is not."""
        return tuple(
            stage
            for stage in self.stages
            if not (self.incoming[stage.name] or self.inputs[stage.name]) and (self.streams or not stage.accepts_prompt)
        )

    def absent(self, stage: Stage) -> tuple[str, ...]:
        """Returns the names of the tensors that a stage accepts but that neither an edge nor the prompt delivers."""
        edges = (*self.incoming[stage.name], *self.inputs[stage.name])
        brought = {tensor for edge in edges for tensor in edge.brings} if edges else {TEXT}
        return tuple(name for name in stage.signature.accepts if name not in brought)


@dataclass(frozen=True)
class Pipeline:
    """A checked pipeline: a directed acyclic graph of stages and edges."""

    name: str
    generation: str
    """A hash of the stages' engines, models, functions and options, and of the signatures of external stages.

    All replicas that run a request are of the same generation.
    """
    stages: Mapping[str, Stage]
    """The stages by name. Producers precede consumers."""
    edges: tuple[Edge, ...]
    """The edges between stages, in the order of the file."""
    outputs: Mapping[str, PipelineOutput]
    limits: Limits
    source: Path
    input_edges: tuple[Edge, ...] = ()
    """The edges from "@input", which carry the input that a client streams."""
    sessions: SessionsEntry = field(default_factory=SessionsEntry)
    speech: PipelineOutput | None = None
    """The output `SPEECH`: the tensor `speech` of the stage that detects turns. None if no stage detects turns."""
    media: MediaConfig | None = None
    """The locations of media files, or None if requests cannot refer to files and outputs cannot be stored."""
    options: Mapping[str, OptionSpec] = field(default_factory=dict[str, OptionSpec])
    """The options that requests may set, by name. An option is defined by stages or declared by the file."""
    explanation: tuple[ExplainedValue, ...] = field(default=(), repr=False, compare=False)
    """Every value of the pipeline with its origin, including default values."""
    content: Mapping[str, object] = field(default_factory=dict[str, object], repr=False, compare=False)
    """The content of the pipeline file after overrides. Contains the references to variables, not their values."""

    @cached_property
    def all_outputs(self) -> Mapping[str, PipelineOutput]:
        """The outputs that clients may request and the output `SPEECH`, by name."""
        return self.outputs if self.speech is None else {**self.outputs, SPEECH: self.speech}

    def route(self, outputs: Collection[str], facts: Facts | None = None) -> Route:
        """Returns the stages and edges that a request for these outputs uses.

        `facts` are further facts about the request, such as the values of its options. A missing fact has its default
        value.
        """
        known = {**(facts or {}), **{Fact("output", name): 1.0 for name in outputs}}
        streams = holds((STREAMED,), known)
        inputs = self.input_edges if streams else ()
        runs = {stage.name for stage in self.stages.values() if holds(stage.condition, known)}
        open_edges = [edge for edge in self.edges if runs >= set(edge.arc) and holds(edge.condition, known)]
        wanted = {name: self.all_outputs[name] for name in outputs}
        needed = ancestors((output.stage for output in wanted.values()), {edge.arc for edge in open_edges})
        return Route(
            stages=tuple(stage for stage in self.stages.values() if stage.name in needed),
            edges=tuple(edge for edge in open_edges if edge.consumer in needed),
            outputs=wanted,
            input_edges=tuple(edge for edge in inputs if edge.consumer in needed and holds(edge.condition, known)),
            streams=streams,
        )

    def available_outputs(self, facts: Facts) -> tuple[str, ...]:
        """Returns the names of the outputs that a request with these facts may want.

        Of a request whose input is streamed, these are the outputs whose stages need no prompt. Of any other request,
        they are the outputs whose stages need no streamed input. `facts` must not contain outputs.
        """
        return tuple(name for name in self.outputs if not self.route([name], facts).unfed)

    def incoming(self, stage: str) -> tuple[Edge, ...]:
        """Returns the edges that lead from other stages to a stage."""
        return tuple(edge for edge in self.edges if edge.consumer == stage)

    def outgoing(self, stage: str) -> tuple[Edge, ...]:
        """Returns the edges that start at a stage."""
        return tuple(edge for edge in self.edges if edge.producer == stage)


def ancestors(targets: Iterable[str], arcs: Collection[Arc]) -> frozenset[str]:
    """Returns the target nodes and all nodes from which a target node can be reached along `arcs`."""
    upstream: Mapping[str, set[str]] = {arc.consumer: set() for arc in arcs}
    for arc in arcs:
        upstream[arc.consumer].add(arc.producer)
    found, fresh = set[str](), set(targets)
    while fresh:
        found |= fresh
        fresh = {producer for node in fresh for producer in upstream.get(node, ())} - found
    return frozenset(found)
