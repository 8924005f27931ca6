"""Tables of the arguments and options of commands. typer reads the tables as function signatures."""

import inspect
from collections.abc import Callable, Mapping
from typing import Annotated, Any, NamedTuple, cast

import typer

REQUIRED = inspect.Parameter.empty
"""The value of `Parameter.default` that marks a parameter as required."""


class Parameter(NamedTuple):
    """An argument or an option of a command: its annotated type and its default."""

    annotation: Any
    default: Any = REQUIRED


def argument(kind: Any, text: str, *, metavar: str, complete: Callable[..., list[str]] | None = None) -> Parameter:
    """Returns a required argument of a command. `text` is the argument's help text."""
    return Parameter(Annotated[kind, typer.Argument(metavar=metavar, help=text, autocompletion=complete)])


def option(kind: Any, text: str, *names: str, default: Any = None, **settings: Any) -> Parameter:
    """Returns an option of a command. `text` is the option's help text.

    `names` are the option's names, such as "--server". If `names` is empty, typer derives the name from the parameter's
    name. `settings` are passed to `typer.Option`. The help shows the default unless the default is None or empty.
    """
    info = typer.Option(*names, help=text, show_default=default not in {None, ""}, **settings)
    return Parameter(Annotated[kind | None if default is None else kind, info], default)


def with_parameters(function: Callable[..., None], parameters: Mapping[str, Parameter]) -> Callable[..., None]:
    """Sets the signature of `function`, from which typer reads the parameters, and returns `function`.

    `function` must accept keyword arguments.
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
