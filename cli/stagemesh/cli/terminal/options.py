"""Options that several commands share, the parsing of option values, and tables of parameters.

A table of parameters defines the arguments and options of one command. typer reads the table as a function signature.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, NamedTuple, TypeVar, cast

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
    kind: Any,
    text: str,
    *,
    metavar: str,
    complete: Callable[..., list[str]] | None = None,
    default: Any = REQUIRED,
    **settings: Any,
) -> Parameter:
    """Returns an argument of a command. `kind` is its type. `text` is its help text.

    - `complete` is a shell completion callback, or None for no completion.
    - `default` is the argument's value if the argument is omitted. The argument is required by default.
    - `settings` are passed to `typer.Argument`.
    """
    info = typer.Argument(metavar=metavar, help=text, autocompletion=complete, show_default=False, **settings)
    return Parameter(Annotated[kind, info], default)


def option(kind: Any, text: str, *names: str, default: Any = None, **settings: Any) -> Parameter:
    """Returns an option of a command. `kind` is the option's type. `text` is the option's help text.

    - `names` are the option's names, such as "--server". If `names` is empty, typer derives the name from the name of
      the parameter.
    - `default` is the option's value if the option is omitted. The help shows the default unless it is None or empty.
    - `settings` are passed to `typer.Option`. With `show_default`, the help shows this text as the default.
    """
    settings.setdefault("show_default", default not in {None, ""})
    info = typer.Option(*names, help=text, **settings)
    return Parameter(Annotated[kind | None if default is None else kind, info], default)


def flag(text: str, name: str) -> Parameter:
    """Returns an option that is True if it is present and False if it is omitted. `text` is its help text."""
    return option(bool, text, name, default=False)


PIPELINE = argument(
    str,
    "Use the built-in pipeline with this name, for example speech, or the YAML file at this path.",
    metavar="PIPELINE",
)
SETTINGS = option(
    list[str],
    "Override a value of the pipeline file, for example edges.*.connector=grpc. Repeatable.",
    "--set",
    metavar="KEY=VALUE",
)
REPLICAS = option(
    list[str],
    "Set the number of replicas of a stage, for example thinker=2. Repeatable. Other stages have the number of "
    "replicas that the pipeline file sets.",
    "--replicas",
    metavar="STAGE=N",
)


def with_parameters(parameters: Mapping[str, Parameter]) -> Callable[[_Command], _Command]:
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
