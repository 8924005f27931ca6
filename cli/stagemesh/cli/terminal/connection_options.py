"""The options by which a command connects: --server, --context, --tls, --token-file and their environment variables."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import typer

from stagemesh.cli.terminal.contexts import (
    DEFAULT_ADMIN_SERVER,
    DEFAULT_SERVER,
    Context,
    check_address,
    complete_context,
    contexts_path,
    load_contexts,
    split_addresses,
)
from stagemesh.cli.terminal.options import Kind, Parameters, in_panel, option
from stagemesh.common.errors import NotFoundError

if TYPE_CHECKING:
    from stagemesh.client import Client


def is_given(ctx: typer.Context, name: str) -> bool:
    """Returns whether the parameter `name` is set on the command line."""
    source = ctx.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def _find_address(ctx: typer.Context, param: typer.CallbackParam, value: str) -> str:
    """Returns the address to connect to: that of --server, of --context, of the environment, or of the current context.

    Returns `value`, the default, if none of them is set. Raises NotFoundError (NO_ADMIN_ADDRESS) if the context has no
    address for operators.
    """
    name = param.name or ""
    admin = name in ADMIN_SERVER
    if ctx.params.get("context") is not None and is_given(ctx, name):
        raise typer.BadParameter("give either --server or --context, not both")
    if (found := _find_context(ctx, address=name)) is not None:
        value = _address_of(*found, admin=admin)
    return check_address(value, admin=admin)


def _use_credentials(ctx: typer.Context, value: str | None) -> str | None:
    """Sets the credentials of this process: those of the options, or those of the context.

    A context applies if the command connects to its address. Raises a StagemeshError if a file is missing or
    unsuitable.
    """
    from stagemesh.rpc.credentials import PROCESS, Credentials

    found = _find_context(ctx, address="admin_server" if "admin_server" in ctx.params else "server")
    folder = value or (found[1].tls if found else "")
    token_file = ctx.params.get("token_file") or (found[1].token_file if found else "")
    PROCESS.use(Credentials(folder or None, token_file=token_file or None, needs_certificate=False))
    return value


def _find_context(ctx: typer.Context, *, address: str) -> tuple[str, Context] | None:
    """Returns the name and the context that --context selects, or the current context if `address` is not set.

    `address` is the parameter with the address. Returns None if no context applies.
    """
    name, source = ctx.params.get("context"), ctx.get_parameter_source(address)
    if name is None and (source is None or source.name != "DEFAULT"):
        return None
    contexts = load_contexts()
    if name is None and not contexts.current:
        return None
    name = contexts.current if name is None else name
    return name, contexts.get(name)


def _address_of(name: str, context: Context, *, admin: bool) -> str:
    if admin and not context.admin:
        raise NotFoundError(
            f"context {name!r} of {contexts_path()} has no address for operators", reason="NO_ADMIN_ADDRESS"
        )
    return context.admin if admin else context.server


_CONTEXT = option(
    Kind.NAME,
    "Connect to the addresses of the context with this name. Uses the current context if omitted, unless --server or "
    "its environment variable is set.",
    "--context",
    # The callback of --server needs the value.
    is_eager=True,
    autocompletion=complete_context,
)
_CREDENTIALS: Parameters = {
    # The callback of --tls needs the value, and the source of --server, which is above these in a command.
    "token_file": option(
        str,
        "Send the token in this file. Needs --tls.",
        "--token-file",
        metavar="FILE",
        envvar="STAGEMESH_TOKEN_FILE",
        is_eager=True,
    ),
    "tls": option(
        str,
        "Connect by TLS. The folder contains ca.crt, the authority of the server's certificate, and tls.crt and "
        "tls.key, your own certificate, unless you have a token.",
        "--tls",
        metavar="FOLDER",
        envvar="STAGEMESH_TLS",
        callback=_use_credentials,
    ),
}


def _connection(name: str, text: str, *, variable: str, default: str) -> Parameters:
    """Returns the parameters of a command that connects to the address in the parameter `name`."""
    server = option(Kind.ADDRESS, text, "--server", "-s", default=default, envvar=variable, callback=_find_address)
    return in_panel("Connection", {"context": _CONTEXT, name: server, **_CREDENTIALS})


SERVER = _connection(
    "server",
    "Set the address of the orchestrator. Several addresses, separated by commas, are tried in turn.",
    variable="STAGEMESH_SERVER",
    default=DEFAULT_SERVER,
)
"""The parameters of a command that calls the API for clients. `server` contains addresses for `split_addresses`."""
ADMIN_SERVER = _connection(
    "admin_server",
    "Set the address of the orchestrator's admin API. `stagemesh up` prints this address.",
    variable="STAGEMESH_ADMIN_SERVER",
    default=DEFAULT_ADMIN_SERVER,
)
"""The parameters of a command for operators. `admin_server` contains the address of AdminService."""


def open_client(values: Mapping[str, Any]) -> "Client":
    """Returns a client of the orchestrators at --server. `values` are the values of the command's parameters."""
    from stagemesh.client import Client

    return Client(*split_addresses(values["server"]))
