"""What a person, or with --json a program, sees of an error: one line and what to do, never a traceback."""

import json
import sys
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from stagemesh.common.errors import DeadlineError, StagemeshError, UnavailableError

EXIT_FAILED = 1
EXIT_INTERRUPTED = 130
_JSON_KEY = "stagemesh.json"

# Remedies that the one who raises cannot know: they are about this command line.
_REMEDIES: dict[str, str] = {
    "ADMIN_UNREACHABLE": "start a pipeline with `stagemesh up`, which shows where operators are served, for --server",
    "LAST_REPLICA": "wait until another replica of the stage is ready, or say --force",
    "REQUEST_ENDED": "see `stagemesh admin request ID` for how it went",
    "STILL_RUNNING": "see `stagemesh admin requests --on REPLICA`; allow more time, or cancel them",
    "UNKNOWN_EDGE": "see `stagemesh admin edges`",
    "UNKNOWN_REQUEST": "see `stagemesh admin requests`",
    "UNKNOWN_TARGET": "see `stagemesh admin replicas`",
    "REQUEST_EXISTS": "choose another --request-id, or leave it out",
    "UNKNOWN_MODEL": "see `stagemesh models list`",
    "UNKNOWN_OUTPUT": "see `stagemesh stages` for what is served",
}


def _remember(ctx: typer.Context, value: bool) -> bool:
    ctx.meta[_JSON_KEY] = value
    return value


AsJson = Annotated[bool, typer.Option("--json", help="Write JSON, errors included.", callback=_remember, is_eager=True)]


class FailureGroup(TyperGroup):
    """The root group: turns errors that are meant for people into output and an exit status."""

    def invoke(self, ctx: Any) -> Any:
        """Runs the command; exits with 1 on a StagemeshError and with 130 on Ctrl-C."""
        try:
            return super().invoke(ctx)
        except StagemeshError as exc:
            show_failure(exc, as_json=bool(ctx.meta.get(_JSON_KEY)))
            raise typer.Exit(EXIT_FAILED) from None
        except KeyboardInterrupt:
            raise typer.Exit(EXIT_INTERRUPTED) from None


def show_failure(error: StagemeshError, *, as_json: bool) -> None:
    """Writes `error` and its remedy to stderr."""
    remedy = _remedy(error)
    if as_json:
        _show_json(error, remedy)
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


def _show_json(error: StagemeshError, remedy: str) -> None:
    document = {
        "error": {
            "code": error.code.name,
            "reason": error.reason,
            "message": error.message,
            "remedy": remedy,
            "metadata": error.metadata,
            "retry_after_s": error.retry_after_s,
        }
    }
    sys.stderr.write(json.dumps(document, ensure_ascii=False) + "\n")


def _remedy(error: StagemeshError) -> str:
    if error.reason in _REMEDIES:
        return _REMEDIES[error.reason]
    if isinstance(error, UnavailableError) and "peer" in error.metadata:
        return "start it with `stagemesh up speech`, or say where it is with --server host:port"
    if isinstance(error, DeadlineError):
        return "allow more time with --timeout SECONDS"
    if error.retry_after_s is not None:
        return f"try again in {error.retry_after_s:.1f} s"
    return ""
