"""`stagemesh models`: what prepares models runs in a process of its own, for it may import what is heavy."""

import json
import subprocess
import sys
from typing import Annotated

import typer

from stagemesh.orchestrator.cli.error_output import AsJson

app = typer.Typer(help="Fetches and lists models.", no_args_is_help=True)


@app.command()
def fetch(
    pipeline: Annotated[str, typer.Argument(metavar="PIPELINE", help="A shipped pipeline, for all of its models.")],
    force: Annotated[bool, typer.Option("--force", help="Make them anew, also where they are there.")] = False,
) -> None:
    """Fetches and prepares the models of a pipeline, once."""
    command = [sys.executable, "-m", "stagemesh.services.models", "fetch", pipeline, *(["--force"] if force else [])]
    raise typer.Exit(subprocess.run(command, check=False).returncode)  # noqa: S603 - our own module


@app.command("list")
def list_models(as_json: AsJson = False) -> None:
    """Lists the models of the shipped pipelines, and where they are."""
    from rich.table import Table
    from rich.text import Text

    from stagemesh.orchestrator.cli.tables import print_whole

    found = _places()
    if as_json:
        typer.echo(json.dumps(found, ensure_ascii=False))
        return
    table = Table("model", "pipeline", "where", box=None, padding=(0, 2, 0, 0))
    for model in found:
        missing = Text(f"missing: stagemesh models fetch {model['pipeline']}", style="yellow")
        table.add_row(model["model"], model["pipeline"], Text(model["path"]) if model["path"] else missing)
    print_whole(table)


def _places() -> list[dict[str, str]]:
    from stagemesh.common.settings import find_model
    from stagemesh.orchestrator.spec import built_in_pipelines, load_pipeline

    return [
        {"model": stage.model_name, "pipeline": name, "path": str(find_model(stage.model_name) or "")}
        for name in built_in_pipelines()
        for stage in load_pipeline(name, check_models=False).stages.values()
        if stage.model_name
    ]
