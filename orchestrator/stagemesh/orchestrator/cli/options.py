"""Options that several commands share, the parsing of option values, and tables of parameters.

A table of parameters defines the arguments and options of one command. typer reads the table as a function signature.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, NamedTuple, TypeVar, cast

import typer

DEFAULT_PORT = 7780
DEFAULT_ADMIN_PORT = DEFAULT_PORT + 1

DEFAULT_SERVER = f"127.0.0.1:{DEFAULT_PORT}"
DEFAULT_ADMIN_SERVER = f"127.0.0.1:{DEFAULT_ADMIN_PORT}"

_LAST_PORT = 65535

PipelineName = Annotated[
    str,
    typer.Argument(
        metavar="PIPELINE",
        help="Use the built-in pipeline with this name, for example speech, or the YAML file at this path.",
    ),
]
Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Override a value of the pipeline file, for example edges.*.connector=grpc. Repeatable.",
    ),
]
Replicas = Annotated[
    list[str] | None,
    typer.Option(
        "--replicas",
        metavar="STAGE=N",
        help="Set the number of replicas of a stage, for example thinker=2. Repeatable. Other stages have the "
        "number of replicas that the pipeline file sets.",
    ),
]

_Value = TypeVar("_Value")


def read_pairs(texts: Sequence[str] | None, *, option: str, convert: Callable[[str], _Value]) -> dict[str, _Value]:
    """Returns the values of a repeatable KEY=VALUE option, by key.

    - `texts` are the occurrences of the option, or None if the option is omitted.
    - `option` is the name of the option for error messages.
    - `convert` converts each value.

    Raises BadParameter if a text is not of the form KEY=VALUE, or if `convert` raises ValueError.
    """
    pairs: dict[str, _Value] = {}
    for text in texts or ():
        key, equals, value = text.partition("=")
        if not key or not equals:
            raise typer.BadParameter(f"{text!r} is not of the form KEY=VALUE", param_hint=option)
        try:
            pairs[key.strip()] = convert(value.strip())
        except ValueError as exc:
            raise typer.BadParameter(f"the value of {text!r} is not valid: {exc}", param_hint=option) from exc
    return pairs


def split_addresses(text: str) -> list[str]:
    """Returns the addresses in a text in which commas separate them.

    Raises ValueError if the text contains no address, or an address that is not of the form HOST:PORT.
    """
    addresses = [address.strip() for address in text.split(",") if address.strip()]
    if not addresses:
        raise ValueError("it does not contain an address HOST:PORT")
    for address in addresses:
        host, _, port = address.rpartition(":")
        if not host or not port.isdecimal() or not 1 <= int(port) <= _LAST_PORT:
            raise ValueError(f"{address!r} is not of the form HOST:PORT, for example {DEFAULT_SERVER}")
    return addresses


def read_overrides(settings: Sequence[str] | None, replicas: Sequence[str] | None = None) -> dict[str, str]:
    """Returns the overrides of the pipeline file that the options --set and --replicas contain.

    The result maps dotted keys of the file, such as "stages.thinker.replicas", to values.
    """
    counts = read_pairs(replicas, option="--replicas", convert=int)
    return {
        **read_pairs(settings, option="--set", convert=str),
        **{f"stages.{stage}.replicas": str(count) for stage, count in counts.items()},
    }


REQUIRED = inspect.Parameter.empty
"""The value of `Parameter.default` that marks a parameter as required."""


class Parameter(NamedTuple):
    """An argument or an option of a command: its annotated type and its default."""

    annotation: Any
    default: Any = REQUIRED


def argument(
    kind: Any, text: str, *, metavar: str, complete: Callable[..., list[str]] | None = None, default: Any = REQUIRED
) -> Parameter:
    """Returns an argument of a command. `kind` is its type. `text` is its help text.

    - `complete` is a shell completion callback, or None for no completion.
    - `default` is the argument's value if the argument is omitted. The argument is required by default.
    """
    info = typer.Argument(metavar=metavar, help=text, autocompletion=complete, show_default=False)
    return Parameter(Annotated[kind, info], default)


def option(kind: Any, text: str, *names: str, default: Any = None, **settings: Any) -> Parameter:
    """Returns an option of a command. `kind` is the option's type. `text` is the option's help text.

    - `names` are the option's names, such as "--server". If `names` is empty, typer derives the name from the name of
      the parameter.
    - `default` is the option's value if the option is omitted. The help shows the default unless it is None or empty.
    - `settings` are passed to `typer.Option`.
    """
    info = typer.Option(*names, help=text, show_default=default not in {None, ""}, **settings)
    return Parameter(Annotated[kind | None if default is None else kind, info], default)


def flag(text: str, name: str) -> Parameter:
    """Returns an option that is True if it is present and False if it is omitted. `text` is its help text."""
    return option(bool, text, name, default=False)


def with_parameters(function: Callable[..., None], parameters: Mapping[str, Parameter]) -> Callable[..., None]:
    """Sets the signature of `function` to the given parameters, and returns `function`.

    typer reads the command's parameters from the signature. `function` must accept keyword arguments.
    """
    command = cast("Any", function)
    command.__annotations__ = {name: each.annotation for name, each in parameters.items()}
    command.__signature__ = inspect.Signature(
        [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=each.default, annotation=each.annotation)
            for name, each in parameters.items()
        ]
    )
    return function


def complete_context(incomplete: str) -> list[str]:
    """Returns the names of contexts that start with `incomplete`, for shell completion."""
    from stagemesh.common.errors import StagemeshError
    from stagemesh.orchestrator.cli.contexts.file import load_contexts

    try:
        return [name for name in load_contexts().contexts if name.startswith(incomplete)]
    except StagemeshError:
        return []


def is_given(ctx: typer.Context, name: str) -> bool:
    """Returns whether the parameter `name` is set on the command line."""
    source = ctx.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def _find_address(ctx: typer.Context, param: typer.CallbackParam, value: str) -> str:
    """Returns the address to connect to: that of --server, of --context, of the environment, or of the current context.

    Returns `value`, the default, if none of them is set.
    """
    name, context = param.name or "", ctx.params.get("context")
    if context and is_given(ctx, name):
        raise typer.BadParameter("give either --server or --context, not both")
    source = ctx.get_parameter_source(name)
    if context or (source is not None and source.name == "DEFAULT"):
        value = _address_of_context(context, admin=name == "admin_server") or value
    try:
        split_addresses(value)
    except ValueError as exc:
        raise typer.BadParameter(str(exc)) from exc
    return value


def _address_of_context(name: str | None, *, admin: bool) -> str | None:
    """Returns an address of the context `name`, or of the current context if `name` is None or empty.

    Returns None if neither exists. The address is that for operators if `admin` is True. Raises NotFoundError if the
    context lacks this address.
    """
    from stagemesh.common.errors import NotFoundError
    from stagemesh.orchestrator.cli.contexts.file import contexts_path, load_contexts

    contexts = load_contexts()
    name = name or contexts.current
    if not name:
        return None
    context = contexts.get(name)
    if admin and not context.admin:
        raise NotFoundError(
            f"context {name!r} of {contexts_path()} has no address for operators", reason="NO_ADMIN_ADDRESS"
        )
    return context.admin if admin else context.server


def _server_option(text: str, *, variable: str) -> Any:
    return typer.Option(
        "--server",
        "-s",
        metavar="HOST:PORT",
        help=text,
        envvar=variable,
        callback=_find_address,
        rich_help_panel=_PANEL,
    )


_PANEL = "Connection"
_CONTEXT = Parameter(
    Annotated[
        str | None,
        typer.Option(
            "--context",
            metavar="NAME",
            help="Connect to the addresses of the context with this name. Uses the current context if omitted, unless "
            "--server or its environment variable is set.",
            # The callback of --server needs the value.
            is_eager=True,
            autocompletion=complete_context,
            rich_help_panel=_PANEL,
        ),
    ],
    None,
)
SERVER: Mapping[str, Parameter] = {
    "context": _CONTEXT,
    "server": Parameter(
        Annotated[
            str,
            _server_option(
                "Set the address of the orchestrator. Several addresses, separated by commas, are tried in turn.",
                variable="STAGEMESH_SERVER",
            ),
        ],
        DEFAULT_SERVER,
    ),
}
"""The parameters of a command that calls the API for clients. `server` contains addresses for `split_addresses`."""
ADMIN_SERVER: Mapping[str, Parameter] = {
    "context": _CONTEXT,
    "admin_server": Parameter(
        Annotated[
            str,
            _server_option(
                "Set the address of the orchestrator's admin API. `stagemesh up` prints this address.",
                variable="STAGEMESH_ADMIN_SERVER",
            ),
        ],
        DEFAULT_ADMIN_SERVER,
    ),
}
"""The parameters of a command for operators. `admin_server` contains the address of AdminService."""
