"""How the orchestrator talks to one replica of a stage."""

import asyncio
from collections.abc import Awaitable, Callable, Generator
from contextlib import contextmanager
from copy import copy
from typing import Any, Protocol, TypeAlias, cast

import grpc

from stagemesh.common.errors import StagemeshError, UnavailableError
from stagemesh.connectors.edge import ConnectorName
from stagemesh.connectors.registry import number_of
from stagemesh.connectors.stream.negotiation import EdgeProbe, probe_from_wire
from stagemesh.orchestrator.fleet.step_stream import StepStream, TakeEvent
from stagemesh.rpc.statuses import from_rpc_error
from stagemesh.v1 import control_pb2, stage_pb2, stage_pb2_grpc

# What gRPC itself reports where the peer or the way to it broke; a service's own errors carry a reason.
_BROKEN = frozenset(
    {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED, grpc.StatusCode.UNKNOWN, grpc.StatusCode.INTERNAL}
)

_BROKEN_CODES = frozenset(code.value[0] for code in _BROKEN)

_Bytewise: TypeAlias = Callable[..., Awaitable[bytes]]

REPLICA_LOST = "REPLICA_LOST"
CONTROL_NAME = control_pb2.DESCRIPTOR.services_by_name["StageControlService"].full_name


class StageClient(Protocol):
    """A replica as a request sees it. Errors are those of `stagemesh.common.errors`."""

    def execute(self, request: stage_pb2.ExecuteStepRequest, *, timeout_s: float, take: TakeEvent) -> Awaitable[None]:
        """Runs a step to its end; cancelling it hangs up, which cancels the step. `take` is called with each event as
        it comes, and what it raises ends the call. UnavailableError (REPLICA_LOST) when the replica goes away.
        """
        ...

    async def cancel(self, request: stage_pb2.CancelStepRequest, *, timeout_s: float) -> None:
        """Stops a request's steps and returns once the engine has let go."""

    async def rebind(self, request: stage_pb2.RebindStepRequest, *, timeout_s: float) -> None:
        """Has a step go on with others at the far end of some edges. NotFoundError (UNKNOWN_STEP) where it does not run
        there, NotReadyError (CHUNK_GONE) where the first chunks of an outgoing edge are kept no more.
        """

    async def probe_edge(
        self, edge: str, *, consumer: str, endpoint: str, connector: ConnectorName, timeout_s: float
    ) -> EdgeProbe:
        """By which connector the replica would feed another one; raises why it cannot."""
        ...

    async def describe(self, *, timeout_s: float) -> stage_pb2.DescribeResponse:
        """What the replica says that it is."""
        ...

    async def load(self, *, timeout_s: float) -> stage_pb2.WatchLoadResponse:
        """The replica's load now."""
        ...

    async def control(self, method: str, request: bytes, *, timeout_s: float) -> bytes:
        """A call of StageControlService, by the method's name, serialized as it comes and goes."""
        ...


class GrpcStageClient:
    """A replica behind a channel, which the caller owns."""

    def __init__(self, channel: grpc.aio.Channel, *, stage: str, replica: str, endpoint: str) -> None:
        self._channel = channel
        self._stub = stage_pb2_grpc.StageServiceStub(channel)
        self._where = {"stage": stage, "replica": replica}
        self._peer = f"stage {stage!r} (replica {replica} at {endpoint})"
        self._steps: StepStream | None = None

    def execute(self, request: stage_pb2.ExecuteStepRequest, *, timeout_s: float, take: TakeEvent) -> Awaitable[None]:
        """See StageClient."""
        if self._steps is None or self._steps.is_closed:
            with self._asking():
                self._steps = StepStream(self._channel, peer=self._peer, where=self._where, broken=self._broken)
        return self._steps.execute(request, timeout_s=timeout_s, take=take)

    async def close(self) -> None:
        """Hangs up all steps. Closing twice is harmless."""
        if self._steps is not None:
            await self._steps.close()

    async def cancel(self, request: stage_pb2.CancelStepRequest, *, timeout_s: float) -> None:
        """See StageClient."""
        with self._asking():
            await self._stub.CancelStep(request, timeout=timeout_s)

    async def rebind(self, request: stage_pb2.RebindStepRequest, *, timeout_s: float) -> None:
        """See StageClient."""
        try:
            await self._stub.RebindStep(request, timeout=timeout_s)
        except grpc.aio.AioRpcError as exc:
            raise self._translate(exc, running=False) from exc

    async def probe_edge(
        self, edge: str, *, consumer: str, endpoint: str, connector: ConnectorName, timeout_s: float
    ) -> EdgeProbe:
        """See StageClient."""
        request = stage_pb2.ProbeEdgeRequest(
            edge=edge, consumer=consumer, endpoint=endpoint, connector=number_of(connector)
        )
        with self._asking():
            return probe_from_wire(await self._stub.ProbeEdge(request, timeout=timeout_s))

    async def describe(self, *, timeout_s: float) -> stage_pb2.DescribeResponse:
        """See StageClient."""
        with self._asking():
            return await self._stub.Describe(stage_pb2.DescribeRequest(), timeout=timeout_s)

    async def load(self, *, timeout_s: float) -> stage_pb2.WatchLoadResponse:
        """See StageClient."""
        with self._asking():
            call = self._stub.WatchLoad(stage_pb2.WatchLoadRequest(), timeout=timeout_s)
            try:
                said = await anext(aiter(call), None)
            finally:
                call.cancel()
        if said is None:
            raise self._lost("says nothing of its load any more")
        return said

    async def control(self, method: str, request: bytes, *, timeout_s: float) -> bytes:
        """See StageClient."""
        # Messages come and go as they are.
        call = cast("_Bytewise", cast("Any", self._channel).unary_unary(f"/{CONTROL_NAME}/{method}"))
        with self._asking():
            return await call(request, timeout=timeout_s)

    @contextmanager
    def _asking(self) -> Generator[None]:
        """Maps what a call fails with; the owner may close the channel, before the call or under it."""
        try:
            yield
        except grpc.aio.AioRpcError as exc:
            raise self._translate(exc, running=False) from exc
        except grpc.aio.UsageError as exc:
            raise self._lost(f"is no longer there ({exc})") from exc
        except asyncio.CancelledError as exc:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            raise self._lost("is no longer there (its connection was closed)") from exc

    def _broken(self, error: StagemeshError | None, running: bool) -> StagemeshError:
        """What a step fails with whose stream ended."""
        if error is None:
            return self._lost("is no longer there (its connection was closed)")
        if error.code not in _BROKEN_CODES:
            return copy(error).located(**self._where)
        what = "went away while the request ran" if running else "cannot be reached"
        return self._lost(f"{what} ({error.message})")

    def _translate(self, exc: grpc.aio.AioRpcError, *, running: bool) -> StagemeshError:
        error = from_rpc_error(exc, peer=self._peer).located(**self._where)
        # Errors that gRPC made itself name the peer as we do; those that the stage passes on, as it does.
        if error.metadata.get("peer") != self._peer or exc.code() not in _BROKEN:
            return error
        what = "went away while the request ran" if running else "cannot be reached"
        return self._lost(f"{what} ({exc.details()})")

    def _lost(self, what: str) -> UnavailableError:
        return UnavailableError(
            f"{self._peer} {what}; it is restarted where it is supervised: try again",
            reason=REPLICA_LOST,
            metadata=self._where,
            retry_after_s=1.0,
        )
