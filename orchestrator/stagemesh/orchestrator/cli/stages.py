"""`stagemesh stages`: lists the stages and replicas of a running pipeline."""

from typing import TYPE_CHECKING

import typer

from stagemesh.orchestrator.cli.error_output import AsJson
from stagemesh.orchestrator.cli.options import DEFAULT_SERVER, Server, read_endpoints
from stagemesh.orchestrator.cli.output import (
    Column,
    enum_word,
    links_table,
    make_table,
    number,
    print_all,
    print_json,
    state_cell,
    to_json,
)

if TYPE_CHECKING:
    from rich.table import Table

    from stagemesh.v1 import orchestrator_pb2


def stages(server: Server = DEFAULT_SERVER, as_json: AsJson = False) -> None:
    """List the stages and replicas of a running pipeline, and the connectors that its edges use."""
    from stagemesh.client import Client

    with Client(*read_endpoints(server)) as client:
        pipeline = client.describe()
    if as_json:
        print_json(to_json(pipeline))
        return
    print_all(_table(pipeline))
    if pipeline.edges:
        typer.echo()
        print_all(links_table(pipeline.edges))


def _table(pipeline: "orchestrator_pb2.DescribePipelineResponse") -> "Table":
    from stagemesh.v1 import orchestrator_pb2, stage_pb2

    title = (
        f"{pipeline.pipeline} {pipeline.generation}: {pipeline.in_flight} of {pipeline.max_in_flight} requests in "
        f"flight, {pipeline.queued} of {pipeline.max_queued} queued"
    )
    none = orchestrator_pb2.ReplicaDescription(name="none")
    columns = (
        Column("stage", lambda row: row[0].name),
        Column("engine", lambda row: row[0].engine),
        Column("replica", lambda row: row[1].name),
        Column("endpoint", lambda row: row[1].endpoint),
        Column(
            "state",
            lambda row: state_cell(
                enum_word(stage_pb2.ReplicaState.DESCRIPTOR, row[1].state) if row[1].state else "", row[1].detail
            ),
        ),
        number("running", lambda row: row[1].running),
    )
    rows = [(stage, replica) for stage in pipeline.stages for replica in stage.replicas or (none,)]
    return make_table(columns, rows, title=title)
