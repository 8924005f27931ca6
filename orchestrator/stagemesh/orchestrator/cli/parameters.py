"""Declares the arguments and options of commands as tables, which typer reads like the signature of a function."""

import inspect
from collections.abc import Callable, Mapping
from typing import Annotated, Any, NamedTuple, cast

import typer

REQUIRED = inspect.Parameter.empty
"""The default that marks a parameter as required."""


class Parameter(NamedTuple):
    """An argument or an option: its annotated type, and its default."""

    annotation: Any
    default: Any = REQUIRED


def argument(kind: Any, text: str, *, metavar: str, complete: Callable[..., list[str]] | None = None) -> Parameter:
    """Returns a required argument with a help text."""
    return Parameter(Annotated[kind, typer.Argument(metavar=metavar, help=text, autocompletion=complete)])


def option(kind: Any, text: str, *names: str, default: Any = None, **settings: Any) -> Parameter:
    """Returns an option with a help text.

    `names` are the option's names. Without them, typer derives the name from the name of the parameter. `settings` are
    passed to `typer.Option`. The help shows the default unless it is None or empty.
    """
    info = typer.Option(*names, help=text, show_default=default not in {None, ""}, **settings)
    return Parameter(Annotated[kind | None if default is None else kind, info], default)


def with_parameters(function: Callable[..., None], parameters: Mapping[str, Parameter]) -> Callable[..., None]:
    """Returns `function` with the signature that typer reads. The function must accept keyword arguments."""
    command = cast("Any", function)
    command.__annotations__ = {name: each.annotation for name, each in parameters.items()}
    command.__signature__ = inspect.Signature(
        [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=each.default, annotation=each.annotation)
            for name, each in parameters.items()
        ]
    )
    return function
