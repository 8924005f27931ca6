"""`stagemesh gateway`: serves OpenAI's API for running pipelines."""

from typing import Annotated

import typer

from stagemesh.common.errors import InvalidRequestError
from stagemesh.orchestrator.cli.contexts.addresses import DEFAULT_SERVER, split_addresses
from stagemesh.orchestrator.cli.local.serve import replace_process, standard_input

_LISTEN = "127.0.0.1:8000"


def gateway(
    config: Annotated[
        str | None,
        typer.Argument(
            metavar="CONFIG",
            help="Read the configuration from this JSON file. A single - reads it from standard input. Replaces all "
            "options.",
            show_default=False,
        ),
    ] = None,
    server: Annotated[
        list[str] | None,
        typer.Option(
            metavar="HOST:PORT[,HOST:PORT]...",
            help="Serve the pipeline of these orchestrators. Repeatable, for several pipelines.",
            show_default=DEFAULT_SERVER,
        ),
    ] = None,
    listen: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="Serve HTTP at this address.", show_default=_LISTEN)
    ] = None,
    tls: Annotated[
        str | None,
        typer.Option(
            metavar="FOLDER",
            help="Connect to the orchestrators by TLS with ca.crt in this folder, and with the token of each HTTP "
            "caller, or with tls.crt and tls.key in the folder for all of them (docs/gateway.md).",
            show_default="no TLS",
        ),
    ] = None,
    https: Annotated[
        str | None,
        typer.Option(
            metavar="FOLDER", help="Serve HTTPS with tls.crt and tls.key in this folder.", show_default="HTTP"
        ),
    ] = None,
    voices: Annotated[
        str | None,
        typer.Option(
            metavar="FOLDER",
            help="Store the voices that callers create in this folder. Several gateways may share it.",
            show_default="callers cannot create voices",
        ),
    ] = None,
    no_page: Annotated[
        bool,
        typer.Option("--no-page", help="Serve only the API, without the page at / on which people try a pipeline."),
    ] = False,
) -> None:
    """Serve OpenAI's API for running pipelines until SIGTERM or Ctrl-C: chat, completions, speech and images."""
    if config is not None:
        if no_page or any(value is not None for value in (server, listen, tls, https, voices)):
            raise typer.BadParameter("it replaces all options; give either of them", param_hint="CONFIG")
        replace_process("stagemesh.gateway", config)
    from stagemesh.common.gateway_config import GatewayConfig

    try:
        servers = [split_addresses(each) for each in server or [DEFAULT_SERVER]]
    except ValueError as exc:
        raise InvalidRequestError(f"--server: {exc}") from exc
    derived = GatewayConfig(listen or _LISTEN, servers, tls=tls, https=https, page=not no_page, voices=voices)
    replace_process("stagemesh.gateway", standard_input(derived))
