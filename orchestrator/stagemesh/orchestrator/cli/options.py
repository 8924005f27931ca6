"""Options that several commands share, and how their values are read."""

from collections.abc import Callable, Sequence
from typing import Annotated, TypeVar

import typer

DEFAULT_PORT = 7780
DEFAULT_ADMIN_PORT = DEFAULT_PORT + 1

PipelineName = Annotated[
    str, typer.Argument(metavar="PIPELINE", help="A shipped pipeline, for example speech, or the path of a YAML file.")
]
Server = Annotated[
    str,
    typer.Option(
        "--server", "-s", metavar="HOST:PORT", help="Where the orchestrator serves; several, with commas, in turn."
    ),
]
DEFAULT_SERVER = f"127.0.0.1:{DEFAULT_PORT}"
AdminServer = Annotated[
    str,
    typer.Option(
        "--server",
        "-s",
        metavar="HOST:PORT",
        help="Where operators are served, as `stagemesh up` shows it.",
    ),
]
DEFAULT_ADMIN_SERVER = f"127.0.0.1:{DEFAULT_ADMIN_PORT}"
Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="KEY=VALUE", help="Sets a value of the pipeline, for example edges.*.connector=grpc."
    ),
]
Replicas = Annotated[
    list[str] | None, typer.Option("--replicas", metavar="STAGE=N", help="Sets how many replicas a stage has.")
]

_Value = TypeVar("_Value")


def read_pairs(texts: Sequence[str] | None, *, option: str, convert: Callable[[str], _Value]) -> dict[str, _Value]:
    """The pairs of a repeated KEY=VALUE option; what is no pair is a usage error."""
    pairs: dict[str, _Value] = {}
    for text in texts or ():
        key, equals, value = text.partition("=")
        if not key or not equals:
            raise typer.BadParameter(f"{text!r} is no KEY=VALUE", param_hint=option)
        try:
            pairs[key.strip()] = convert(value.strip())
        except ValueError as exc:
            raise typer.BadParameter(f"the value of {text!r} does not fit: {exc}", param_hint=option) from exc
    return pairs


def read_endpoints(server: str) -> list[str]:
    """The endpoints of --server; none at all is a usage error."""
    endpoints = [endpoint.strip() for endpoint in server.split(",") if endpoint.strip()]
    if not endpoints:
        raise typer.BadParameter("it names no HOST:PORT", param_hint="--server")
    return endpoints


def read_overrides(settings: Sequence[str] | None, replicas: Sequence[str] | None = None) -> dict[str, str]:
    """The values to set in a pipeline."""
    counts = read_pairs(replicas, option="--replicas", convert=int)
    return {
        **read_pairs(settings, option="--set", convert=str),
        **{f"stages.{stage}.replicas": str(count) for stage, count in counts.items()},
    }
