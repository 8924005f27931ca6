"""`stagemesh version`: prints the versions of this installation and of a server."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import typer

from stagemesh.common.errors import DeadlineError, UnavailableError
from stagemesh.orchestrator.cli.contexts.addresses import SERVER, is_given, split_addresses
from stagemesh.orchestrator.cli.error_output import AsJson
from stagemesh.orchestrator.cli.options import Parameter
from stagemesh.orchestrator.cli.output import print_json

if TYPE_CHECKING:
    from stagemesh.v1.protocol_pb2 import Protocol

PARAMETERS: Mapping[str, Parameter] = {
    "ctx": Parameter(typer.Context),
    **SERVER,
    "as_json": Parameter(AsJson, False),
}


def version(ctx: typer.Context, **values: Any) -> None:
    """Print the version of this installation, and what the server reports about itself. A server that does not answer
    is an error only if --server or --context is given.
    """
    from stagemesh.common.versions import own_protocol

    client = _fields(own_protocol())
    try:
        server = _describe(values["server"])
    except (UnavailableError, DeadlineError):
        if is_given(ctx, "server") or values["context"]:
            raise
        server = None
    if values["as_json"]:
        print_json({"client": client, "server": server})
        return
    typer.echo(_line(client))
    if server is not None:
        typer.echo(f"server {values['server']}: {_line(server)}, pipeline {server['pipeline']} {server['generation']}")


def _describe(server: str) -> dict[str, object]:
    from stagemesh.client import Client

    with Client(*split_addresses(server)) as client:
        description = client.describe()
    own = {"pipeline": description.pipeline, "generation": description.generation}
    return {**_fields(description.protocol), **own}


def _fields(protocol: "Protocol") -> dict[str, object]:
    return {
        "software": protocol.software,
        "wire_versions": [protocol.lowest_version, protocol.highest_version],
        "features": list(protocol.features),
    }


def _line(fields: Mapping[str, Any]) -> str:
    lowest, highest = fields["wire_versions"]
    return f"{fields['software']}, wire versions {lowest} to {highest}"
