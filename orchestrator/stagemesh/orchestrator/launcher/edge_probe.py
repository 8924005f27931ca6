"""What `up` waits for beside its processes: that every edge can be crossed, and by what."""

from itertools import chain

import grpc.aio

from stagemesh.common.errors import NotReadyError
from stagemesh.rpc.channels import open_channel
from stagemesh.v1 import chunk_pb2, orchestrator_pb2, stage_pb2
from stagemesh.v1.orchestrator_pb2_grpc import OrchestratorServiceStub

_TIMEOUT_S = 1.0
_MAY_PASS = frozenset({grpc.StatusCode.UNAVAILABLE.value[0], grpc.StatusCode.DEADLINE_EXCEEDED.value[0]})


class EdgesProbe:
    """Asks the orchestrator about its edges."""

    def __init__(self, endpoint: str) -> None:
        self._channel = open_channel(endpoint)
        self._stub = OrchestratorServiceStub(self._channel)

    async def look(self) -> tuple[orchestrator_pb2.EdgeDescription, ...] | None:
        """The edges, once all replicas are ready and what each link between them uses is known; None before.

        Raises NotReadyError (CONNECTOR_UNAVAILABLE) where a fixed connector cannot work.
        """
        try:
            request = orchestrator_pb2.DescribePipelineRequest()
            described = await self._stub.DescribePipeline(request, timeout=_TIMEOUT_S)
        except grpc.aio.AioRpcError:
            return None
        for edge in described.edges:
            _check(edge)
        replicas = chain.from_iterable(stage.replicas for stage in described.stages)
        ready = all(replica.state == stage_pb2.REPLICA_STATE_READY for replica in replicas)
        if ready and all(_is_known(edge) for edge in described.edges):
            return tuple(described.edges)
        return None

    async def close(self) -> None:
        """Disconnects."""
        await self._channel.close()


def _check(edge: orchestrator_pb2.EdgeDescription) -> None:
    for link in edge.links:
        error = link.error
        if edge.connector != chunk_pb2.CONNECTOR_AUTO and error.code and error.code not in _MAY_PASS:
            raise NotReadyError(error.message, reason="CONNECTOR_UNAVAILABLE", metadata=dict(error.metadata))


def _is_known(edge: orchestrator_pb2.EdgeDescription) -> bool:
    """For every link; `auto` works also where the question was lost."""
    is_auto = edge.connector == chunk_pb2.CONNECTOR_AUTO
    return bool(edge.links) and all(link.connector or (is_auto and link.HasField("error")) for link in edge.links)
