"""Options that several commands share, and the parsing of their values."""

from collections.abc import Callable, Sequence
from typing import Annotated, TypeVar

import typer

DEFAULT_PORT = 7780
DEFAULT_ADMIN_PORT = DEFAULT_PORT + 1

PipelineName = Annotated[
    str,
    typer.Argument(
        metavar="PIPELINE",
        help="Use the built-in pipeline with this name, for example speech, or the YAML file at this path.",
    ),
]
Server = Annotated[
    str,
    typer.Option(
        "--server",
        "-s",
        metavar="HOST:PORT",
        help="Set the address of the orchestrator. Several addresses, separated by commas, are tried in turn.",
    ),
]
DEFAULT_SERVER = f"127.0.0.1:{DEFAULT_PORT}"
AdminServer = Annotated[
    str,
    typer.Option(
        "--server",
        "-s",
        metavar="HOST:PORT",
        help="Set the address at which the orchestrator serves operators. `stagemesh up` prints this address.",
    ),
]
DEFAULT_ADMIN_SERVER = f"127.0.0.1:{DEFAULT_ADMIN_PORT}"
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
        help="Set the number of replicas of a stage, such as thinker=2. Repeatable. Stages that are not named use the "
        "pipeline file's number.",
    ),
]

_Value = TypeVar("_Value")


def read_pairs(texts: Sequence[str] | None, *, option: str, convert: Callable[[str], _Value]) -> dict[str, _Value]:
    """Returns the values of a repeatable KEY=VALUE option by key. `convert` converts each value.

    Raises BadParameter if a text is not of this form, or if `convert` raises ValueError.
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


def read_endpoints(server: str) -> list[str]:
    """Returns the addresses in the value of --server. Raises BadParameter if the value contains no address."""
    endpoints = [endpoint.strip() for endpoint in server.split(",") if endpoint.strip()]
    if not endpoints:
        raise typer.BadParameter("it does not contain an address HOST:PORT", param_hint="--server")
    return endpoints


def read_overrides(settings: Sequence[str] | None, replicas: Sequence[str] | None = None) -> dict[str, str]:
    """Returns the values that --set and --replicas override in the pipeline file, by key of the file."""
    counts = read_pairs(replicas, option="--replicas", convert=int)
    return {
        **read_pairs(settings, option="--set", convert=str),
        **{f"stages.{stage}.replicas": str(count) for stage, count in counts.items()},
    }
