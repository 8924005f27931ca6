"""`stagemesh pipeline` and `stagemesh k8s`: check, explain, draw, import and render pipeline files."""

from dataclasses import asdict
from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from stagemesh.cli.terminal.error_output import AsJson
from stagemesh.cli.terminal.options import PipelineName, Replicas, Settings, read_overrides
from stagemesh.cli.terminal.output import Column, fields, make_table, print_all, print_json
from stagemesh.common.errors import ExitCode, InvalidPipelineError, InvalidRequestError, exit_code

app = typer.Typer(help="Check, explain, draw and import pipeline files without running them.", no_args_is_help=True)


class GraphFormat(Enum):
    """The output formats of `stagemesh pipeline graph`."""

    TREE = "tree"
    MERMAID = "mermaid"
    DOT = "dot"


@app.command()
def validate(
    name: PipelineName,
    settings: Settings = None,
    models: Annotated[
        bool | None,
        typer.Option(
            "--models/--no-models",
            help="Also check that the models are on this machine and can run in their stages. --no-models skips "
            "this check. The default is --models, or --no-models with --kubernetes.",
        ),
    ] = None,
    kubernetes: Annotated[
        bool,
        typer.Option(
            "--kubernetes",
            help="Also check the rules of the Helm chart. PIPELINE may be a values file of the chart.",
        ),
    ] = False,
    imports: Annotated[
        bool | None,
        typer.Option(
            "--import/--no-import",
            help="Also import the code of engines, functions and transforms, and look up the classes of models. The "
            "default is --import, or --no-import with --kubernetes.",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Check a pipeline file. Report every mistake with its file, line and remedy."""
    from stagemesh.pipeline import kubernetes_hints, load_pipeline

    check_models = not kubernetes if models is None else models
    overrides = read_overrides(settings)
    try:
        pipeline = load_pipeline(
            name,
            overrides=overrides,
            check_models=check_models,
            for_kubernetes=kubernetes,
            check_code=not kubernetes if imports is None else imports,
        )
    except InvalidPipelineError as exc:
        if not as_json:
            raise
        print_json({"findings": [finding._asdict() for finding in exc.findings]})
        raise typer.Exit(exit_code(exc)) from None
    hints = kubernetes_hints(pipeline) if kubernetes else ()
    if as_json:
        document = {"pipeline": pipeline.name, "generation": pipeline.generation, "source": str(pipeline.source)}
        print_json({"findings": [], **document, "hints": hints})
        return
    edges = len(pipeline.edges) + len(pipeline.input_edges)
    numbers = {"stage": len(pipeline.stages), "edge": edges, "output": len(pipeline.outputs)}
    counts = ", ".join(f"{count} {name}{'s' if count != 1 else ''}" for name, count in numbers.items())
    typer.echo(f"{pipeline.source}: {pipeline.name} is valid ({counts}), generation {pipeline.generation}")
    for hint in hints:
        typer.echo(f"  note: {hint}")


@app.command("explain")
def explain_pipeline(
    name: PipelineName, settings: Settings = None, replicas: Replicas = None, as_json: AsJson = False
) -> None:
    """List every value of a pipeline with its origin: a line of the file, an override, or a default."""
    from stagemesh.pipeline import load_pipeline

    pipeline = load_pipeline(name, overrides=read_overrides(settings, replicas), check_models=False)
    if as_json:
        print_json([asdict(row) for row in pipeline.explanation])
        return
    folder = f"{pipeline.source.parent}/"
    origin = Column("origin", lambda row: [(row.origin.replace(folder, ""), "dim")])
    print_all(make_table((*fields("key", "value"), origin), pipeline.explanation))


@app.command()
def graph(
    name: PipelineName,
    settings: Settings = None,
    form: Annotated[
        GraphFormat,
        typer.Option(
            "--format",
            help="Set the format: a tree for the terminal, a mermaid flowchart for Markdown, or dot for Graphviz.",
        ),
    ] = GraphFormat.TREE,
    as_json: AsJson = False,
) -> None:
    """Draw the stages, edges and outputs of a pipeline."""
    from rich.console import Console

    from stagemesh.cli.pipelines.pipeline_graph import draw_dot, draw_mermaid, draw_tree
    from stagemesh.pipeline import load_pipeline

    pipeline = load_pipeline(name, overrides=read_overrides(settings), check_models=False)
    if as_json:
        print_json(
            {
                "pipeline": pipeline.name,
                "stages": list(pipeline.stages),
                "edges": [
                    {"from": edge.producer, "to": edge.consumer} for edge in (*pipeline.edges, *pipeline.input_edges)
                ],
                "outputs": {name: output.stage for name, output in pipeline.outputs.items()},
            }
        )
    elif form is GraphFormat.TREE:
        Console(highlight=False).print(draw_tree(pipeline))
    else:
        typer.echo(draw_mermaid(pipeline) if form is GraphFormat.MERMAID else draw_dot(pipeline))


@app.command("import")
def import_file(
    file: Annotated[
        Path,
        typer.Argument(
            metavar="FILE", exists=True, dir_okay=False, help="Read this stage config or deploy config of vLLM-Omni."
        ),
    ],
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", metavar="FILE", help="Write the pipeline to this file.", show_default="standard output"
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            help="Set the model of all stages: a name or a path.",
            show_default="the variable STAGEMESH_MODEL, with the usual checkpoint as its default",
        ),
    ] = None,
    name: Annotated[
        str | None, typer.Option("--name", help="Set the name of the pipeline.", show_default="the name of FILE")
    ] = None,
    topology: Annotated[
        str | None,
        typer.Option(
            "--topology",
            help="Set the graph of stages of a deploy config that does not name it, for example qwen3_omni_moe.",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Convert a config of vLLM-Omni to a pipeline file, and list the keys that are not converted."""
    from stagemesh.vllm_omni.keys import Outcome
    from stagemesh.vllm_omni.pipeline_file import import_config

    imported = import_config(file, model=model, name=name, topology=topology)
    found = {outcome: imported.report.items(outcome) for outcome in Outcome}
    if output is not None and imported.pipeline is not None:
        try:
            output.write_text(imported.dump(), encoding="utf-8")
        except OSError as exc:
            text = f"{output} cannot be written: {exc.strerror}; set --output to another file"
            raise InvalidRequestError(text, reason="CANNOT_WRITE") from exc
    if as_json:
        lists = {
            outcome.name.lower(): [{"path": item.path, "message": item.text} for item in items]
            for outcome, items in found.items()
        }
        print_json({"pipeline": imported.pipeline, "file": imported.dump(), **lists})
    else:
        if output is None:
            typer.echo(imported.dump(), nl=False)
        for outcome, items in found.items():
            for item in items:
                typer.echo(f"{outcome.value}: {item.path}: {item.text}", err=True)
    if imported.pipeline is None:
        raise typer.Exit(ExitCode.FAILED)


k8s = typer.Typer(help="Prepare the deployment of a pipeline on Kubernetes.", no_args_is_help=True)


@k8s.callback()
def _commands() -> None:
    """Keeps `render` a subcommand, because typer would run the only command of a group directly."""


@k8s.command()
def render(name: PipelineName, settings: Settings = None, replicas: Replicas = None, as_json: AsJson = False) -> None:
    """Print a values file of the Helm chart for a pipeline: the pipeline itself, and settings of every stage."""
    from stagemesh.cli.pipelines.chart_values import chart_values, format_values
    from stagemesh.pipeline import load_pipeline

    overrides = read_overrides(settings, replicas)
    pipeline = load_pipeline(name, overrides=overrides, check_models=False, for_kubernetes=True)
    if as_json:
        print_json(chart_values(pipeline))
    else:
        typer.echo(format_values(pipeline), nl=False)
