"""The `stagemesh` command with all of its subcommands."""

import typer

from stagemesh.cli.local import demo, deployment_files, logs, probe_transport, serve, up, verify
from stagemesh.cli.operation import admin, status, top, trace
from stagemesh.cli.pipelines import models, pipeline
from stagemesh.cli.pipelines import pipeline as k8s
from stagemesh.cli.pipelines.new import app as new
from stagemesh.cli.requests import bench, converse, generate, job
from stagemesh.cli.requests.bench_options import BENCH as BENCH_PARAMETERS
from stagemesh.cli.terminal import context_commands as contexts
from stagemesh.cli.terminal.error_output import ErrorGroup
from stagemesh.cli.terminal.options import with_parameters

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

app.command("up")(up.up)
app.command("logs")(with_parameters(logs.logs, logs.PARAMETERS))
app.command("generate")(with_parameters(generate.generate, generate.GENERATE))
app.command("converse")(with_parameters(converse.converse, converse.PARAMETERS))
app.command("bench")(with_parameters(bench.bench, BENCH_PARAMETERS))
app.command("cancel")(with_parameters(generate.cancel, generate.CANCEL))
app.add_typer(job.app, name="job")
app.add_typer(pipeline.app, name="pipeline")
app.add_typer(new, name="new")
app.add_typer(k8s.k8s, name="k8s")
app.command("stages")(with_parameters(status.stages, status.STAGES_PARAMETERS))
app.add_typer(admin.app, name="admin")
app.command("top")(with_parameters(top.top, top.PARAMETERS))
app.command("trace")(with_parameters(trace.trace, trace.PARAMETERS))
app.command("doctor")(with_parameters(status.doctor, status.DOCTOR_PARAMETERS))
app.add_typer(contexts.app, name="context")
app.add_typer(models.app, name="models")
app.command("verify")(with_parameters(verify.verify, verify.PARAMETERS))
app.command("demo")(with_parameters(demo.demo, demo.PARAMETERS))
app.add_typer(serve.app, name="serve")
app.command("gateway")(serve.gateway)
app.add_typer(deployment_files.app, name="config")
app.add_typer(deployment_files.certificates, name="certificate")
app.add_typer(deployment_files.tokens, name="token")
app.command("probe-transport")(probe_transport.probe_transport)
app.command("version")(with_parameters(status.version, status.VERSION_PARAMETERS))

if __name__ == "__main__":
    app()
