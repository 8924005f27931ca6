"""The `stagemesh` command with the subcommands of this package."""

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
from stagemesh.cli.pipelines.pipeline import app as pipeline
from stagemesh.cli.pipelines.pipeline import k8s
from stagemesh.cli.requests.converse import converse
from stagemesh.cli.requests.generate import cancel, generate
from stagemesh.cli.requests.job import app as job
from stagemesh.cli.terminal.contexts import app as context
from stagemesh.cli.terminal.error_output import ErrorGroup

app = typer.Typer(
    name="stagemesh",
    cls=ErrorGroup,
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
