"""The `stagemesh` command with all of its subcommands."""

import typer

from stagemesh.orchestrator.cli import (
    admin,
    cancel,
    converse,
    doctor,
    generate,
    job,
    models,
    pipeline,
    probe_transport,
    stages,
    top,
    trace,
    version,
)
from stagemesh.orchestrator.cli.bench import command as bench
from stagemesh.orchestrator.cli.bench.parameters import PARAMETERS as BENCH_PARAMETERS
from stagemesh.orchestrator.cli.contexts import commands as contexts
from stagemesh.orchestrator.cli.error_output import ErrorGroup
from stagemesh.orchestrator.cli.k8s import commands as k8s
from stagemesh.orchestrator.cli.local import config, credentials, demo, gateway, logs, serve, up, verify
from stagemesh.orchestrator.cli.new import app as new
from stagemesh.orchestrator.cli.options import with_parameters

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
app.command("generate")(with_parameters(generate.generate, generate.PARAMETERS))
app.command("converse")(with_parameters(converse.converse, converse.PARAMETERS))
app.command("bench")(with_parameters(bench.bench, BENCH_PARAMETERS))
app.command("cancel")(with_parameters(cancel.cancel, cancel.PARAMETERS))
app.add_typer(job.app, name="job")
app.add_typer(pipeline.app, name="pipeline")
app.add_typer(new, name="new")
app.add_typer(k8s.app, name="k8s")
app.command("stages")(with_parameters(stages.stages, stages.PARAMETERS))
app.add_typer(admin.app, name="admin")
app.command("top")(with_parameters(top.top, top.PARAMETERS))
app.command("trace")(with_parameters(trace.trace, trace.PARAMETERS))
app.command("doctor")(with_parameters(doctor.doctor, doctor.PARAMETERS))
app.add_typer(contexts.app, name="context")
app.add_typer(models.app, name="models")
app.command("verify")(with_parameters(verify.verify, verify.PARAMETERS))
app.command("demo")(with_parameters(demo.demo, demo.PARAMETERS))
app.add_typer(serve.app, name="serve")
app.command("gateway")(gateway.gateway)
app.add_typer(config.app, name="config")
app.add_typer(credentials.certificates, name="certificate")
app.add_typer(credentials.tokens, name="token")
app.command("probe-transport")(probe_transport.probe_transport)
app.command("version")(with_parameters(version.version, version.PARAMETERS))

if __name__ == "__main__":
    app()
