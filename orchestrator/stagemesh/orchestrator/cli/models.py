"""`stagemesh models`: downloads and lists the models of the built-in pipelines.

Models are prepared in a separate process, because preparation may import heavy packages.
"""

import subprocess
import sys
from typing import Annotated

import typer

from stagemesh.orchestrator.cli.error_output import AsJson
from stagemesh.orchestrator.cli.output import Cell, Column, make_table, print_all, print_json

app = typer.Typer(help="Download and list the models of the built-in pipelines.", no_args_is_help=True)


@app.command()
def fetch(
    pipeline: Annotated[
        str,
        typer.Argument(
            metavar="PIPELINE", help="Download the models of the built-in pipeline with this name, for example speech."
        ),
    ],
    force: Annotated[
        bool, typer.Option("--force", help="Download and convert the models again, even if they are already present.")
    ] = False,
) -> None:
    """Download and convert the models of a built-in pipeline. Skips models that are already present."""
    command = [sys.executable, "-m", "stagemesh.services.models", "fetch", pipeline, *(["--force"] if force else [])]
    raise typer.Exit(subprocess.run(command, check=False).returncode)  # noqa: S603 - our own module


@app.command("list")
def list_models(as_json: AsJson = False) -> None:
    """List the models of the built-in pipelines and the folders that contain them."""
    columns = (
        Column("model", lambda model: model["model"]),
        Column("pipeline", lambda model: model["pipeline"]),
        Column("folder", _folder),
    )
    models = _models()
    if as_json:
        print_json(models)
    else:
        print_all(make_table(columns, models))


def _folder(model: dict[str, str]) -> Cell:
    return model["path"] or [(f"missing: stagemesh models fetch {model['pipeline']}", "yellow")]


def _models() -> list[dict[str, str]]:
    from stagemesh.common.settings import find_model
    from stagemesh.orchestrator.spec import built_in_pipelines, load_pipeline

    return [
        {"model": stage.model_name, "pipeline": name, "path": str(find_model(stage.model_name) or "")}
        for name in built_in_pipelines()
        for stage in load_pipeline(name, check_models=False).stages.values()
        if stage.model_name
    ]
