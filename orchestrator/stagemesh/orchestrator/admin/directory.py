"""Looks up the pipeline's stages, edges and replicas by name, probes the connectors of edges, and asks every process.

The questions to processes are for the report of their host, and for the levels of their logs.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection
from functools import partial
from itertools import chain
from typing import TypeAlias, TypeVar

from stagemesh.common.errors import NotFoundError, StagemeshError
from stagemesh.common.process.stage_process import ReplicaState
from stagemesh.orchestrator.fleet.edge_connectors import EdgeLink
from stagemesh.orchestrator.fleet.fleet import Fleet
from stagemesh.orchestrator.fleet.replica import Replica
from stagemesh.pipeline import Edge, Pipeline
from stagemesh.rpc.error_mapping import error_to_wire
from stagemesh.rpc.pages import Key
from stagemesh.rpc.process_control import host_report, set_log_level
from stagemesh.v1 import admin_pb2, control_pb2

_Process = TypeVar("_Process")
_Answer = TypeVar("_Answer")
_Level: TypeAlias = "control_pb2.LogLevel.ValueType"

CALL_S = 5.0
"""The time limit for a call of a replica on behalf of an operator, in seconds."""
ORCHESTRATOR = "@orchestrator"
"""The name of the orchestrator itself among the names of processes. No stage or replica has it."""
_MAX_CONCURRENT_PROBES = 64
_RANKS = {ReplicaState.READY: 0, ReplicaState.FAILED: 2, ReplicaState.UNREACHABLE: 2}


async def answers_of(
    processes: Collection[_Process], ask: Callable[[_Process], Awaitable[_Answer]]
) -> "dict[_Process, _Answer | StagemeshError]":
    """Calls processes at the same time. Returns the answer of each, or the error with which its call failed."""

    async def answer(process: _Process) -> "_Answer | StagemeshError":
        try:
            return await ask(process)
        except StagemeshError as exc:
            return exc

    return dict(zip(processes, await asyncio.gather(*map(answer, processes)), strict=True))


class Directory:
    """A lookup of the pipeline's stages, edges and current replicas by name."""

    def __init__(self, pipeline: Pipeline, fleet: Fleet) -> None:
        self.pipeline = pipeline
        self._fleet = fleet
        self._order = {stage: number for number, stage in enumerate(pipeline.stages)}

    @property
    def replicas(self) -> list[Replica]:
        """The current replicas of all stages, in the order of the pipeline's stages."""
        return list(chain.from_iterable(self.replicas_of(stage) for stage in self.pipeline.stages))

    def replicas_of(self, stage: str) -> list[Replica]:
        """Returns the current replicas of a stage, shorter names first, so that "a-2" precedes "a-10".

        Names of equal length are in alphabetical order. Raises NotFoundError (UNKNOWN_TARGET) if the stage does not
        exist.
        """
        if stage not in self.pipeline.stages:
            raise _unknown_target(f"stage {stage!r}; stages: {', '.join(self.pipeline.stages)}", stage)
        return sorted(self._fleet.registry.of(stage), key=self.key_of)

    def key_of(self, replica: Replica) -> Key:
        """Returns the key by which the replicas of the pipeline are sorted. It lasts over restarts of the replica."""
        return (self._order[replica.stage], len(replica.name), replica.name, replica.endpoint)

    def find(self, name: str) -> Replica | None:
        """Returns the replica with this name, or None if no replica has this name.

        If several replicas have the name, prefers a ready replica. Returns an unreachable or failed replica only if no
        other replica has the name.
        """
        named = [replica for replica in self.replicas if replica.name == name]
        return min(named, key=lambda replica: _RANKS.get(replica.state, 1), default=None)

    def target(self, name: str) -> list[Replica]:
        """Returns the replica with this name, or all replicas of the stage with this name, as a list.

        If a replica and a stage have the name, returns the replica. Raises NotFoundError (UNKNOWN_TARGET) if no replica
        and no stage has the name.
        """
        replica = self.find(name)
        if replica is not None:
            return [replica]
        if name in self.pipeline.stages:
            return self.replicas_of(name)
        stages, replicas = ", ".join(self.pipeline.stages), _names(self.replicas)
        raise _unknown_target(f"replica or stage {name!r}; stages: {stages}; replicas: {replicas}", name)

    def replica(self, name: str) -> Replica:
        """Returns the replica with this name. Raises NotFoundError (UNKNOWN_TARGET) if no replica has this name."""
        replica = self.find(name)
        if replica is None:
            raise _unknown_target(f"replica {name!r}; replicas: {_names(self.replicas)}", name)
        return replica

    def edge(self, name: str) -> Edge:
        """Returns the edge with this name. Raises NotFoundError (UNKNOWN_EDGE) if no edge has this name."""
        for edge in self.pipeline.edges:
            if edge.name == name:
                return edge
        raise NotFoundError(
            f"unknown edge {name!r}; edges: {', '.join(edge.name for edge in self.pipeline.edges) or 'none'}",
            reason="UNKNOWN_EDGE",
            metadata={"edge": name},
        )

    async def probe_edge(self, edge: Edge, *, producer: str = "", consumer: str = "") -> list[EdgeLink]:
        """Asks the replicas of an edge's producer stage which connector they would use for the edge.

        - `producer` is the name of a replica of the producer stage. If it is empty, all replicas of that stage are
          asked.
        - `consumer` is the name of a replica of the consumer stage. If it is empty, the connectors to all replicas of
          that stage are probed.

        Returns one link for each pair of a producer replica and a consumer replica. A link contains the producer's
        answer, or the error of the failed probe. Raises NotFoundError (UNKNOWN_TARGET) if a stage has no replica with
        the given name.
        """
        links = [
            EdgeLink(edge, producer=each, consumer=other)
            for each in self._ends(edge.producer, producer)
            for other in self._ends(edge.consumer, consumer)
        ]
        semaphore = asyncio.Semaphore(_MAX_CONCURRENT_PROBES)

        async def ask(link: EdgeLink) -> None:
            async with semaphore:
                await link.ask()

        await asyncio.gather(*map(ask, links))
        return links

    def _ends(self, stage: str, name: str) -> list[Replica]:
        replicas = self.replicas_of(stage)
        found = [replica for replica in replicas if name in ("", replica.name)]
        if name and not found:
            raise _unknown_target(f"replica {name!r} of stage {stage!r}; replicas: {_names(replicas)}", name)
        return found


def _unknown_target(description: str, name: str) -> NotFoundError:
    return NotFoundError(f"unknown {description}", reason="UNKNOWN_TARGET", metadata={"target": name})


def _names(replicas: Collection[Replica]) -> str:
    return ", ".join(replica.name for replica in replicas) or "none"


async def process_reports(directory: Directory) -> list[admin_pb2.ProcessReport]:
    """Returns the report of this orchestrator, and the report of each replica or the error of its call."""
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
