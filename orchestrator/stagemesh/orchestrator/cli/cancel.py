"""`stagemesh cancel`: stops a request through the API for clients."""

from collections.abc import Mapping
from typing import Any

import typer

from stagemesh.orchestrator.cli.contexts.addresses import SERVER, split_addresses
from stagemesh.orchestrator.cli.error_output import AsJson
from stagemesh.orchestrator.cli.options import Parameter, argument
from stagemesh.orchestrator.cli.output import print_json

PARAMETERS: Mapping[str, Parameter] = {
    "request_id": argument(str, "Cancel the request with this id.", metavar="ID"),
    **SERVER,
    "as_json": Parameter(AsJson, False),
}


def cancel(**values: Any) -> None:
    """Cancel a request. Return after every stage has released it."""
    from stagemesh.client import Client

    request_id = values["request_id"]
    with Client(*split_addresses(values["server"])) as client:
        client.cancel(request_id)
    if values["as_json"]:
        print_json({"request_id": request_id, "cancelled": True})
    else:
        typer.echo(f"cancelled {request_id}")
