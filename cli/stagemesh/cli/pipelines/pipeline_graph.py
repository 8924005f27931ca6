"""Drawings of a pipeline: a tree for the terminal, a mermaid flowchart for Markdown, and dot for Graphviz."""

import json

from rich.console import Group, RenderableType
from rich.text import Text
from rich.tree import Tree

from stagemesh.common.plugins.descriptors import INPUT
from stagemesh.common.wire.chunk_sizes import ChunkPolicy, FramesPolicy, StepPolicy, WholePolicy
from stagemesh.pipeline import Edge, Pipeline, Stage
from stagemesh.pipeline.conditions import Condition, describe_condition


def draw_tree(pipeline: Pipeline) -> RenderableType:
    """Returns the name of the pipeline and one tree for each stage.

    The tree of a stage lists its producers, its consumers and its outputs. Producers precede consumers.
    """
    return Group(
        Text(pipeline.name, style="bold"), *(_stage_tree(pipeline, stage) for stage in pipeline.stages.values())
    )


def draw_mermaid(pipeline: Pipeline) -> str:
    """Returns the text of a Mermaid flowchart of the pipeline."""
    ids = {name: f"s{number}" for number, name in enumerate(pipeline.stages)}
    lines = ["flowchart LR", "  prompt([prompt])"]
    lines += [f'  {ids[stage.name]}["{stage.name}<br/>{_stage_label(stage)}"]' for stage in pipeline.stages.values()]
    lines += [f"  prompt --> {ids[stage.name]}" for stage in _first_stages(pipeline)]
    ids[INPUT] = "input"
    lines += ["  input([streamed input])"] if pipeline.input_edges else []
    lines += [f'  {ids[edge.producer]} -->|"{_edge_label(edge)}"| {ids[edge.consumer]}' for edge in _edges(pipeline)]
    for number, output in enumerate(pipeline.outputs.values()):
        lines.append(f"  {ids[output.stage]} --> o{number}([{output.name}])")
    return "\n".join(lines)


def draw_dot(pipeline: Pipeline) -> str:
    """Returns the text of a Graphviz digraph of the pipeline, in the dot language."""
    lines = [f"digraph {_quoted(pipeline.name)} {{", "  rankdir=LR;", '  "prompt" [shape=oval];']
    for stage in pipeline.stages.values():
        label = _quoted(f"{stage.name}\n{_stage_label(stage)}")
        lines.append(f"  {_quoted('stage ' + stage.name)} [shape=box, label={label}];")
    lines += [f'  "prompt" -> {_quoted("stage " + stage.name)};' for stage in _first_stages(pipeline)]
    if pipeline.input_edges:
        lines.append(f"  {_quoted(INPUT)} [shape=oval, label={_quoted('streamed input')}];")
    for edge in _edges(pipeline):
        source = INPUT if edge.is_input else f"stage {edge.producer}"
        ends = f"{_quoted(source)} -> {_quoted('stage ' + edge.consumer)}"
        lines.append(f"  {ends} [label={_quoted(_edge_label(edge))}];")
    for output in pipeline.outputs.values():
        name = _quoted("output " + output.name)
        lines.append(f"  {name} [shape=oval, label={_quoted(output.name)}];")
        lines.append(f"  {_quoted('stage ' + output.stage)} -> {name};")
    return "\n".join([*lines, "}"])


def _stage_tree(pipeline: Pipeline, stage: Stage) -> Tree:
    count = f" x{stage.replicas}" if stage.replicas > 1 else ""
    tree = Tree(Text.assemble((stage.name, "bold cyan"), f"{count}  ", (_stage_label(stage), "dim")))
    if stage in _first_stages(pipeline):
        tree.add(Text("<- prompt"))
    for edge in _edges(pipeline):
        if edge.consumer == stage.name:
            label = _edge_label(edge) if edge.is_input else ""
            tree.add(Text.assemble(f"<- {edge.producer}", (f"  {label}" if label else "", "dim")))
    for edge in pipeline.outgoing(stage.name):
        tree.add(Text.assemble(f"-> {edge.consumer}  ", (_edge_label(edge), "dim")))
    for output in pipeline.outputs.values():
        if output.stage == stage.name:
            tree.add(Text.assemble("=> ", (output.name, "green"), (f"  {output.kind} for the client", "dim")))
    return tree


def _edges(pipeline: Pipeline) -> tuple[Edge, ...]:
    return (*pipeline.edges, *pipeline.input_edges)


def _first_stages(pipeline: Pipeline) -> list[Stage]:
    fed = {edge.consumer for edge in _edges(pipeline)}
    return [stage for stage in pipeline.stages.values() if stage.signature.takes_prompt or stage.name not in fed]


def _stage_label(stage: Stage) -> str:
    group = f"group {stage.group}" if stage.group else ""
    parts = (stage.engine, stage.function, stage.model_name, group, _condition_label(stage.condition))
    return ", ".join(part for part in parts if part)


def _edge_label(edge: Edge) -> str:
    apart = "apart" if edge.apart else ""
    transform = f"{edge.transform} at the producer" if edge.transforms_at_producer else edge.transform
    way = (" or ".join(edge.tensors),) if edge.is_input else (edge.connector, _policy_label(edge.policy))
    parts = (transform, *way, apart, _condition_label(edge.condition))
    return ", ".join(filter(None, parts))


def _condition_label(condition: Condition) -> str:
    return f"when {describe_condition(condition)}" if condition else ""


def _policy_label(policy: ChunkPolicy) -> str:
    match policy:
        case StepPolicy():
            return "one chunk per step"
        case WholePolicy():
            return "one chunk"
        case FramesPolicy():
            first = f", {', '.join(map(str, policy.ramp))} in the first" if policy.ramp else ""
            return f"{policy.frames} frames per chunk{first}"


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
