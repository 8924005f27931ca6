"""Reports the hosts of an orchestrator and its replicas, and sets the levels of their logs."""

import time
from functools import partial
from typing import TypeAlias

from stagemesh.common.errors import StagemeshError
from stagemesh.orchestrator.admin.directory import CALL_S, ORCHESTRATOR, Directory, answers_of
from stagemesh.orchestrator.fleet.replica import Replica
from stagemesh.rpc.error_mapping import error_to_wire
from stagemesh.rpc.process_control import host_report, set_log_level
from stagemesh.v1 import admin_pb2, control_pb2

_Level: TypeAlias = "control_pb2.LogLevel.ValueType"


async def process_reports(directory: Directory) -> list[admin_pb2.ProcessReport]:
    """Returns the report of this orchestrator, and that of each replica or the error of its call."""
    reports = [admin_pb2.ProcessReport(process=ORCHESTRATOR, report=host_report())]
    for replica, answer in (await answers_of(directory.replicas, _report)).items():
        if isinstance(answer, StagemeshError):
            error = error_to_wire(answer)
            reports.append(admin_pb2.ProcessReport(process=replica.name, stage=replica.stage, error=error))
        else:
            reports.append(answer)
    return reports


async def _report(replica: Replica) -> admin_pb2.ProcessReport:
    asked_s, began_s = time.time(), time.monotonic()
    answer = await replica.client.control(
        control_pb2.DescribeHostRequest(), control_pb2.DescribeHostResponse, timeout_s=CALL_S
    )
    took_s = time.monotonic() - began_s
    return admin_pb2.ProcessReport(
        process=replica.name,
        stage=replica.stage,
        report=answer.report,
        # The report was made at some time within the call.
        clock_ahead_s=answer.report.time_s - (asked_s + took_s / 2),
        clock_error_s=took_s / 2,
    )


async def set_log_levels(
    directory: Directory, target: str, request: control_pb2.SetLogLevelRequest
) -> list[admin_pb2.LogLevelOutcome]:
    """Sets the level of a logger of `target`: of a replica, of the replicas of a stage, or of the orchestrator.

    "" stands for the orchestrator and all replicas. Returns the outcome for each process. Raises NotFoundError
    (UNKNOWN_TARGET) for an unknown target.
    """
    # None stands for the orchestrator.
    processes: list[Replica | None] = [None] if target in ("", ORCHESTRATOR) else []
    if target != ORCHESTRATOR:
        processes += directory.target(target) if target else directory.replicas
    outcomes: list[admin_pb2.LogLevelOutcome] = []
    for replica, answer in (await answers_of(processes, partial(_set_log_level, request=request))).items():
        outcome = admin_pb2.LogLevelOutcome(process=ORCHESTRATOR if replica is None else replica.name)
        if isinstance(answer, StagemeshError):
            outcome.error.CopyFrom(error_to_wire(answer))
        else:
            outcome.previous = answer
        outcomes.append(outcome)
    return outcomes


async def _set_log_level(replica: Replica | None, request: control_pb2.SetLogLevelRequest) -> _Level:
    """Returns the former level. Raises InvalidRequestError for an unknown level, and NotFoundError (UNKNOWN_LOGGER)."""
    if replica is None:
        return set_log_level(request.level, request.logger)
    return (await replica.client.control(request, control_pb2.SetLogLevelResponse, timeout_s=CALL_S)).previous
