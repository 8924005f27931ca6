"""The calls of an operator, over the admin port."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import grpc
from google.protobuf.json_format import MessageToDict

from stagemesh.rpc.channels import open_channel
from stagemesh.v1 import admin_pb2, stage_pb2
from stagemesh.v1.admin_pb2_grpc import AdminServiceStub
from tests.deployment import Deployment

if TYPE_CHECKING:
    from stagemesh.v1.admin_pb2_grpc import AdminServiceAsyncStub

_TIMEOUT_S = 20.0
DRAIN_S = 40.0
"""The time in which a restarted replica must finish its steps: one may wait for a stopped peer."""


class Operator:
    """An operator of one orchestrator."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._stub: AdminServiceAsyncStub = AdminServiceStub(channel)

    async def ready(self) -> dict[str, str]:
        """Returns the ready replicas with their stages."""
        request = admin_pb2.ListReplicasRequest(state=stage_pb2.REPLICA_STATE_READY)
        listed = await self._stub.ListReplicas(request, timeout=_TIMEOUT_S)
        return {replica.name: replica.stage for replica in listed.replicas}

    async def running(self, replica: str = "") -> list[str]:
        """Returns the ids of queued and running requests, or of those that run on a replica."""
        listed = await self._stub.ListRequests(admin_pb2.ListRequestsRequest(target=replica), timeout=_TIMEOUT_S)
        return [each.request_id for each in listed.requests]

    async def drain(self, replica: str) -> None:
        """Drains a replica."""
        await self._stub.DrainReplicas(admin_pb2.DrainReplicasRequest(target=replica), timeout=_TIMEOUT_S)

    async def resume(self, replica: str) -> None:
        """Resumes a drained replica."""
        await self._stub.ResumeReplicas(admin_pb2.ResumeReplicasRequest(target=replica), timeout=_TIMEOUT_S)

    async def restart(self, replica: str, *, load_s: float) -> list[int]:
        """Restarts a replica in order and returns the phases. `load_s` is the maximum time for it to become ready."""
        request = admin_pb2.RestartReplicasRequest(target=replica, drain_s=DRAIN_S)
        return [change.phase async for change in self._stub.RestartReplicas(request, timeout=DRAIN_S + load_s)]

    async def timeline(self, request_id: str) -> object:
        """Returns what the orchestrator noted of a request, for display. Empty if it no longer knows the request."""
        try:
            request = admin_pb2.GetRequestRequest(request_id=request_id)
            return MessageToDict(await self._stub.GetRequest(request, timeout=_TIMEOUT_S))
        except grpc.aio.AioRpcError as exc:
            return str(exc.details())


@asynccontextmanager
async def operating(endpoint: str) -> AsyncIterator[Operator]:
    """Connects an operator to the admin port of an orchestrator."""
    async with open_channel(endpoint) as channel:
        yield Operator(channel)


async def unreleased(up: Deployment, operator: Operator, *, wait_s: float) -> list[str]:
    """Returns the requests, steps and memory that are still held `wait_s` seconds after the last request has ended."""
    end_s = time.monotonic() + wait_s
    while (held := await _held(up, operator)) and time.monotonic() < end_s:
        await asyncio.sleep(0.5)
    return held


async def _held(up: Deployment, operator: Operator) -> list[str]:
    held = [f"request {name} of the orchestrator" for name in await operator.running()]
    for name in up.replicas():
        load = await asyncio.to_thread(up.load, name)
        if load.running or load.queued or load.arena_used_bytes:
            held.append(f"{name}: {load.running} running, {load.queued} queued, {load.arena_used_bytes} bytes of arena")
    return held
