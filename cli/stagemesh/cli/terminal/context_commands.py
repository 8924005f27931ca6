"""`stagemesh context`: stores the addresses of deployments under names."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from stagemesh.cli.terminal.connection_options import complete_context
from stagemesh.cli.terminal.contexts import check_admin_address, split_addresses
from stagemesh.cli.terminal.error_output import AsJson
from stagemesh.cli.terminal.output import Column, make_table, print_all, print_json
from stagemesh.common.errors import NotFoundError

if TYPE_CHECKING:
    from stagemesh.cli.terminal.contexts import Contexts

app = typer.Typer(
    help="Store the addresses of deployments under names. Commands connect to the current context unless --server, "
    "--context or an environment variable selects other addresses.",
    no_args_is_help=True,
)

_NewName = Annotated[str, typer.Argument(metavar="NAME", help="Set the name of the context.")]
_Name = Annotated[
    str,
    typer.Argument(metavar="NAME", help="Select the context with this name.", autocompletion=complete_context),
]


def _check_address(param: typer.CallbackParam, value: str) -> str:
    try:
        if param.name == "server":
            split_addresses(value)
        elif value:
            check_admin_address(value)
    except ValueError as exc:
        raise typer.BadParameter(str(exc)) from exc
    return value


@app.command()
def add(
    name: _NewName,
    server: Annotated[
        str,
        typer.Option(
            "--server",
            "-s",
            metavar="HOST:PORT",
            callback=_check_address,
            help="Set the address for clients. Several addresses are separated by commas.",
        ),
    ],
    admin: Annotated[
        str,
        typer.Option(
            metavar="HOST:PORT",
            callback=_check_address,
            help="Set the address for operators. Commands for operators cannot use the context if omitted.",
            show_default=False,
        ),
    ] = "",
    tls: Annotated[
        str,
        typer.Option(
            metavar="FOLDER",
            help="Connect with the certificates in this folder. Commands connect without TLS if omitted.",
            show_default=False,
        ),
    ] = "",
    token_file: Annotated[
        str,
        typer.Option(
            metavar="FILE",
            help="Send the token in this file. Needs --tls.",
            show_default=False,
        ),
    ] = "",
    as_json: AsJson = False,
) -> None:
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
def list_contexts(as_json: AsJson = False) -> None:
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
def use(name: _Name, as_json: AsJson = False) -> None:
    """Make a context the current one."""
    from stagemesh.cli.terminal.contexts import load_contexts, save_contexts

    contexts = load_contexts().with_current(name)
    save_contexts(contexts)
    _show(contexts, name, as_json=as_json)


@app.command()
def remove(name: _Name, as_json: AsJson = False) -> None:
    """Remove a context. No context is current after the current one is removed."""
    from stagemesh.cli.terminal.contexts import load_contexts, save_contexts

    save_contexts(load_contexts().without(name))
    if as_json:
        print_json({"context": name, "removed": True})
    else:
        typer.echo(f"removed {name}")


@app.command()
def show(
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME",
            help="Select the context with this name. Selects the current context if omitted.",
            autocompletion=complete_context,
            show_default=False,
        ),
    ] = "",
    as_json: AsJson = False,
) -> None:
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
