"""`stagemesh stages`, `stagemesh doctor` and `stagemesh version`: report the state of a deployment."""

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import typer

from stagemesh.cli.operation import views
from stagemesh.cli.terminal.connection_options import ADMIN_SERVER, SERVER, is_given, open_client
from stagemesh.cli.terminal.error_output import AS_JSON
from stagemesh.cli.terminal.options import Parameter, with_parameters
from stagemesh.cli.terminal.output import WATCH, links_table, print_all, print_json, show_views, ticks, to_json
from stagemesh.cli.terminal.tables import Column, fields, make_table, number
from stagemesh.common.errors import DeadlineError, ExitCode, UnavailableError

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

    from stagemesh.cli.operation.diagnosis import Deployment, Finding
    from stagemesh.v1 import orchestrator_pb2
    from stagemesh.v1.protocol_pb2 import Protocol


@with_parameters({**WATCH, **SERVER, **AS_JSON})
def stages(**values: Any) -> None:
    """List the stages and replicas of a running pipeline, and the connectors that its edges use."""
    with open_client(values) as client:
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


@with_parameters({**ADMIN_SERVER, **AS_JSON})
def doctor(**values: Any) -> None:
    """Check a running deployment: replicas, edges, versions, clocks, certificates, memory, shared memory, limits and
    RDMA devices. Print what is wrong and how to repair it. Exits with code 1 if a finding is an error.
    """
    from stagemesh.cli.operation.diagnosis import Severity, diagnose

    found = _ask(values["admin_server"])
    findings = diagnose(found)
    hosts = {each.report.host for each in found.processes if each.HasField("report")}
    if values["as_json"]:
        rows = [{**finding._asdict(), "severity": finding.severity.value} for finding in findings]
        print_json({"processes": len(found.processes), "hosts": sorted(hosts), "findings": rows})
    else:
        _show(findings)
        typer.echo(f"processes: {len(found.processes)}, hosts: {len(hosts)}, problems: {len(findings)}")
    if any(finding.severity is Severity.ERROR for finding in findings):
        raise typer.Exit(ExitCode.FAILED)


def _ask(server: str) -> "Deployment":
    from stagemesh.cli.operation.admin_connection import AdminConnection
    from stagemesh.cli.operation.diagnosis import Deployment

    with AdminConnection(server) as admin:
        stages = admin.call_all_pages("ListStages").stages
        edges = admin.call_all_pages("ListEdges").edges
        asked_s, began_s = time.time(), time.monotonic()
        processes = admin.call("DescribeHosts").processes
        took_s = time.monotonic() - began_s
    return Deployment(stages, edges, processes, now_s=asked_s + took_s / 2, now_error_s=took_s / 2)


def _show(findings: "list[Finding]") -> None:
    if not findings:
        return
    styles = {"error": "red", "warning": "yellow"}
    columns = [
        Column("", lambda row: [(row.severity.value, styles[row.severity.value])]),
        *fields("where", "problem", "remedy"),
    ]
    print_all(make_table(columns, findings))


@with_parameters({"ctx": Parameter(typer.Context), **SERVER, **AS_JSON})
def version(ctx: typer.Context, **values: Any) -> None:
    """Print the version of this installation, and what the server reports about itself. A server that does not answer
    is an error only if --server or --context is given.
    """
    from stagemesh.common.wire.versions import own_protocol

    client = _fields(own_protocol())
    try:
        server = _describe(values)
    except (UnavailableError, DeadlineError):
        if is_given(ctx, "server") or values["context"]:
            raise
        server = None
    if values["as_json"]:
        print_json({"client": client, "server": server})
        return
    typer.echo(_line(client))
    if server is not None:
        typer.echo(f"server {values['server']}: {_line(server)}, pipeline {server['pipeline']} {server['generation']}")


def _describe(values: Mapping[str, Any]) -> dict[str, object]:
    with open_client(values) as client:
        description = client.describe()
    own = {"pipeline": description.pipeline, "generation": description.generation}
    return {**_fields(description.protocol), **own}


def _fields(protocol: "Protocol") -> dict[str, object]:
    return {
        "software": protocol.software,
        "wire_versions": [protocol.lowest_version, protocol.highest_version],
        "features": list(protocol.features),
    }


def _line(fields: Mapping[str, Any]) -> str:
    lowest, highest = fields["wire_versions"]
    return f"{fields['software']}, wire versions {lowest} to {highest}"
