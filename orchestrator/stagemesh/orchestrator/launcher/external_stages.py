"""Reports the state of external stages, whose replicas the launcher does not start."""

import asyncio
from collections.abc import Callable, Sequence

import grpc
import grpc.aio

from stagemesh.orchestrator.launcher.probes import ProcessState, ProcessStatus
from stagemesh.orchestrator.spec import Pipeline, Stage
from stagemesh.v1 import orchestrator_pb2, stage_pb2
from stagemesh.v1.orchestrator_pb2_grpc import OrchestratorServiceStub

_POLL_S = 0.5
_TIMEOUT_S = 1.0


class ExternalStages:
    """The external stages of a pipeline that a launcher runs, and their last statuses."""

    def __init__(self, pipeline: Pipeline, *, admin_endpoint: str) -> None:
        """`admin_endpoint` is the address at which replicas register with the orchestrator."""
        self._pipeline, self._admin_endpoint = pipeline, admin_endpoint
        self._stages = [stage for stage in pipeline.stages.values() if stage.is_external]
        self.statuses = {stage.name: self._waiting(stage) for stage in self._stages}
        """The status of each external stage, by the name of the stage."""

    @property
    def register(self) -> bool:
        """Whether the replicas of any of these stages must register, because the pipeline file has no addresses."""
        return any(not stage.addresses for stage in self._stages)

    async def watch(self, channel: grpc.aio.Channel, report: Callable[[ProcessStatus], None]) -> None:
        """Calls `report` with the status of each stage, now and after each change, until this call is cancelled.

        `channel` leads to the orchestrator. Returns at once if the pipeline has no external stage.
        """
        for status in self.statuses.values():
            report(status)
        while self._stages:
            described = {stage.name: stage.replicas for stage in await _describe(channel)}
            for stage in self._stages:
                replicas = described.get(stage.name)
                status = self._status(stage, replicas) if replicas else self._waiting(stage)
                if status != self.statuses[stage.name]:
                    self.statuses[stage.name] = status
                    report(status)
            await asyncio.sleep(_POLL_S)

    def _identity(self, stage: Stage) -> str:
        return f"pipeline {self._pipeline.name}, generation {self._pipeline.generation}, stage {stage.name}"

    def _waiting(self, stage: Stage) -> ProcessStatus:
        """Returns the status of a stage without replicas. Its detail says how a replica joins the stage."""
        where = f"at {', '.join(stage.addresses)}" if stage.addresses else f"to register at {self._admin_endpoint}"
        detail = f"waits for a replica {where} as {self._identity(stage)}"
        return _make_status(stage, stage.addresses, ProcessState.WAITING, detail)

    def _status(self, stage: Stage, replicas: Sequence[orchestrator_pb2.ReplicaStatus]) -> ProcessStatus:
        """Returns READY if all replicas of a stage are ready. Otherwise, the detail explains the other replicas."""
        unready = [each for each in replicas if each.state != stage_pb2.REPLICA_STATE_READY]
        has_failed = any(each.state == stage_pb2.REPLICA_STATE_FAILED for each in unready)
        state = ProcessState.FAILED if has_failed else ProcessState.WAITING if unready else ProcessState.READY
        detail = "; ".join(self._explain(stage, each) for each in unready)
        return _make_status(stage, [each.endpoint for each in replicas], state, detail)

    def _explain(self, stage: Stage, replica: orchestrator_pb2.ReplicaStatus) -> str:
        if replica.state == stage_pb2.REPLICA_STATE_UNREACHABLE:
            return f"{replica.endpoint} does not answer; start a replica there as {self._identity(stage)}"
        return f"{replica.name}: {replica.detail or 'is not ready'}"


def _make_status(stage: Stage, endpoints: Sequence[str], state: ProcessState, detail: str = "") -> ProcessStatus:
    return ProcessStatus(f"{stage.name} (external)", stage.name, ", ".join(endpoints), state, detail)


async def _describe(channel: grpc.aio.Channel) -> list[orchestrator_pb2.StageDescription]:
    request = orchestrator_pb2.DescribePipelineRequest()
    try:
        return list((await OrchestratorServiceStub(channel).DescribePipeline(request, timeout=_TIMEOUT_S)).stages)
    except grpc.aio.AioRpcError:
        return []
