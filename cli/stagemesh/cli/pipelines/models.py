"""`stagemesh models`: downloads and lists the models of the built-in pipelines.

The built-in models are prepared in a separate process, because preparation may import heavy packages.
"""

import subprocess
import sys

import typer

from stagemesh.cli.terminal.command_groups import CommandGroup
from stagemesh.cli.terminal.error_output import AS_JSON
from stagemesh.cli.terminal.options import Parameters, argument, command, flag
from stagemesh.cli.terminal.output import print_result
from stagemesh.cli.terminal.tables import Cell, Column, make_table
from stagemesh.common.process.settings import find_model

app = typer.Typer(
    cls=CommandGroup, help="Download and list the models of the built-in pipelines.", no_args_is_help=True
)


_FETCH: Parameters = {
    "pipeline": argument(
        str, "Download the models of the built-in pipeline with this name, for example speech.", metavar="PIPELINE"
    ),
    "force": flag("Download and convert the models again, even if they are already present.", "--force"),
}


@command(app, _FETCH)
def fetch(*, pipeline: str, force: bool) -> None:
    """Download and convert the models of a built-in pipeline. Skips models that are already present."""
    fetching = [sys.executable, "-m", "stagemesh.services.models", "fetch", pipeline, *(["--force"] if force else [])]
    raise typer.Exit(subprocess.run(fetching, check=False).returncode)  # noqa: S603 - our own module


@command(app, AS_JSON, name="list")
def list_models(*, as_json: bool) -> None:
    """List the models of the built-in pipelines and the folders that contain them."""
    columns = (
        Column("model", lambda model: model["model"]),
        Column("pipeline", lambda model: model["pipeline"]),
        Column("folder", _folder),
    )
    models = _models()
    print_result(models, make_table(columns, models), as_json=as_json)


def _folder(model: dict[str, str]) -> Cell:
    return model["path"] or [(f"missing: stagemesh models fetch {model['pipeline']}", "yellow")]


def _models() -> list[dict[str, str]]:
    from stagemesh.pipeline import built_in_pipelines, load_pipeline

    return [
        {"model": stage.model_name, "pipeline": name, "path": str(find_model(stage.model_name) or "")}
        for name in built_in_pipelines()
        for stage in load_pipeline(name, check_models=False).stages.values()
        if stage.model_name
    ]
