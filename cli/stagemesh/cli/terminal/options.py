"""Options that several commands share, the parsing of option values, and tables of parameters.

A table of parameters defines the arguments and options of one command. typer reads the table as a function signature.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from pathlib import Path
from types import GenericAlias
from typing import Annotated, Any, NamedTuple, TypeAlias, TypeVar, cast

import typer

_Value = TypeVar("_Value")
_Command = TypeVar("_Command", bound=Callable[..., None])


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


class Kind(Enum):
    """The kinds of values that several commands accept: the type of a value, and the word for it in the help."""

    ADDRESS = str, "HOST:PORT"
    FILE = Path, "FILE"
    FOLDER = Path, "FOLDER"
    ID = str, "ID"
    INPUT_FILE = Path, "FILE", {"exists": True, "dir_okay": False}
    NAME = str, "NAME"
    PAIR = str, "KEY=VALUE"
    SECONDS = float, "SECONDS"
    TEXT = str, "TEXT"

    def __init__(self, value_type: Any, metavar: str, checks: Mapping[str, bool] | None = None) -> None:
        self.type = value_type
        self.settings = {"metavar": metavar, **(checks or {})}


REQUIRED = inspect.Parameter.empty
"""The value of `Parameter.default` that marks a parameter as required."""


class Parameter(NamedTuple):
    """An argument or an option of a command: its annotated type and its default."""

    annotation: Any
    default: Any = REQUIRED


Parameters: TypeAlias = Mapping[str, Parameter]
"""A table of the arguments and options of a command, by parameter name."""


def argument(
    kind: Any, text: str, *, complete: Callable[..., list[str]] | None = None, default: Any = REQUIRED, **settings: Any
) -> Parameter:
    """Returns an argument of a command. `kind` is its type or Kind. `text` is its help text.

    - `complete` is a shell completion callback, or None for no completion.
    - `default` is the argument's value if the argument is omitted. The argument is required by default.
    - `settings` are passed to `typer.Argument`.
    """
    value_type, settings = _type_of(kind, settings)
    info = typer.Argument(help=text, autocompletion=complete, show_default=False, **settings)
    return Parameter(Annotated[value_type, info], default)


def option(kind: Any, text: str, *names: str, default: Any = None, **settings: Any) -> Parameter:
    """Returns an option of a command. `kind` is the option's type or Kind. `text` is the option's help text.

    - A list with one type or Kind stands for a repeatable option.
    - `names` are the option's names, such as "--server". If `names` is empty, typer derives the name from the name of
      the parameter.
    - `default` is the option's value if the option is omitted. The help shows the default unless it is None or empty.
    - `settings` are passed to `typer.Option`. With `show_default`, the help shows this text as the default.
    """
    value_type, settings = _type_of(kind, settings)
    info = typer.Option(*names, help=text, **settings)
    return Parameter(Annotated[value_type | None if default is None else value_type, info], default)


def _type_of(kind: Any, settings: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Returns the type of an argument or option, and its settings with the settings of a Kind."""
    if isinstance(kind, list):
        item_type, settings = _type_of(kind[0], settings)
        return GenericAlias(list, (item_type,)), settings
    return (kind.type, {**kind.settings, **settings}) if isinstance(kind, Kind) else (kind, settings)


def flag(text: str, name: str) -> Parameter:
    """Returns an option that is True if it is present and False if it is omitted. `text` is its help text."""
    return option(bool, text, name, default=False)


def in_panel(title: str, options: Parameters) -> Parameters:
    """Makes the help show these options below a title. Returns the options."""
    for each in options.values():
        (info,) = each.annotation.__metadata__
        info.rich_help_panel = title
    return options


def with_parameters(parameters: Parameters) -> Callable[[_Command], _Command]:
    """Returns a decorator that sets the signature of a command, from which typer reads the command's parameters.

    The command must accept keyword arguments.
    """

    def decorate(function: _Command) -> _Command:
        command = cast("Any", function)
        command.__annotations__ = {name: each.annotation for name, each in parameters.items()}
        command.__signature__ = inspect.Signature(
            [
                inspect.Parameter(
                    name, inspect.Parameter.KEYWORD_ONLY, default=each.default, annotation=each.annotation
                )
                for name, each in parameters.items()
            ]
        )
        return function

    return decorate


def command(app: typer.Typer, parameters: Parameters, *, name: str | None = None) -> Callable[[_Command], _Command]:
    """Returns a decorator that adds a command with these parameters to `app`.

    The command must accept keyword arguments. If `name` is None, the command has the name of the function.
    """
    return lambda function: app.command(name)(with_parameters(parameters)(function))
