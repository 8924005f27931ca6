"""Reports the hosts of an orchestrator and its replicas, and sets the levels of their logs."""

import asyncio
import time
from collections.abc import Sequence
from typing import TypeAlias

from stagemesh.common.errors import StagemeshError
from stagemesh.orchestrator.admin.directory import ORCHESTRATOR, Directory
from stagemesh.orchestrator.fleet.replica import Replica
from stagemesh.rpc.error_mapping import error_to_wire
from stagemesh.rpc.process_control import host_report, set_log_level
from stagemesh.v1 import admin_pb2, control_pb2

_DESCRIBE_S = 5.0
_REQUEST = control_pb2.DescribeHostRequest().SerializeToString()


async def process_reports(directory: Directory) -> list[admin_pb2.ProcessReport]:
    """Returns the report of this orchestrator, and that of each replica or the error of its call."""
    own = admin_pb2.ProcessReport(process=ORCHESTRATOR, report=host_report())
    return [own, *await asyncio.gather(*map(_ask, directory.replicas))]


async def _ask(replica: Replica) -> admin_pb2.ProcessReport:
    made = admin_pb2.ProcessReport(process=replica.name, stage=replica.stage)
    asked_s, began_s = time.time(), time.monotonic()
    try:
        answer = await replica.client.control("DescribeHost", _REQUEST, timeout_s=_DESCRIBE_S)
    except StagemeshError as exc:
        made.error.CopyFrom(error_to_wire(exc))
        return made
    took_s = time.monotonic() - began_s
    made.report.CopyFrom(control_pb2.DescribeHostResponse.FromString(answer).report)
    # The report was made at some time within the call.
    made.clock_ahead_s = made.report.time_s - (asked_s + took_s / 2)
    made.clock_error_s = took_s / 2
    return made


_Level: TypeAlias = "control_pb2.LogLevel.ValueType"

_CALL_S = 5.0


class LogLevels:
    """Changes the levels of one orchestrator and of the replicas of its pipeline."""

    def __init__(self, directory: Directory) -> None:
        self._directory = directory

    async def set(self, target: str, level: _Level, logger: str) -> list[admin_pb2.LogLevelOutcome]:
        """Sets the level of a logger of `target`: of a replica, of the replicas of a stage, or of the orchestrator.

        "" stands for the orchestrator and all replicas. Returns the outcome for each process. Raises NotFoundError
        (UNKNOWN_TARGET) for an unknown target, and InvalidRequestError for an unknown level.
        """
        if target not in ("", ORCHESTRATOR):
            return await self._set_each(self._directory.target(target), level, logger)
        replicas = [] if target else self._directory.replicas
        return [self._set_own(level, logger), *await self._set_each(replicas, level, logger)]

    async def _set_each(
        self, replicas: Sequence[Replica], level: _Level, logger: str
    ) -> list[admin_pb2.LogLevelOutcome]:
        return await asyncio.gather(*(self._set(replica, level, logger) for replica in replicas))

    @staticmethod
    def _set_own(level: _Level, logger: str) -> admin_pb2.LogLevelOutcome:
        try:
            return admin_pb2.LogLevelOutcome(process=ORCHESTRATOR, previous=set_log_level(level, logger))
        except StagemeshError as exc:
            return admin_pb2.LogLevelOutcome(process=ORCHESTRATOR, error=error_to_wire(exc))

    @staticmethod
    async def _set(replica: Replica, level: _Level, logger: str) -> admin_pb2.LogLevelOutcome:
        request = control_pb2.SetLogLevelRequest(level=level, logger=logger).SerializeToString()
        try:
            answer = await replica.client.control("SetLogLevel", request, timeout_s=_CALL_S)
        except StagemeshError as exc:
            return admin_pb2.LogLevelOutcome(process=replica.name, error=error_to_wire(exc))
        previous = control_pb2.SetLogLevelResponse.FromString(answer).previous
        return admin_pb2.LogLevelOutcome(process=replica.name, previous=previous)
