"""The `stagemesh` command with all of its subcommands.

Packages add commands by entry points in the group `stagemesh.commands`. They are imported only if their help is printed
or if they are called.
"""

from collections.abc import Mapping
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any

import typer

from stagemesh.cli.local.deployment_files import app as config
from stagemesh.cli.local.deployment_files import certificates, tokens
from stagemesh.cli.local.logs import logs
from stagemesh.cli.local.serve import app as serve
from stagemesh.cli.local.serve import gateway
from stagemesh.cli.local.up import demo, up
from stagemesh.cli.operation.admin import app as admin
from stagemesh.cli.operation.status import doctor, stages, version
from stagemesh.cli.operation.top import top
from stagemesh.cli.operation.trace import trace
from stagemesh.cli.pipelines.models import app as models
from stagemesh.cli.pipelines.new import app as new
from stagemesh.cli.pipelines.pipeline import app as pipeline
from stagemesh.cli.pipelines.pipeline import k8s
from stagemesh.cli.requests.converse import converse
from stagemesh.cli.requests.generate import cancel, generate
from stagemesh.cli.requests.job import app as job
from stagemesh.cli.terminal.contexts import app as context
from stagemesh.cli.terminal.error_output import ErrorGroup
from stagemesh.common.errors import NotReadyError


class _Commands(ErrorGroup):
    """The root command with its own commands, and with those that packages add under other names."""

    def list_commands(self, ctx: Any) -> list[str]:
        own = super().list_commands(ctx)
        return [*own, *sorted(_added().keys() - set(own))]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        own = super().get_command(ctx, cmd_name)
        entry = _added().get(cmd_name) if own is None else None
        if entry is None:
            return own
        added = typer.Typer(add_completion=False)
        added.command(cmd_name)(_load(entry))
        return typer.main.get_command(added)


@cache
def _added() -> Mapping[str, EntryPoint]:
    return {entry.name: entry for entry in entry_points(group="stagemesh.commands")}


def _load(entry: EntryPoint) -> Any:
    """Returns the function of an added command. If it cannot be imported, returns one that raises NotReadyError."""
    try:
        return entry.load()
    except Exception as exc:  # noqa: BLE001 - a package may raise anything, and the other commands need their help
        cause = exc

    def fail() -> None:
        """Unavailable: this command cannot be imported."""
        raise NotReadyError(
            f"the command {entry.name!r} cannot be imported from {entry.value!r}: {type(cause).__name__}: {cause}; "
            "correct or remove its package",
            reason="INVALID_DESCRIPTOR",
        ) from cause

    return fail


app = typer.Typer(
    name="stagemesh",
    cls=_Commands,
    help="Serve generative models that are pipelines of stages. Each stage is its own gRPC service.",
    epilog="Exit codes: 0 success, 1 other failure, 2 invalid command line, file or request, 3 not found, 4 server or "
    "stage unavailable, 5 timeout, 6 refused (permission, limit or state), 130 interrupted.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

# `--help` lists the commands in this order.
app.command()(up)
app.command()(logs)
app.command()(generate)
app.command()(converse)
app.command()(cancel)
app.add_typer(job, name="job")
app.add_typer(pipeline, name="pipeline")
app.add_typer(new, name="new")
app.add_typer(k8s, name="k8s")
app.command()(stages)
app.add_typer(admin, name="admin")
app.command()(top)
app.command()(trace)
app.command()(doctor)
app.add_typer(context, name="context")
app.add_typer(models, name="models")
app.command()(demo)
app.add_typer(serve, name="serve")
app.command()(gateway)
app.add_typer(config, name="config")
app.add_typer(certificates, name="certificate")
app.add_typer(tokens, name="token")
app.command()(version)
