"""The commands of `stagemesh k8s`."""

import typer

from stagemesh.orchestrator.cli.error_output import AsJson
from stagemesh.orchestrator.cli.options import PipelineName, Replicas, Settings, read_overrides
from stagemesh.orchestrator.cli.output import print_json

app = typer.Typer(help="Prepare the deployment of a pipeline on Kubernetes.", no_args_is_help=True)


@app.callback()
def _commands() -> None:
    """Keeps `render` a subcommand, because typer would run the only command of a group directly."""


@app.command()
def render(name: PipelineName, settings: Settings = None, replicas: Replicas = None, as_json: AsJson = False) -> None:
    """Print a values file of the Helm chart for a pipeline: the pipeline itself, and settings of every stage."""
    from stagemesh.orchestrator.cli.k8s.values import chart_values, format_values
    from stagemesh.orchestrator.spec import load_pipeline

    overrides = read_overrides(settings, replicas)
    pipeline = load_pipeline(name, overrides=overrides, check_models=False, for_kubernetes=True)
    if as_json:
        print_json(chart_values(pipeline))
    else:
        typer.echo(format_values(pipeline), nl=False)
