"""What an operator sees and does, over the port for operators."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import grpc
from google.protobuf.json_format import MessageToDict

from stagemesh.rpc.channels import open_channel
from stagemesh.v1 import admin_pb2, stage_pb2
from stagemesh.v1.admin_pb2_grpc import AdminServiceStub

if TYPE_CHECKING:
    from stagemesh.v1.admin_pb2_grpc import AdminServiceAsyncStub

_TIMEOUT_S = 20.0
DRAIN_S = 40.0
"""What runs on a replica that is restarted may take so long: a request can wait for a stopped neighbour."""


class Operator:
    """Calls of one orchestrator."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._stub: AdminServiceAsyncStub = AdminServiceStub(channel)

    async def ready(self) -> dict[str, str]:
        """The replicas that take requests, each with its stage."""
        request = admin_pb2.ListReplicasRequest(state=stage_pb2.REPLICA_STATE_READY)
        listed = await self._stub.ListReplicas(request, timeout=_TIMEOUT_S)
        return {replica.name: replica.stage for replica in listed.replicas}

    async def requests_on(self, replica: str) -> list[str]:
        """The requests of which a replica has a share."""
        request = admin_pb2.ListRequestsRequest(target=replica)
        return [each.request_id for each in (await self._stub.ListRequests(request, timeout=_TIMEOUT_S)).requests]

    async def running(self) -> list[str]:
        """The requests that wait or run."""
        listed = await self._stub.ListRequests(admin_pb2.ListRequestsRequest(), timeout=_TIMEOUT_S)
        return [each.request_id for each in listed.requests]

    async def drain(self, replica: str) -> None:
        """No new work for a replica."""
        await self._stub.DrainReplicas(admin_pb2.DrainReplicasRequest(target=replica), timeout=_TIMEOUT_S)

    async def resume(self, replica: str) -> None:
        """Work for it again."""
        await self._stub.ResumeReplicas(admin_pb2.ResumeReplicasRequest(target=replica), timeout=_TIMEOUT_S)

    async def restart(self, replica: str, *, load_s: float) -> list[int]:
        """Restarts a replica, which may take so long to be ready, in order; its phases."""
        request = admin_pb2.RestartReplicasRequest(target=replica, drain_s=DRAIN_S)
        return [change.phase async for change in self._stub.RestartReplicas(request, timeout=DRAIN_S + load_s)]

    async def timeline(self, request_id: str) -> object:
        """What became of a request, for people; nothing where the orchestrator no longer knows it."""
        try:
            request = admin_pb2.GetRequestRequest(request_id=request_id)
            return MessageToDict(await self._stub.GetRequest(request, timeout=_TIMEOUT_S))
        except grpc.aio.AioRpcError as exc:
            return str(exc.details())


@asynccontextmanager
async def operating(endpoint: str) -> AsyncIterator[Operator]:
    """An operator of the orchestrator whose port for operators that is."""
    async with open_channel(endpoint) as channel:
        yield Operator(channel)
