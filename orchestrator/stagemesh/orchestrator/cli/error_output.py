"""Prints errors with a remedy, as text or (with --json) as one JSON document. Never prints a traceback."""

import json
import sys
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from stagemesh.common.errors import DeadlineError, StagemeshError, UnavailableError

EXIT_FAILED = 1
EXIT_INTERRUPTED = 130
_JSON_KEY = "stagemesh.json"

# Remedies by the error's reason. They name options of this command line. The code that raises the errors does not know
# these options.
_REMEDIES: dict[str, str] = {
    "ADMIN_UNREACHABLE": "start a pipeline with `stagemesh up`, and set --server to the address for operators that it "
    "prints",
    "LAST_REPLICA": "wait until another replica of the stage is ready, or add --force",
    "REQUEST_ENDED": "run `stagemesh admin request ID` to see how the request ended",
    "STILL_RUNNING": "run `stagemesh admin requests --on REPLICA`, then allow more time or cancel the requests",
    "UNKNOWN_EDGE": "run `stagemesh admin edges` to list the edges",
    "UNKNOWN_REQUEST": "run `stagemesh admin requests` to list the requests",
    "UNKNOWN_TARGET": "run `stagemesh admin replicas` to list the replicas",
    "REQUEST_EXISTS": "choose another --request-id, or omit it",
    "UNKNOWN_OUTPUT": "run `stagemesh pipeline graph PIPELINE` to see the outputs of the pipeline",
}


def _store_json_flag(ctx: typer.Context, value: bool) -> bool:
    ctx.meta[_JSON_KEY] = value
    return value


AsJson = Annotated[
    bool,
    typer.Option(
        "--json",
        help="Print JSON instead of text. Errors are printed to stderr as JSON, too.",
        callback=_store_json_flag,
        is_eager=True,
    ),
]


class ErrorGroup(TyperGroup):
    """The root command group. Prints a StagemeshError without its traceback, and sets the exit status."""

    def invoke(self, ctx: Any) -> Any:
        """Runs the command. Exits with status 1 if a StagemeshError is raised, and with status 130 after Ctrl-C."""
        try:
            return super().invoke(ctx)
        except StagemeshError as exc:
            show_error(exc, as_json=bool(ctx.meta.get(_JSON_KEY)))
            raise typer.Exit(EXIT_FAILED) from None
        except KeyboardInterrupt:
            raise typer.Exit(EXIT_INTERRUPTED) from None


def show_error(error: StagemeshError, *, as_json: bool) -> None:
    """Prints `error` and its remedy to stderr.

    The format is one JSON document if `as_json` is True, and text otherwise.
    """
    remedy = _remedy(error)
    if as_json:
        document = {
            "code": error.code.name,
            "reason": error.reason,
            "message": error.message,
            "remedy": remedy,
            "metadata": error.metadata,
            "retry_after_s": error.retry_after_s,
        }
        sys.stderr.write(json.dumps({"error": document}, ensure_ascii=False) + "\n")
        return
    from rich.console import Console
    from rich.text import Text

    console = Console(stderr=True, soft_wrap=True, highlight=False)
    first, *more = error.message.splitlines() or [error.reason]
    console.print(Text.assemble(("error: ", "bold red"), (first, "red")))
    for line in more:
        console.print(Text(f"  {line}"))
    if remedy:
        console.print(Text(f"  {remedy}", style="yellow"))


def _remedy(error: StagemeshError) -> str:
    if error.reason in _REMEDIES:
        return _REMEDIES[error.reason]
    if isinstance(error, UnavailableError) and "peer" in error.metadata:
        return (
            "start the pipeline with `stagemesh up speech`, or set the orchestrator's address with --server HOST:PORT"
        )
    if isinstance(error, DeadlineError):
        return "increase --timeout SECONDS"
    if error.retry_after_s is not None:
        return f"try again in {error.retry_after_s:.1f} s"
    return ""
