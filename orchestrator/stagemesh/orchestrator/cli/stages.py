"""`stagemesh stages`: lists the stages and replicas of a running pipeline as clients see them."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from stagemesh.orchestrator.cli.admin import views
from stagemesh.orchestrator.cli.contexts.addresses import SERVER, split_addresses
from stagemesh.orchestrator.cli.error_output import AsJson
from stagemesh.orchestrator.cli.options import Parameter
from stagemesh.orchestrator.cli.output import Column, links_table, make_table, number, print_all, print_json, to_json
from stagemesh.orchestrator.cli.watching import WATCH, show_views, ticks

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

    from stagemesh.v1 import orchestrator_pb2

PARAMETERS: Mapping[str, Parameter] = {**WATCH, **SERVER, "as_json": Parameter(AsJson, False)}


def stages(**values: Any) -> None:
    """List the stages and replicas of a running pipeline, and the connectors that its edges use."""
    from stagemesh.client import Client

    with Client(*split_addresses(values["server"])) as client:
        pipelines = (client.describe() for _ in ticks(interval_s=values["interval"], watch=values["watch"]))
        if values["as_json"]:
            for pipeline in pipelines:
                print_json(to_json(pipeline))
        elif values["watch"]:
            show_views(_view(pipeline) for pipeline in pipelines)
        else:
            print_all(_view(next(pipelines)))


def _view(pipeline: "orchestrator_pb2.DescribePipelineResponse") -> "RenderableType":
    from rich.console import Group

    table = _stages_table(pipeline)
    return Group(table, "", links_table(pipeline.edges)) if pipeline.edges else table


def _stages_table(pipeline: "orchestrator_pb2.DescribePipelineResponse") -> "Table":
    from stagemesh.v1 import orchestrator_pb2

    title = (
        f"{pipeline.pipeline} {pipeline.generation}: {pipeline.in_flight} of {pipeline.max_in_flight} requests in "
        f"flight, {pipeline.queued} of {pipeline.max_queued} queued"
    )
    none = orchestrator_pb2.ReplicaStatus(name="none")
    columns = (
        Column("stage", lambda row: row[0].name),
        Column("engine", lambda row: row[0].engine),
        Column("replica", lambda row: row[1].name),
        Column("endpoint", lambda row: row[1].endpoint),
        Column("state", lambda row: views.replica_state(row[1])),
        number("planned", lambda row: row[1].planned),
        Column("generation", lambda row: row[1].generation),
    )
    rows = [(stage, replica) for stage in pipeline.stages for replica in stage.replicas or (none,)]
    return make_table(columns, rows, title=title)
