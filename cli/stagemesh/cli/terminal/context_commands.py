"""`stagemesh context`: stores the addresses of deployments under names."""

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from stagemesh.cli.terminal.connection_options import complete_context
from stagemesh.cli.terminal.contexts import check_admin_address, split_addresses
from stagemesh.cli.terminal.error_output import AS_JSON
from stagemesh.cli.terminal.options import REQUIRED, Parameter, argument, option, with_parameters
from stagemesh.cli.terminal.output import Column, make_table, print_all, print_json
from stagemesh.common.errors import NotFoundError

if TYPE_CHECKING:
    from stagemesh.cli.terminal.contexts import Contexts

app = typer.Typer(
    help="Store the addresses of deployments under names. Commands connect to the current context unless --server, "
    "--context or an environment variable selects other addresses.",
    no_args_is_help=True,
)


def _check_address(param: typer.CallbackParam, value: str) -> str:
    try:
        if param.name == "server":
            split_addresses(value)
        elif value:
            check_admin_address(value)
    except ValueError as exc:
        raise typer.BadParameter(str(exc)) from exc
    return value


_ADD: Mapping[str, Parameter] = {
    "name": argument(str, "Set the name of the context.", metavar="NAME"),
    "server": option(
        str,
        "Set the address for clients. Several addresses are separated by commas.",
        "--server",
        "-s",
        default=REQUIRED,
        metavar="HOST:PORT",
        callback=_check_address,
    ),
    "admin": option(
        str,
        "Set the address for operators. Commands for operators cannot use the context if omitted.",
        default="",
        metavar="HOST:PORT",
        callback=_check_address,
    ),
    "tls": option(
        str,
        "Connect with the certificates in this folder. Commands connect without TLS if omitted.",
        default="",
        metavar="FOLDER",
    ),
    "token_file": option(str, "Send the token in this file. Needs --tls.", default="", metavar="FILE"),
    **AS_JSON,
}
_ONE: Mapping[str, Parameter] = {
    "name": argument(str, "Select the context with this name.", metavar="NAME", complete=complete_context),
    **AS_JSON,
}
_SHOWN = argument(
    str,
    "Select the context with this name. Selects the current context if omitted.",
    metavar="NAME",
    complete=complete_context,
    default="",
)


@app.command()
@with_parameters(_ADD)
def add(*, name: str, server: str, admin: str, tls: str, token_file: str, as_json: bool) -> None:
    """Add a context. The current context does not change."""
    from stagemesh.cli.terminal.contexts import Context, load_contexts, save_contexts
    from stagemesh.rpc.credentials import Credentials

    Credentials(tls or None, token_file=token_file or None, needs_certificate=False)
    # The file is used from any folder.
    folder, token = (str(Path(each).expanduser().absolute()) if each else "" for each in (tls, token_file))
    contexts = load_contexts().with_context(name, Context(server, admin, folder, token))
    save_contexts(contexts)
    _show(contexts, name, as_json=as_json)


@app.command("list")
@with_parameters(AS_JSON)
def list_contexts(*, as_json: bool) -> None:
    """List the contexts. A star marks the current one."""
    from stagemesh.cli.terminal.contexts import load_contexts

    contexts = load_contexts()
    if as_json:
        print_json([_document(contexts, name) for name in contexts.contexts])
        return
    columns = (
        Column("", lambda name: "*" if name == contexts.current else ""),
        Column("context", lambda name: name),
        Column("server", lambda name: contexts.get(name).server),
        Column("admin", lambda name: contexts.get(name).admin),
    )
    print_all(make_table(columns, contexts.contexts))


@app.command()
@with_parameters(_ONE)
def use(*, name: str, as_json: bool) -> None:
    """Make a context the current one."""
    from stagemesh.cli.terminal.contexts import load_contexts, save_contexts

    contexts = load_contexts().with_current(name)
    save_contexts(contexts)
    _show(contexts, name, as_json=as_json)


@app.command()
@with_parameters(_ONE)
def remove(*, name: str, as_json: bool) -> None:
    """Remove a context. No context is current after the current one is removed."""
    from stagemesh.cli.terminal.contexts import load_contexts, save_contexts

    save_contexts(load_contexts().without(name))
    if as_json:
        print_json({"context": name, "removed": True})
    else:
        typer.echo(f"removed {name}")


@app.command()
@with_parameters({"name": _SHOWN, **AS_JSON})
def show(*, name: str, as_json: bool) -> None:
    """Show the addresses of a context, and the file that stores it."""
    from stagemesh.cli.terminal.contexts import contexts_path, load_contexts

    contexts = load_contexts()
    if not name and not contexts.current:
        raise NotFoundError("no context is current", reason="UNKNOWN_CONTEXT")
    contexts.get(name or contexts.current)
    _show(contexts, name or contexts.current, as_json=as_json)
    if not as_json:
        typer.echo(f"stored in {contexts_path()}")


def _document(contexts: "Contexts", name: str) -> dict[str, object]:
    context = contexts.get(name)
    return {"context": name, **asdict(context), "current": name == contexts.current}


def _show(contexts: "Contexts", name: str, *, as_json: bool) -> None:
    if as_json:
        print_json(_document(contexts, name))
        return
    context = contexts.get(name)
    current = " (current)" if name == contexts.current else ""
    credentials = f", TLS with {context.tls}" if context.tls else ""
    credentials += f", token {context.token_file}" if context.token_file else ""
    typer.echo(f"{name}{current}: server {context.server}, admin {context.admin or 'not set'}{credentials}")
