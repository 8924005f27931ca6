"""`stagemesh version`: prints the versions of this installation and of a server."""

from collections.abc import Mapping
from typing import Any

import typer

from stagemesh.common.errors import DeadlineError, UnavailableError
from stagemesh.orchestrator.cli.contexts.addresses import SERVER, is_given, split_addresses
from stagemesh.orchestrator.cli.error_output import AsJson
from stagemesh.orchestrator.cli.options import Parameter
from stagemesh.orchestrator.cli.output import print_json

PARAMETERS: Mapping[str, Parameter] = {
    "ctx": Parameter(typer.Context),
    **SERVER,
    "as_json": Parameter(AsJson, False),
}


def version(ctx: typer.Context, **values: Any) -> None:
    """Print the version of this installation, and what the server reports about itself. A server that does not answer
    is an error only if --server or --context is given.
    """
    from importlib.metadata import version as installed_version

    from stagemesh.common.versions import WIRE_VERSION

    client = {"version": installed_version("stagemesh"), "wire_version": WIRE_VERSION}
    try:
        server = _describe(values["server"])
    except (UnavailableError, DeadlineError):
        if is_given(ctx, "server") or values["context"]:
            raise
        server = None
    if values["as_json"]:
        print_json({"client": client, "server": server})
        return
    typer.echo(f"stagemesh {client['version']}, wire version {client['wire_version']}")
    if server is not None:
        typer.echo(f"server {values['server']}: " + ", ".join(f"{name} {value}" for name, value in server.items()))


def _describe(server: str) -> dict[str, object]:
    from stagemesh.client import Client

    with Client(*split_addresses(server)) as client:
        description = client.describe()
    return {"pipeline": description.pipeline, "generation": description.generation}
