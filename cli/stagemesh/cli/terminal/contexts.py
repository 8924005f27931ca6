"""Named contexts with the addresses of deployments, the user's file that stores them, and `stagemesh context`."""

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import typer

from stagemesh.cli.terminal.error_output import AS_JSON
from stagemesh.cli.terminal.options import REQUIRED, Kind, Parameters, argument, command, option
from stagemesh.cli.terminal.output import print_result
from stagemesh.cli.terminal.tables import Column, make_table
from stagemesh.common.errors import ExistsError, InvalidRequestError, NotFoundError, StagemeshError, writing

DEFAULT_PORT = 7780
DEFAULT_SERVER = f"127.0.0.1:{DEFAULT_PORT}"
DEFAULT_ADMIN_SERVER = f"127.0.0.1:{DEFAULT_PORT + 1}"

MAX_PORT = 65535


def split_addresses(text: str) -> list[str]:
    """Returns the addresses in a text in which commas separate them.

    Raises ValueError if the text contains no address, or an address that is not of the form HOST:PORT.
    """
    addresses = [address.strip() for address in text.split(",") if address.strip()]
    if not addresses:
        raise ValueError("it does not contain an address HOST:PORT")
    for address in addresses:
        host, _, port = address.rpartition(":")
        if not host or not port.isdecimal() or not 1 <= int(port) <= MAX_PORT:
            raise ValueError(f"{address!r} is not of the form HOST:PORT, for example {DEFAULT_SERVER}")
    return addresses


def check_admin_address(text: str) -> None:
    """Checks the address of AdminService. Raises ValueError if `text` is not one address of the form HOST:PORT."""
    if len(split_addresses(text)) > 1:
        raise ValueError(f"{text!r} contains several addresses; commands for operators connect to one")


_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")


@dataclass(frozen=True)
class Context:
    """The addresses of one deployment.

    - `server` is the address for clients, "host:port". Several addresses are separated by commas.
    - `admin` is the address for operators, "host:port", or "" if the context has none.
    - `tls` is the folder with the user's certificates, or "" if the deployment does not use TLS.
    - `token_file` is the file with the user's token, or "" if the user has a certificate.
    """

    server: str
    admin: str = ""
    tls: str = ""
    token_file: str = ""

    def __post_init__(self) -> None:
        split_addresses(self.server)
        if self.admin:
            check_admin_address(self.admin)


@dataclass(frozen=True)
class Contexts:
    """All contexts by name, and the name of the current one. `current` is empty if no context is current."""

    contexts: Mapping[str, Context] = field(default_factory=dict[str, Context])
    current: str = ""

    def __post_init__(self) -> None:
        if self.current and self.current not in self.contexts:
            raise ValueError(f"the current context {self.current!r} does not exist")

    def get(self, name: str) -> Context:
        """Returns the context `name`. Raises NotFoundError (UNKNOWN_CONTEXT) if there is none."""
        if name not in self.contexts:
            known = ", ".join(self.contexts) or "none"
            raise NotFoundError(f"unknown context {name!r}; contexts: {known}", reason="UNKNOWN_CONTEXT")
        return self.contexts[name]

    def with_context(self, name: str, context: Context) -> "Contexts":
        """Returns these contexts and the new context `name`.

        Raises ExistsError (CONTEXT_EXISTS) if the name is in use, and InvalidRequestError if the name is not valid.
        """
        if not _NAME.fullmatch(name):
            raise InvalidRequestError(
                f"{name!r} is not a name for a context; use up to 63 letters, digits and '._-', the first of them a "
                "letter or digit"
            )
        if name in self.contexts:
            raise ExistsError(f"context {name!r} exists", reason="CONTEXT_EXISTS")
        return replace(self, contexts={**self.contexts, name: context})

    def with_current(self, name: str) -> "Contexts":
        """Returns these contexts with `name` as the current context.

        Raises NotFoundError (UNKNOWN_CONTEXT) if no context has this name.
        """
        self.get(name)
        return replace(self, current=name)

    def without(self, name: str) -> "Contexts":
        """Returns all contexts except the context `name`.

        Raises NotFoundError (UNKNOWN_CONTEXT) if no context has this name.
        """
        self.get(name)
        others = {each: context for each, context in self.contexts.items() if each != name}
        return Contexts(others, "" if self.current == name else self.current)


def contexts_path() -> Path:
    """Returns the path of the file, in the user's folder for configuration. The file may not exist."""
    return Path(typer.get_app_dir("stagemesh")) / "contexts.json"


def load_contexts() -> Contexts:
    """Returns the contexts of the file, or no contexts if the file does not exist.

    Raises InvalidRequestError (INVALID_CONTEXTS) if the file cannot be read or is damaged. The message names the file.
    """
    import msgspec

    path = contexts_path()
    try:
        return msgspec.json.decode(path.read_bytes(), type=Contexts)
    except FileNotFoundError:
        return Contexts()
    except OSError as exc:
        raise InvalidRequestError(f"{path} cannot be read: {exc.strerror}", reason="INVALID_CONTEXTS") from exc
    except ValueError as exc:
        raise InvalidRequestError(f"{path} is damaged: {exc}", reason="INVALID_CONTEXTS") from exc


