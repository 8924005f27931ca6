"""The orchestrator's connection to one address at which a replica serves."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from typing import Protocol, cast

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from stagemesh.orchestrator.fleet.stage_client import GrpcStageClient, StageClient
from stagemesh.rpc.channels import open_channel
from stagemesh.rpc.error_mapping import from_rpc_error
from stagemesh.v1 import stage_pb2, stage_pb2_grpc

_LOAD_INTERVAL_S = 0.5
_IDLE_INTERVAL_S = 30.0
_DIAL_S = 1.0


class Connection(Protocol):
    """What is asked at an address, whatever process serves there. Errors are those of `stagemesh.common.errors`."""

    @property
    def client(self) -> StageClient:
        """For requests."""
        ...

    async def describe(self, *, timeout_s: float) -> stage_pb2.DescribeResponse:
        """What the replica says that it is."""
        ...

    async def wait_while_serving(self) -> None:
        """Returns when the replica says that it no longer takes steps; raises when it is out of reach."""

    def loads(self) -> AsyncGenerator[stage_pb2.WatchLoadResponse]:
        """Its load, now and again; iterate within `aclosing`."""
        ...

    async def nobody_listens(self) -> bool:
        """Whether a process is surely not there, unlike one that merely cannot be reached."""
        ...

    async def close(self) -> None:
        """Ends the connection and all calls over it. Closing twice is harmless."""


class GrpcConnection:
    """See Connection."""

    def __init__(self, stage: str, *, name: str, endpoint: str) -> None:
        self._channel = open_channel(endpoint)
        self._endpoint = endpoint
        self._peer = f"replica {name} at {endpoint}"
        self._client = GrpcStageClient(self._channel, stage=stage, replica=name, endpoint=endpoint)
        self._stub = stage_pb2_grpc.StageServiceStub(self._channel)
        self._health = health_pb2_grpc.HealthStub(self._channel)

    @property
    def client(self) -> StageClient:
        """See Connection."""
        return self._client

    async def describe(self, *, timeout_s: float) -> stage_pb2.DescribeResponse:
        """See Connection."""
        return await self._client.describe(timeout_s=timeout_s)

    async def wait_while_serving(self) -> None:
        """See Connection."""
        call = _watch_health(self._health)
        try:
            async for answer in call:
                if answer.status != health_pb2.HealthCheckResponse.SERVING:
                    return
        except grpc.aio.AioRpcError as exc:
            raise from_rpc_error(exc, peer=self._peer) from exc
        finally:
            call.cancel()

    async def loads(self) -> AsyncGenerator[stage_pb2.WatchLoadResponse]:
        """See Connection."""
        request = stage_pb2.WatchLoadRequest(interval_s=_LOAD_INTERVAL_S, idle_interval_s=_IDLE_INTERVAL_S)
        call = self._stub.WatchLoad(request)
        try:
            async for report in call:
                yield report
        except grpc.aio.AioRpcError as exc:
            raise from_rpc_error(exc, peer=self._peer) from exc
        finally:
            call.cancel()

    async def nobody_listens(self) -> bool:
        """See Connection."""
        host, _, port = self._endpoint.rpartition(":")
        try:
            async with asyncio.timeout(_DIAL_S):
                _, writer = await asyncio.open_connection(host.strip("[]"), int(port))
        except ConnectionRefusedError:
            return True
        except (OSError, TimeoutError, ValueError):
            return False
        writer.close()
        return False

    async def close(self) -> None:
        """See Connection."""
        await self._client.close()
        await self._channel.close()


class _HealthWatch(Protocol):
    def __aiter__(self) -> AsyncIterator[health_pb2.HealthCheckResponse]: ...

    def cancel(self) -> bool: ...


def _watch_health(health: health_pb2_grpc.HealthStub) -> _HealthWatch:
    # The published annotations know Check alone.
    watch = cast("Callable[[health_pb2.HealthCheckRequest], _HealthWatch]", vars(health)["Watch"])
    return watch(health_pb2.HealthCheckRequest())
