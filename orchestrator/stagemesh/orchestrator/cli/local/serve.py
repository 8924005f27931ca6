"""`stagemesh serve`: runs one process of a deployment, for containers and service managers.

The command replaces itself with the module that the launcher also starts, so that signals reach this module directly
and the command line imports neither the orchestrator's service nor a stage.
"""

import os
import sys
from typing import Annotated, NoReturn

import typer

app = typer.Typer(
    help="Run one process of a deployment until SIGTERM or Ctrl-C: an orchestrator, a replica of a stage, or a media "
    "service.",
    no_args_is_help=True,
)

_Config = Annotated[
    str,
    typer.Argument(
        metavar="CONFIG", help="Read the configuration from this JSON file. A single - reads it from standard input."
    ),
]


@app.command()
def orchestrator(config: _Config) -> None:
    """Run an orchestrator. docs/replicas.md describes its configuration."""
    _replace_process("stagemesh.orchestrator", config)


@app.command()
def stage(config: _Config) -> None:
    """Run a replica of a stage. docs/replicas.md describes its configuration."""
    _replace_process("stagemesh.services.stage", config)


@app.command()
def media(config: _Config) -> None:
    """Run a media service, which stores uploads and serves downloads. docs/media.md describes its configuration."""
    _replace_process("stagemesh.services.media", config)


def _replace_process(module: str, config: str) -> NoReturn:
    # -u disables buffering, so that the log of a killed process is complete.
    os.execv(sys.executable, [sys.executable, "-u", "-m", module, f"--config={config}"])  # noqa: S606 - our own module