def save_contexts(contexts: Contexts) -> None:
    """Replaces the file atomically. Only the user can read the new file.

    Raises InvalidRequestError (CANNOT_WRITE) if the file cannot be written. The earlier file then remains.
    """
    from stagemesh.rpc.credentials import write_private

    with writing(contexts_path()):
        write_private(contexts_path(), f"{json.dumps(asdict(contexts), indent=2)}\n".encode())


def complete_context(incomplete: str) -> list[str]:
    """Returns the names of contexts that start with `incomplete`, for shell completion."""
    try:
        return [name for name in load_contexts().contexts if name.startswith(incomplete)]
    except StagemeshError:
        return []


app = typer.Typer(
    help="Store the addresses of deployments under names. Commands connect to the current context unless --server, "
    "--context or an environment variable selects other addresses.",
    no_args_is_help=True,
)


def check_address(value: str, *, admin: bool) -> str:
    """Returns the address in an option, for clients or for operators. Raises BadParameter if it is invalid."""
    try:
        check_admin_address(value) if admin else split_addresses(value)
    except ValueError as exc:
        raise typer.BadParameter(str(exc)) from exc
    return value


def _check_server(value: str) -> str:
    return check_address(value, admin=False)


def _check_admin(value: str) -> str:
    return value and check_address(value, admin=True)


_ADD: Parameters = {
    "name": argument(Kind.NAME, "Set the name of the context."),
    "server": option(
        Kind.ADDRESS,
        "Set the address for clients. Several addresses are separated by commas.",
        "--server",
        "-s",
        default=REQUIRED,
        callback=_check_server,
    ),
    "admin": option(
        Kind.ADDRESS,
        "Set the address for operators. Commands for operators cannot use the context if omitted.",
        default="",
        callback=_check_admin,
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
_ONE: Parameters = {
    "name": argument(Kind.NAME, "Select the context with this name.", complete=complete_context),
    **AS_JSON,
}
_SHOWN = argument(
    Kind.NAME,
    "Select the context with this name. Selects the current context if omitted.",
    complete=complete_context,
    default="",
)


@command(app, _ADD)
def add(*, name: str, server: str, admin: str, tls: str, token_file: str, as_json: bool) -> None:
    """Add a context. The current context does not change."""
    from stagemesh.rpc.credentials import Credentials

    Credentials(tls or None, token_file=token_file or None, needs_certificate=False)
    # The file is used from any folder.
    folder, token = (str(Path(each).expanduser().absolute()) if each else "" for each in (tls, token_file))
    contexts = load_contexts().with_context(name, Context(server, admin, folder, token))
    save_contexts(contexts)
    _show(contexts, name, as_json=as_json)


@command(app, AS_JSON, name="list")
def list_contexts(*, as_json: bool) -> None:
    """List the contexts. A star marks the current one."""
    contexts = load_contexts()
    columns = (
        Column("", lambda name: "*" if name == contexts.current else ""),
        Column("context", lambda name: name),
        Column("server", lambda name: contexts.get(name).server),
        Column("admin", lambda name: contexts.get(name).admin),
    )
    documents = [_document(contexts, name) for name in contexts.contexts]
    print_result(documents, make_table(columns, contexts.contexts), as_json=as_json)


@command(app, _ONE)
def use(*, name: str, as_json: bool) -> None:
    """Make a context the current one."""
    contexts = load_contexts().with_current(name)
    save_contexts(contexts)
    _show(contexts, name, as_json=as_json)


@command(app, _ONE)
def remove(*, name: str, as_json: bool) -> None:
    """Remove a context. No context is current after the current one is removed."""
    save_contexts(load_contexts().without(name))
    print_result({"context": name, "removed": True}, f"removed {name}", as_json=as_json)


@command(app, {"name": _SHOWN, **AS_JSON})
def show(*, name: str, as_json: bool) -> None:
    """Show the addresses of a context, and the file that stores it."""
    contexts = load_contexts()
    if not name and not contexts.current:
        raise NotFoundError("no context is current", reason="UNKNOWN_CONTEXT")
    _show(contexts, name or contexts.current, as_json=as_json)
    if not as_json:
        typer.echo(f"stored in {contexts_path()}")


def _document(contexts: Contexts, name: str) -> dict[str, object]:
    context = contexts.get(name)
    return {"context": name, **asdict(context), "current": name == contexts.current}


def _show(contexts: Contexts, name: str, *, as_json: bool) -> None:
    context = contexts.get(name)
    current = " (current)" if name == contexts.current else ""
    credentials = f", TLS with {context.tls}" if context.tls else ""
    credentials += f", token {context.token_file}" if context.token_file else ""
    text = f"{name}{current}: server {context.server}, admin {context.admin or 'not set'}{credentials}"
    print_result(_document(contexts, name), text, as_json=as_json)
