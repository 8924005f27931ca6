"""`stagemesh doctor`: checks a deployment, and says what to repair."""

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import typer

from stagemesh.common.exit_codes import ExitCode
from stagemesh.orchestrator.cli.contexts.addresses import ADMIN_SERVER
from stagemesh.orchestrator.cli.error_output import AsJson
from stagemesh.orchestrator.cli.options import Parameter
from stagemesh.orchestrator.cli.output import Column, make_table, print_all, print_json

if TYPE_CHECKING:
    from stagemesh.orchestrator.cli.diagnosis import Deployment, Finding

PARAMETERS: Mapping[str, Parameter] = {**ADMIN_SERVER, "as_json": Parameter(AsJson, False)}


def doctor(**values: Any) -> None:
    """Check a running deployment: replicas, edges, versions, clocks, certificates, memory, shared memory, limits and
    RDMA devices. Print what is wrong and how to repair it. Exits with code 1 if a finding is an error.
    """
    from stagemesh.orchestrator.cli.diagnosis import Severity, diagnose

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
    from stagemesh.orchestrator.cli.admin.client import AdminConnection, make_request
    from stagemesh.orchestrator.cli.diagnosis import Deployment

    with AdminConnection(server) as admin:
        stages = admin.call_all_pages("ListStages", make_request("ListStages", {})).stages
        edges = admin.call_all_pages("ListEdges", make_request("ListEdges", {})).edges
        asked_s, began_s = time.time(), time.monotonic()
        processes = admin.call("DescribeHosts", make_request("DescribeHosts", {})).processes
        took_s = time.monotonic() - began_s
    return Deployment(stages, edges, processes, now_s=asked_s + took_s / 2, now_error_s=took_s / 2)


def _show(findings: "list[Finding]") -> None:
    if not findings:
        return
    styles = {"error": "red", "warning": "yellow"}
    columns = [
        Column("", lambda row: [(row.severity.value, styles[row.severity.value])]),
        Column("where", lambda row: row.where),
        Column("problem", lambda row: row.problem),
        Column("remedy", lambda row: row.remedy),
    ]
    print_all(make_table(columns, findings))
