"""Calls from the orchestrator to one replica of a stage."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Generator
from contextlib import contextmanager
from copy import copy
from typing import Any, Protocol, TypeAlias, cast

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from stagemesh.common.connector_descriptors import ConnectorName, number_of
from stagemesh.common.errors import StagemeshError, UnavailableError
from stagemesh.connectors.stream.wire import EdgeProbe, probe_from_wire
from stagemesh.orchestrator.fleet.step_stream import StepStream, TakeEvent
from stagemesh.rpc.error_mapping import from_rpc_error
from stagemesh.v1 import control_pb2, stage_pb2, stage_pb2_grpc

REPLICA_LOST = "REPLICA_LOST"
CONTROL_NAME = control_pb2.DESCRIPTOR.services_by_name["StageControlService"].full_name
_LOAD_INTERVAL_S = 0.5
_IDLE_INTERVAL_S = 30.0
_DIAL_S = 1.0

# The codes that gRPC itself reports if the replica or the connection fails. Errors of a service have a reason.
_BROKEN = frozenset(
    {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED, grpc.StatusCode.UNKNOWN, grpc.StatusCode.INTERNAL}
)
_BROKEN_CODES = frozenset(code.value[0] for code in _BROKEN)

_UnaryBytes: TypeAlias = Callable[..., Awaitable[bytes]]


class ReplicaClient(Protocol):
    """The calls to the replica at one address. They raise the errors of `stagemesh.common.errors`."""

    def execute(self, request: stage_pb2.ExecuteStepRequest, *, timeout_s: float, take: TakeEvent) -> Awaitable[None]:
        """Executes a step until it ends, and calls `take` with each event.

        If `take` raises an error, ends the call and raises it.

        Cancelling this call cancels the step. Raises UnavailableError (REPLICA_LOST) if the replica terminates or
        becomes unreachable.
        """
        ...

    async def cancel(self, request: stage_pb2.CancelStepRequest, *, timeout_s: float) -> None:
        """Cancels a request's steps on the replica. Returns after the engine has released them."""

    async def rebind(self, request: stage_pb2.RebindStepRequest, *, timeout_s: float) -> None:
        """Replaces the upstream or downstream replicas on some edges of a running step.

        Raises NotFoundError (UNKNOWN_STEP) if the step is not running on the replica. Raises NotReadyError (CHUNK_GONE)
        if the replica no longer retains the first chunks of an outgoing edge.
        """

    async def probe_edge(
        self, edge: str, *, consumer: str, endpoint: str, connector: ConnectorName, timeout_s: float
    ) -> EdgeProbe:
        """Returns the connector that the replica would use to send data to `consumer`.

        Raises the reason as an error if no connector works.
        """
        ...

    async def describe(self, *, timeout_s: float) -> stage_pb2.DescribeResponse:
        """Returns the replica's state, identity and location."""
        ...

    def watch_load(self) -> AsyncGenerator[stage_pb2.WatchLoadResponse]:
        """Yields load reports of the replica periodically, less often if the replica is idle.

        Iterate within `aclosing`.
        """
        ...

    async def wait_while_serving(self) -> None:
        """Waits until the replica reports that it no longer accepts steps.

        Raises a StagemeshError if the replica becomes unreachable.
        """

    async def is_port_closed(self) -> bool:
        """Returns True if certainly no process listens at the address, and False otherwise."""
        ...

    async def control(self, method: str, request: bytes, *, timeout_s: float) -> bytes:
        """Calls the named method of StageControlService. The request and the response are serialized messages."""
        ...

    async def close(self) -> None:
        """Closes the connection, which ends all calls. Idempotent."""


