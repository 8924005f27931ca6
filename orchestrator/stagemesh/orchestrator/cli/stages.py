"""`stagemesh stages`."""

import json
from dataclasses import asdict
from typing import TYPE_CHECKING

import typer

from stagemesh.orchestrator.cli.error_output import AsJson
from stagemesh.orchestrator.cli.options import DEFAULT_SERVER, Server, read_endpoints

if TYPE_CHECKING:
    from rich.table import Table

    from stagemesh.client import PipelineInfo


def stages(server: Server = DEFAULT_SERVER, as_json: AsJson = False) -> None:
    """Shows the stages and replicas of a running pipeline, and what its edges use."""
    from stagemesh.client import Client
    from stagemesh.orchestrator.cli.tables import links_table, print_whole

    with Client(*read_endpoints(server)) as client:
        pipeline = client.describe()
    if as_json:
        typer.echo(json.dumps(asdict(pipeline), default=lambda state: state.value, ensure_ascii=False))
    else:
        print_whole(_table(pipeline))
        if pipeline.edges:
            typer.echo()
            print_whole(links_table(pipeline.edges))


def _table(pipeline: "PipelineInfo") -> "Table":
    from rich.table import Table

    from stagemesh.orchestrator.cli.tables import styled_state

    title = (
        f"{pipeline.name} {pipeline.generation}: {pipeline.in_flight} of {pipeline.max_in_flight} requests in flight, "
        f"{pipeline.queued} of {pipeline.max_queued} queued"
    )
    table = Table("stage", "engine", "replica", "endpoint", "state", "running", title=title, title_justify="left")
    for stage in pipeline.stages:
        for replica in stage.replicas:
            state = styled_state(replica.state.value, replica.detail)
            table.add_row(stage.name, stage.engine, replica.name, replica.endpoint, state, str(replica.running))
        if not stage.replicas:
            table.add_row(stage.name, stage.engine, "none", "", "", "")
    return table
