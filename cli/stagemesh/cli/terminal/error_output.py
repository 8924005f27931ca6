"""Prints errors with a remedy, as text or (with --json) as one JSON document. Never prints a traceback."""

import json
import re
import sys
from typing import Any

import typer

from stagemesh.cli.terminal.command_groups import CommandGroup
from stagemesh.cli.terminal.options import Parameters, option
from stagemesh.common.errors import (
    DeadlineError,
    ExitCode,
    InvalidRequestError,
    StagemeshError,
    UnavailableError,
    exit_code,
    needs_extra,
)

_JSON_KEY = "stagemesh.json"
_LOG = re.compile(r"\blog\b")
# typer does not export the base class of its errors about the command line.
_UsageError: Any = typer.BadParameter.__base__

# Remedies by the error's reason. They name options of this command line. The code that raises the errors does not know
# these options.
_REMEDIES: dict[str, str] = {
    "ADMIN_UNREACHABLE": "start a pipeline with `stagemesh up`, and set --server to the address for operators that it "
    "prints, or --context to a context with this address",
    "CONTEXT_EXISTS": "choose another name, or remove the context with `stagemesh context remove NAME`",
    "INVALID_CONTEXTS": "correct or delete this file, or set --server HOST:PORT",
    "LAST_REPLICA": "wait until another replica of the stage is ready, or add --force",
    "NO_ADMIN_ADDRESS": "set --server HOST:PORT, or remove the context and add it again with --admin HOST:PORT",
    "REQUEST_ENDED": "run `stagemesh admin request ID` to see how the request ended",
    "STILL_RUNNING": "run `stagemesh admin requests --on REPLICA`, then allow more time or cancel the requests",
    "UNKNOWN_CONTEXT": "run `stagemesh context list` to list the contexts, and `stagemesh context add` to add one",
    "UNKNOWN_EDGE": "run `stagemesh admin edges` to list the edges",
    "UNKNOWN_REQUEST": "run `stagemesh admin requests` to list the requests",
    "UNKNOWN_TARGET": "run `stagemesh admin replicas` to list the replicas",
    "REQUEST_EXISTS": "choose another --request-id, or omit it",
    "UNKNOWN_OUTPUT": "run `stagemesh pipeline graph PIPELINE` to see the outputs of the pipeline",
}

# The extras of the commands that do more than call a running pipeline.
_EXTRAS = {
    **dict.fromkeys(("demo", "k8s", "models", "pipeline", "up", "verify"), "orchestrator"),
    "probe-transport": "stage",
}


def _store_json_flag(ctx: typer.Context, value: bool) -> bool:
    ctx.meta[_JSON_KEY] = value
    return value


AS_JSON: Parameters = {
    "as_json": option(
        bool,
        "Print JSON instead of text. Errors are printed to stderr as JSON, too.",
        "--json",
        default=False,
        callback=_store_json_flag,
        is_eager=True,
    )
}
"""The parameter `as_json` of each command that can print JSON."""


class ErrorGroup(CommandGroup):
    """The root command group. Prints a StagemeshError without its traceback, and sets the exit code."""

    is_root = True

    def invoke(self, ctx: Any) -> Any:
        """Runs the command. Exits with the code of the StagemeshError that is raised, and with 130 after Ctrl-C."""
        # The options after an invalid one are not read.
        wants_json = "--json" in ctx.args
        try:
            return self._invoke(ctx)
        except StagemeshError as exc:
            show_error(exc, as_json=bool(ctx.meta.get(_JSON_KEY)))
            raise typer.Exit(exit_code(exc)) from None
        except _UsageError as exc:
            if not wants_json:
                raise
            show_error(InvalidRequestError(exc.format_message()), as_json=True)
            raise typer.Exit(ExitCode.USAGE) from None
        except KeyboardInterrupt:
            raise typer.Exit(ExitCode.INTERRUPTED) from None

    def _invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except ImportError:
            command = ctx.invoked_subcommand
            with needs_extra(_EXTRAS.get(command, "cli"), of=f"`stagemesh {command}`"):
                raise


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
            "start the pipeline, for example with `stagemesh up speech`, or set the orchestrator's address with "
            "--server HOST:PORT or --context NAME"
        )
    if isinstance(error, DeadlineError):
        return "increase --timeout SECONDS"
    if error.retry_after_s is not None:
        return f"try again in {error.retry_after_s:.1f} s"
    if error.reason != "UNKNOWN_LOG" and _LOG.search(error.message):
        command = " ".join(filter(None, ("stagemesh logs", error.metadata.get("replica", ""))))
        return f"`{command}` shows the log, if `stagemesh up` runs the pipeline on this machine"
    return ""
