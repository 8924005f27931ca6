"""The `stagemesh` command, which contains all other commands."""

import typer

from stagemesh.orchestrator.cli import admin, demo, generate, models, pipeline, probe_transport, stages, top, up
from stagemesh.orchestrator.cli.error_output import ErrorGroup
from stagemesh.orchestrator.cli.parameters import with_parameters

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


app.command("up")(up.up)
app.command("generate")(with_parameters(generate.generate, generate.PARAMETERS))
app.add_typer(pipeline.app, name="pipeline")
app.command("stages")(stages.stages)
app.add_typer(admin.app, name="admin")
app.command("top")(top.top)
app.add_typer(models.app, name="models")
app.command("demo")(with_parameters(demo.demo, demo.PARAMETERS))
app.command("probe-transport")(probe_transport.probe_transport)
app.command("version")(version)


def main() -> None:
    """Runs the command line. This function is the entry point of the `stagemesh` program."""
    app()


if __name__ == "__main__":
    main()
