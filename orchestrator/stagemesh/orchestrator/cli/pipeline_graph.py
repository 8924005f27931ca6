"""Pictures of a pipeline: for a terminal, for Markdown (mermaid) and for Graphviz (dot)."""

import json

from rich.console import Group, RenderableType
from rich.text import Text
from rich.tree import Tree

from stagemesh.connectors.edge import ChunkPolicy, FramesPolicy, StepPolicy, WholePolicy
from stagemesh.orchestrator.spec import Edge, Pipeline, Stage
from stagemesh.orchestrator.spec.conditions import Condition, describe_condition


def draw_picture(pipeline: Pipeline) -> RenderableType:
    """Each stage in order with what it is fed by, what it feeds, and the outputs that it makes."""
    return Group(
        Text(pipeline.name, style="bold"), *(_stage_tree(pipeline, stage) for stage in pipeline.stages.values())
    )


def draw_mermaid(pipeline: Pipeline) -> str:
    """A mermaid flowchart."""
    ids = {name: f"s{number}" for number, name in enumerate(pipeline.stages)}
    lines = ["flowchart LR", "  prompt([prompt])"]
    lines += [f'  {ids[stage.name]}["{stage.name}<br/>{_what(stage)}"]' for stage in pipeline.stages.values()]
    lines += [f"  prompt --> {ids[stage.name]}" for stage in _first_stages(pipeline)]
    lines += [f'  {ids[edge.producer]} -->|"{_how(edge)}"| {ids[edge.consumer]}' for edge in pipeline.edges]
    for number, output in enumerate(pipeline.outputs.values()):
        lines.append(f"  {ids[output.stage]} --> o{number}([{output.name}])")
    return "\n".join(lines)


def draw_dot(pipeline: Pipeline) -> str:
    """A Graphviz digraph."""
    lines = [f"digraph {_quoted(pipeline.name)} {{", "  rankdir=LR;", '  "prompt" [shape=oval];']
    for stage in pipeline.stages.values():
        label = _quoted(f"{stage.name}\n{_what(stage)}")
        lines.append(f"  {_quoted('stage ' + stage.name)} [shape=box, label={label}];")
    lines += [f'  "prompt" -> {_quoted("stage " + stage.name)};' for stage in _first_stages(pipeline)]
    for edge in pipeline.edges:
        ends = f"{_quoted('stage ' + edge.producer)} -> {_quoted('stage ' + edge.consumer)}"
        lines.append(f"  {ends} [label={_quoted(_how(edge))}];")
    for output in pipeline.outputs.values():
        name = _quoted("output " + output.name)
        lines.append(f"  {name} [shape=oval, label={_quoted(output.name)}];")
        lines.append(f"  {_quoted('stage ' + output.stage)} -> {name};")
    return "\n".join([*lines, "}"])


def _stage_tree(pipeline: Pipeline, stage: Stage) -> Tree:
    count = f" x{stage.replicas}" if stage.replicas > 1 else ""
    tree = Tree(Text.assemble((stage.name, "bold cyan"), f"{count}  ", (_what(stage), "dim")))
    if not pipeline.incoming(stage.name):
        tree.add(Text("<- prompt"))
    for edge in pipeline.incoming(stage.name):
        tree.add(Text(f"<- {edge.producer}"))
    for edge in pipeline.outgoing(stage.name):
        tree.add(Text.assemble(f"-> {edge.consumer}  ", (_how(edge), "dim")))
    for output in pipeline.outputs.values():
        if output.stage == stage.name:
            tree.add(Text.assemble("=> ", (output.name, "green"), (f"  {output.kind} for the client", "dim")))
    return tree


def _first_stages(pipeline: Pipeline) -> list[Stage]:
    return [stage for stage in pipeline.stages.values() if not pipeline.incoming(stage.name)]


def _what(stage: Stage) -> str:
    return ", ".join(part for part in (stage.engine, stage.function, stage.model_name, _when(stage.condition)) if part)


def _how(edge: Edge) -> str:
    apart = "apart" if edge.apart else ""
    parts = (edge.transform, edge.connector, _cut(edge.policy), apart, _when(edge.condition))
    return ", ".join(part for part in parts if part)


def _when(condition: Condition) -> str:
    return f"when {describe_condition(condition)}" if condition else ""


def _cut(policy: ChunkPolicy) -> str:
    match policy:
        case StepPolicy():
            return "a chunk a step"
        case WholePolicy():
            return "whole"
        case FramesPolicy():
            first = f", {policy.initial_frames} at first" if policy.initial_frames else ""
            return f"{policy.frames} frames a chunk{first}"


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
