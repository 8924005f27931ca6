"""All replicas of a pipeline, each watched from start to end."""

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Protocol, cast

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from stagemesh.connectors.channels import open_channel
from stagemesh.connectors.errors import StagemeshError
from stagemesh.orchestrator.config import ReplicaAddress
from stagemesh.orchestrator.links import EdgeLinks
from stagemesh.orchestrator.replica import Replica, ReplicaState
from stagemesh.orchestrator.spec import Pipeline
from stagemesh.orchestrator.stages import GrpcStageClient

_log = logging.getLogger(__name__)

_POLL_S = 0.5
_DESCRIBE_TIMEOUT_S = 2.0


class Fleet:
    """The replicas by stage, within `async with fleet.watched():`."""

    def __init__(self, pipeline: Pipeline, addresses: Mapping[str, Sequence[ReplicaAddress]]) -> None:
        self.replicas: dict[str, tuple[Replica, ...]] = {}
        self.links = EdgeLinks(pipeline.edges)
        self._pipeline = pipeline
        self._addresses = addresses

    @property
    def ready(self) -> bool:
        """Whether every stage has a replica that takes requests, and the edges between them can be crossed."""
        return self.links.ready and all(
            any(replica.state is ReplicaState.READY for replica in self.replicas.get(stage, ()))
            for stage in self._pipeline.stages
        )

    @asynccontextmanager
    async def watched(self, *, on_change: Callable[[], None] = lambda: None) -> AsyncGenerator[None]:
        """Keeps channels to all replicas open and what is known of them and of their links current.

        `on_change` is called when any of that changes.
        """

        def replica_changed() -> None:
            self.links.replica_changed()
            on_change()

        async with AsyncExitStack() as channels, asyncio.TaskGroup() as group:
            watches: list[asyncio.Task[None]] = []
            for stage in self._pipeline.stages:
                for address in self._addresses.get(stage, ()):
                    channel = await channels.enter_async_context(open_channel(address.endpoint))
                    client = GrpcStageClient(channel, stage=stage, replica=address.name, endpoint=address.endpoint)
                    replica = Replica(stage, address, client, on_change=replica_changed)
                    self.replicas[stage] = (*self.replicas.get(stage, ()), replica)
                    watch = self._watch(replica, client, health_pb2_grpc.HealthStub(channel))
                    watches.append(group.create_task(watch, name=f"watch {address.name}"))
            for link in self.links.join(self.replicas):
                name = f"link {link.producer.name} to {link.consumer.name}"
                watches.append(group.create_task(self.links.keep(link, on_change=on_change), name=name))
            try:
                yield
            finally:
                for task in watches:
                    task.cancel()

    async def _watch(self, replica: Replica, client: GrpcStageClient, health: health_pb2_grpc.HealthStub) -> None:
        """Asks what the replica is until it is ready, then listens for the moment when it no longer is."""
        while True:
            try:
                replica.observe_description(await client.describe(timeout_s=_DESCRIBE_TIMEOUT_S), self._pipeline)
                if replica.state is ReplicaState.READY:
                    _log.info("replica %s is ready", replica.name)
                    await _while_serving(health)
            except StagemeshError as exc:
                replica.observe(ReplicaState.UNREACHABLE, exc.message)
            except grpc.aio.AioRpcError as exc:
                replica.observe(ReplicaState.UNREACHABLE, f"the connection was lost ({exc.details()})")
            await asyncio.sleep(_POLL_S)


class _HealthWatch(Protocol):
    def __aiter__(self) -> AsyncIterator[health_pb2.HealthCheckResponse]: ...

    def cancel(self) -> bool: ...


def _watch_health(health: health_pb2_grpc.HealthStub) -> _HealthWatch:
    # The published annotations know Check alone.
    watch = cast("Callable[[health_pb2.HealthCheckRequest], _HealthWatch]", vars(health)["Watch"])
    return watch(health_pb2.HealthCheckRequest())


async def _while_serving(health: health_pb2_grpc.HealthStub) -> None:
    """Returns when the replica says that it no longer serves; raises AioRpcError when it is gone."""
    call = _watch_health(health)
    try:
        async for answer in call:
            if answer.status != health_pb2.HealthCheckResponse.SERVING:
                return
    finally:
        call.cancel()
