"""`stagemesh version`."""

from importlib.metadata import version as installed_version

import typer


def version() -> None:
    """Shows the version."""
    typer.echo(f"stagemesh {installed_version('stagemesh')}")