class GrpcReplicaClient:
    """Calls a replica over a gRPC channel. Closes the channel in `close`."""

    def __init__(self, channel: grpc.aio.Channel, *, stage: str, replica: str, endpoint: str) -> None:
        self._channel, self._endpoint = channel, endpoint
        self._stub = stage_pb2_grpc.StageServiceStub(channel)
        self._health = health_pb2_grpc.HealthStub(channel)
        self._location = {"stage": stage, "replica": replica}
        self._peer = f"stage {stage!r} (replica {replica} at {endpoint})"
        self._steps: StepStream | None = None

    def execute(self, request: stage_pb2.ExecuteStepRequest, *, timeout_s: float, take: TakeEvent) -> Awaitable[None]:
        if self._steps is None or self._steps.is_closed:
            with self._mapping_errors():
                self._steps = StepStream(
                    self._channel, peer=self._peer, location=self._location, to_error=self._stream_error
                )
        return self._steps.execute(request, timeout_s=timeout_s, take=take)

    async def cancel(self, request: stage_pb2.CancelStepRequest, *, timeout_s: float) -> None:
        with self._mapping_errors():
            await self._stub.CancelStep(request, timeout=timeout_s)

    async def rebind(self, request: stage_pb2.RebindStepRequest, *, timeout_s: float) -> None:
        with self._mapping_errors():
            await self._stub.RebindStep(request, timeout=timeout_s)

    async def probe_edge(
        self, edge: str, *, consumer: str, endpoint: str, connector: ConnectorName, timeout_s: float
    ) -> EdgeProbe:
        request = stage_pb2.ProbeEdgeRequest(
            edge=edge, consumer=consumer, endpoint=endpoint, connector=number_of(connector)
        )
        with self._mapping_errors():
            return probe_from_wire(await self._stub.ProbeEdge(request, timeout=timeout_s))

    async def describe(self, *, timeout_s: float) -> stage_pb2.DescribeResponse:
        with self._mapping_errors():
            return await self._stub.Describe(stage_pb2.DescribeRequest(), timeout=timeout_s)

    async def watch_load(self) -> AsyncGenerator[stage_pb2.WatchLoadResponse]:
        request = stage_pb2.WatchLoadRequest(interval_s=_LOAD_INTERVAL_S, idle_interval_s=_IDLE_INTERVAL_S)
        with self._mapping_errors():
            call = self._stub.WatchLoad(request)
        try:
            async for report in call:
                yield report
        except grpc.aio.AioRpcError as exc:
            raise from_rpc_error(exc, peer=self._peer) from exc
        finally:
            call.cancel()

    async def wait_while_serving(self) -> None:
        call = _watch_health(self._health)
        try:
            async for answer in call:
                if answer.status != health_pb2.HealthCheckResponse.SERVING:
                    return
        except grpc.aio.AioRpcError as exc:
            raise from_rpc_error(exc, peer=self._peer) from exc
        finally:
            call.cancel()

    async def is_port_closed(self) -> bool:
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

    async def control(self, method: str, request: bytes, *, timeout_s: float) -> bytes:
        call = cast("_UnaryBytes", cast("Any", self._channel).unary_unary(f"/{CONTROL_NAME}/{method}"))
        with self._mapping_errors():
            return await call(request, timeout=timeout_s)

    async def close(self) -> None:
        if self._steps is not None:
            await self._steps.close()
        await self._channel.close()

    @contextmanager
    def _mapping_errors(self) -> Generator[None]:
        """Converts errors of gRPC calls to StagemeshErrors, also if the channel is closed before or during the call."""
        try:
            yield
        except grpc.aio.AioRpcError as exc:
            raise self._call_error(exc) from exc
        except grpc.aio.UsageError as exc:
            raise self._lost(f"is no longer connected ({exc})") from exc
        except asyncio.CancelledError as exc:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            raise self._lost("is no longer connected (its channel was closed)") from exc

    def _call_error(self, exc: grpc.aio.AioRpcError) -> StagemeshError:
        error = from_rpc_error(exc, peer=self._peer).located(**self._location)
        # An error that gRPC reports contains the name of this client's peer. An error that the stage forwards does not.
        if error.metadata.get("peer") != self._peer or exc.code() not in _BROKEN:
            return error
        return self._lost(f"cannot be reached ({exc.details()})")

    def _stream_error(self, error: StagemeshError | None, *, running: bool) -> StagemeshError:
        """Returns the error of a step after its stream has ended with `error`.

        - `error` is None if the orchestrator closed the stream.
        - `running` is True if the step had received an event.
        """
        if error is None:
            return self._lost("is no longer connected (its channel was closed)")
        if error.code not in _BROKEN_CODES:
            return copy(error).located(**self._location)
        return self._lost(
            f"{'became unreachable while the request ran' if running else 'cannot be reached'} ({error.message})"
        )

    def _lost(self, event: str) -> UnavailableError:
        return UnavailableError(
            f"{self._peer} {event}; a supervised replica is restarted: try again",
            reason=REPLICA_LOST,
            metadata=self._location,
            retry_after_s=1.0,
        )


class _HealthWatch(Protocol):
    def __aiter__(self) -> AsyncIterator[health_pb2.HealthCheckResponse]: ...

    def cancel(self) -> bool: ...


def _watch_health(health: health_pb2_grpc.HealthStub) -> _HealthWatch:
    # The published annotations declare only Check.
    watch = cast("Callable[[health_pb2.HealthCheckRequest], _HealthWatch]", vars(health)["Watch"])
    return watch(health_pb2.HealthCheckRequest())
