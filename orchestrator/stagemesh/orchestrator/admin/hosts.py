"""Collects the reports of an orchestrator and of replicas about their hosts, on behalf of AdminService."""

import asyncio
import time

from stagemesh.common.errors import StagemeshError
from stagemesh.orchestrator.admin.directory import ORCHESTRATOR, Directory
from stagemesh.orchestrator.fleet.replica import Replica
from stagemesh.rpc.error_mapping import error_to_wire
from stagemesh.rpc.host_report import host_report
from stagemesh.v1 import admin_pb2, control_pb2

_CALL_S = 5.0
_REQUEST = control_pb2.DescribeHostRequest().SerializeToString()


async def process_reports(directory: Directory) -> list[admin_pb2.ProcessReport]:
    """Returns the report of this orchestrator, and that of each replica or the error of its call."""
    own = admin_pb2.ProcessReport(process=ORCHESTRATOR, report=host_report())
    return [own, *await asyncio.gather(*map(_ask, directory.replicas))]


async def _ask(replica: Replica) -> admin_pb2.ProcessReport:
    made = admin_pb2.ProcessReport(process=replica.name, stage=replica.stage)
    asked_s, began_s = time.time(), time.monotonic()
    try:
        answer = await replica.client.control("DescribeHost", _REQUEST, timeout_s=_CALL_S)
    except StagemeshError as exc:
        made.error.CopyFrom(error_to_wire(exc))
        return made
    took_s = time.monotonic() - began_s
    made.report.CopyFrom(control_pb2.DescribeHostResponse.FromString(answer).report)
    # The report was made at some time within the call.
    made.clock_ahead_s = made.report.time_s - (asked_s + took_s / 2)
    made.clock_error_s = took_s / 2
    return made
