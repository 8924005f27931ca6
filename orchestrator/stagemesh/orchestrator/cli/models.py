"""`stagemesh models`: what prepares models runs in a process of its own, for it may import what is heavy."""

import subprocess
import sys
from typing import Annotated

import typer

app = typer.Typer(help="Fetches models.", no_args_is_help=True)


@app.command()
def fetch(name: Annotated[str, typer.Argument(help="A model, or a shipped pipeline for all of its models.")]) -> None:
    """Fetches and prepares models, once."""
    _run("fetch", name)


@app.command("list")
def list_models() -> None:
    """Lists the models that can be fetched, and which are here."""
    _run("list")


def _run(*arguments: str) -> None:
    command = [sys.executable, "-m", "stagemesh.services.models", *arguments]
    raise typer.Exit(subprocess.run(command, check=False).returncode)  # noqa: S603 - our own module
