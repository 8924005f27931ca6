"""The `stagemesh` command with all of its subcommands."""

import typer

from stagemesh.orchestrator.cli import admin, generate, models, pipeline, probe_transport, stages_and_top, up_and_demo
from stagemesh.orchestrator.cli.error_output import ErrorGroup
from stagemesh.orchestrator.cli.options import with_parameters

app = typer.Typer(
    name="stagemesh",
    cls=ErrorGroup,
    help="Serve generative models that are pipelines of stages. Each stage is its own gRPC service.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def version() -> None:
    """Print the installed version of Stagemesh."""
    from importlib.metadata import version as installed_version

    typer.echo(f"stagemesh {installed_version('stagemesh')}")


app.command("up")(up_and_demo.up)
app.command("generate")(with_parameters(generate.generate, generate.PARAMETERS))
app.add_typer(pipeline.app, name="pipeline")
app.command("stages")(stages_and_top.stages)
app.add_typer(admin.app, name="admin")
app.command("top")(stages_and_top.top)
app.add_typer(models.app, name="models")
app.command("demo")(with_parameters(up_and_demo.demo, up_and_demo.DEMO_PARAMETERS))
app.command("probe-transport")(probe_transport.probe_transport)
app.command("version")(version)

if __name__ == "__main__":
    app()
