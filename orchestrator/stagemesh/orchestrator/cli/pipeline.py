"""`stagemesh pipeline`: looks at pipeline files without running them."""

import json
from dataclasses import asdict
from enum import Enum
from typing import Annotated

import typer

from stagemesh.orchestrator.cli.error_output import AsJson
from stagemesh.orchestrator.cli.options import PipelineName, Replicas, Settings, read_overrides

app = typer.Typer(help="Checks and explains pipeline files.", no_args_is_help=True)


class GraphFormat(Enum):
    """How `graph` draws."""

    PICTURE = "picture"
    MERMAID = "mermaid"
    DOT = "dot"


@app.command()
def validate(
    name: PipelineName,
    settings: Settings = None,
    models: Annotated[bool, typer.Option(help="Check also that the models are here.")] = True,
    as_json: AsJson = False,
) -> None:
    """Checks a pipeline file; every mistake is named by file and line."""
    from stagemesh.orchestrator.spec import load_pipeline

    pipeline = load_pipeline(name, overrides=read_overrides(settings), check_models=models)
    if as_json:
        document = {"pipeline": pipeline.name, "generation": pipeline.generation, "source": str(pipeline.source)}
        typer.echo(json.dumps(document))
    else:
        counts = f"{len(pipeline.stages)} stages, {len(pipeline.edges)} edges, {len(pipeline.outputs)} outputs"
        typer.echo(f"{pipeline.source}: {pipeline.name} is valid ({counts})")


@app.command("explain")
def explain_pipeline(
    name: PipelineName, settings: Settings = None, replicas: Replicas = None, as_json: AsJson = False
) -> None:
    """Shows each value of a pipeline and where it came from."""
    from rich.table import Table
    from rich.text import Text

    from stagemesh.orchestrator.cli.tables import print_whole
    from stagemesh.orchestrator.spec import load_pipeline

    pipeline = load_pipeline(name, overrides=read_overrides(settings, replicas), check_models=False)
    if as_json:
        typer.echo(json.dumps([asdict(row) for row in pipeline.explanation], ensure_ascii=False))
        return
    folder = f"{pipeline.source.parent}/"
    table = Table("key", "value", "origin", box=None, padding=(0, 2, 0, 0))
    for row in pipeline.explanation:
        table.add_row(Text(row.key), Text(row.value), Text(row.origin.replace(folder, ""), style="dim"))
    print_whole(table)


@app.command()
def graph(
    name: PipelineName,
    settings: Settings = None,
    form: Annotated[GraphFormat, typer.Option("--format", help="How to draw.")] = GraphFormat.PICTURE,
) -> None:
    """Draws a pipeline."""
    from rich.console import Console

    from stagemesh.orchestrator.cli.pipeline_graph import draw_dot, draw_mermaid, draw_picture
    from stagemesh.orchestrator.spec import load_pipeline

    pipeline = load_pipeline(name, overrides=read_overrides(settings), check_models=False)
    if form is GraphFormat.PICTURE:
        Console(highlight=False).print(draw_picture(pipeline))
    else:
        typer.echo(draw_mermaid(pipeline) if form is GraphFormat.MERMAID else draw_dot(pipeline))
