"""`stagemesh pipeline` and `stagemesh k8s`: check, explain, draw and render pipeline files."""

from collections.abc import Sequence
from dataclasses import asdict
from enum import StrEnum
from typing import Any

import typer

from stagemesh.cli.terminal.command_groups import CommandGroup
from stagemesh.cli.terminal.error_output import AS_JSON
from stagemesh.cli.terminal.options import Parameters, command, flag, option
from stagemesh.cli.terminal.output import print_json, print_result
from stagemesh.cli.terminal.pipeline_options import PIPELINE, REPLICAS, SETTINGS, read_overrides
from stagemesh.cli.terminal.tables import Column, fields, make_table
from stagemesh.common.errors import InvalidPipelineError, exit_code

app = typer.Typer(
    cls=CommandGroup, help="Check, explain, draw and import pipeline files without running them.", no_args_is_help=True
)


GraphFormat = StrEnum("GraphFormat", ["TREE", "MERMAID", "DOT"])
"""The output formats of `stagemesh pipeline graph`."""


_VALIDATE: Parameters = {
    "name": PIPELINE,
    "settings": SETTINGS,
    "models": option(
        bool,
        "Also check that the models are on this machine and can run in their stages. --no-models skips this check. "
        "The default is --models, or --no-models with --kubernetes.",
        "--models/--no-models",
    ),
    "kubernetes": flag(
        "Also check the rules of the Helm chart. PIPELINE may be a values file of the chart.", "--kubernetes"
    ),
    "imports": option(
        bool,
        "Also import the code of engines, functions and transforms, and look up the classes of models. The default is "
        "--import, or --no-import with --kubernetes.",
        "--import/--no-import",
    ),
    **AS_JSON,
}


@command(app, _VALIDATE)
def validate(**values: Any) -> None:
    """Check a pipeline file. Report every mistake with its file, line and remedy."""
    from stagemesh.pipeline import kubernetes_hints, load_pipeline

    kubernetes, models, imports = values["kubernetes"], values["models"], values["imports"]
    try:
        pipeline = load_pipeline(
            values["name"],
            overrides=read_overrides(values["settings"]),
            check_models=not kubernetes if models is None else models,
            for_kubernetes=kubernetes,
            check_code=not kubernetes if imports is None else imports,
        )
    except InvalidPipelineError as exc:
        if not values["as_json"]:
            raise
        print_json({"findings": [finding._asdict() for finding in exc.findings]})
        raise typer.Exit(exit_code(exc)) from None
    hints = kubernetes_hints(pipeline) if kubernetes else ()
    if values["as_json"]:
        document = {"pipeline": pipeline.name, "generation": pipeline.generation, "source": str(pipeline.source)}
        print_json({"findings": [], **document, "hints": hints})
        return
    edges = len(pipeline.edges) + len(pipeline.input_edges)
    numbers = {"stage": len(pipeline.stages), "edge": edges, "output": len(pipeline.outputs)}
    counts = ", ".join(f"{count} {name}{'s' if count != 1 else ''}" for name, count in numbers.items())
    typer.echo(f"{pipeline.source}: {pipeline.name} is valid ({counts}), generation {pipeline.generation}")
    for hint in hints:
        typer.echo(f"  note: {hint}")


_WITH_REPLICAS: Parameters = {"name": PIPELINE, "settings": SETTINGS, "replicas": REPLICAS, **AS_JSON}


@command(app, _WITH_REPLICAS, name="explain")
def explain_pipeline(
    *, name: str, settings: Sequence[str] | None, replicas: Sequence[str] | None, as_json: bool
) -> None:
    """List every value of a pipeline with its origin: a line of the file, an override, or a default."""
    from stagemesh.pipeline import load_pipeline

    pipeline = load_pipeline(name, overrides=read_overrides(settings, replicas), check_models=False)
    folder = f"{pipeline.source.parent}/"
    origin = Column("origin", lambda row: [(row.origin.replace(folder, ""), "dim")])
    table = make_table((*fields("key", "value"), origin), pipeline.explanation)
    print_result([asdict(row) for row in pipeline.explanation], table, as_json=as_json)


_GRAPH: Parameters = {
    "name": PIPELINE,
    "settings": SETTINGS,
    "form": option(
        GraphFormat,
        "Set the format: a tree for the terminal, a mermaid flowchart for Markdown, or dot for Graphviz.",
        "--format",
        default=GraphFormat.TREE,
    ),
    **AS_JSON,
}


@command(app, _GRAPH)
def graph(*, name: str, settings: Sequence[str] | None, form: GraphFormat, as_json: bool) -> None:
    """Draw the stages, edges and outputs of a pipeline."""
    from rich.console import Console

    from stagemesh.cli.pipelines.pipeline_graph import draw_dot, draw_mermaid, draw_tree
    from stagemesh.pipeline import load_pipeline

    pipeline = load_pipeline(name, overrides=read_overrides(settings), check_models=False)
    if as_json:
        edges = [{"from": edge.producer, "to": edge.consumer} for edge in (*pipeline.edges, *pipeline.input_edges)]
        outputs = {name: output.stage for name, output in pipeline.outputs.items()}
        stages = list(pipeline.stages)
        print_json({"pipeline": pipeline.name, "stages": stages, "edges": edges, "outputs": outputs})
    elif form is GraphFormat.TREE:
        Console(highlight=False).print(draw_tree(pipeline))
    else:
        typer.echo(draw_mermaid(pipeline) if form is GraphFormat.MERMAID else draw_dot(pipeline))


k8s = typer.Typer(help="Prepare the deployment of a pipeline on Kubernetes.", no_args_is_help=True)


@k8s.callback()
def _commands() -> None:
    """Keeps `render` a subcommand, because typer would run the only command of a group directly."""


@command(k8s, _WITH_REPLICAS)
def render(*, name: str, settings: Sequence[str] | None, replicas: Sequence[str] | None, as_json: bool) -> None:
    """Print a values file of the Helm chart for a pipeline: the pipeline itself, and settings of every stage."""
    from stagemesh.cli.pipelines.chart_values import chart_values, format_values
    from stagemesh.pipeline import load_pipeline

    overrides = read_overrides(settings, replicas)
    pipeline = load_pipeline(name, overrides=overrides, check_models=False, for_kubernetes=True)
    if as_json:
        print_json(chart_values(pipeline))
    else:
        typer.echo(format_values(pipeline), nl=False)
