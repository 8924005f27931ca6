"""The gRPC service StageService. Converts messages and calls `StageRuntime`."""

import asyncio
import contextlib
import math
from collections.abc import AsyncGenerator, AsyncIterator
from typing import TYPE_CHECKING, Any, TypeAlias

from stagemesh.common.connector_descriptors import name_of
from stagemesh.common.errors import InvalidRequestError
from stagemesh.connectors.stream.wire import key_from_wire, probe_to_wire
from stagemesh.rpc.handlers import answering, streaming, time_left_s
from stagemesh.services.stage.replica.runtime import StageRuntime
from stagemesh.services.stage.service.conversion import (
    description_to_wire,
    event_to_wire,
    load_to_wire,
    rebinding_from_wire,
    spec_from_wire,
)
from stagemesh.services.stage.service.step_session import StepSession
from stagemesh.services.stage.step.spec import STATE_EDGE
from stagemesh.v1 import stage_pb2, stage_pb2_grpc

if TYPE_CHECKING:
    import grpc

_Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"

SERVICE_NAME = stage_pb2.DESCRIPTOR.services_by_name["StageService"].full_name
_DEFAULT_INTERVAL_S, _MIN_INTERVAL_S = 1.0, 0.05


class StageServicer(stage_pb2_grpc.StageServiceServicer):
    """The servicer of StageService for one replica."""

    def __init__(self, runtime: StageRuntime) -> None:
        self._runtime = runtime
        self._where = {"stage": runtime.config.stage, "replica": runtime.config.replica}

    @streaming
    async def ExecuteStep(
        self, request: stage_pb2.ExecuteStepRequest, context: _Context
    ) -> AsyncIterator[stage_pb2.ExecuteStepResponse]:
        async with (
            answering(context, **self._where, request_id=request.request_id),
            contextlib.aclosing(self._execute(request, time_left_s=time_left_s(context))) as events,
        ):
            async for event in events:
                yield event

    @streaming
    async def ExecuteSteps(  # type: ignore[override]
        self, request_iterator: AsyncIterator[bytes], context: _Context
    ) -> AsyncIterator[bytes]:
        """Messages are serialized bytes, because `add_stage_service` registers this method without protobuf codecs."""
        async with answering(context, **self._where):
            session = StepSession(self._execute, closing=self._runtime.closed, where=self._where)
            async with contextlib.aclosing(session.serve(request_iterator)) as messages:
                async for message in messages:
                    yield message
                    del message

    async def RebindStep(self, request: stage_pb2.RebindStepRequest, context: _Context) -> stage_pb2.RebindStepResponse:
        async with answering(context, **self._where, request_id=request.request_id):
            self._runtime.rebind(rebinding_from_wire(request))
            return stage_pb2.RebindStepResponse()

    @streaming
    async def PutChunk(  # type: ignore[override]
        self, request_iterator: AsyncIterator[bytes], context: _Context
    ) -> AsyncIterator[bytes]:
        """Messages are serialized bytes, because `add_stage_service` registers this method without protobuf codecs."""
        async with answering(context, **self._where):
            replies = self._runtime.data_plane.serve_put(request_iterator)
            async with contextlib.aclosing(replies):
                async for reply in replies:
                    yield reply

    @streaming
    async def GetChunk(
        self, request: stage_pb2.GetChunkRequest, context: _Context
    ) -> AsyncIterator[stage_pb2.GetChunkResponse]:
        async with answering(context, **self._where, request_id=request.key.request_id):
            key = key_from_wire(request.key)
            if key.edge == STATE_EDGE:
                parts = self._runtime.states.read(key)
            else:
                parts = self._runtime.data_plane.replay(key, first_seq=request.first_seq)
            async with contextlib.aclosing(parts):
                async for part in parts:
                    yield part

    async def Describe(self, request: stage_pb2.DescribeRequest, context: _Context) -> stage_pb2.DescribeResponse:
        runtime = self._runtime
        async with answering(context, **self._where):
            return description_to_wire(
                runtime.config,
                runtime.signature,
                state=runtime.state,
                detail=runtime.detail,
                incarnation=runtime.data_plane.incarnation,
            )

    @streaming
    async def WatchLoad(
        self, request: stage_pb2.WatchLoadRequest, context: _Context
    ) -> AsyncIterator[stage_pb2.WatchLoadResponse]:
        async with answering(context, **self._where):
            timer = _ReportTimer(request)
            while not self._runtime.closed.is_set():
                load = self._runtime.load()
                if timer.is_due(busy=bool(load.running or load.queued)):
                    yield load_to_wire(load)
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._runtime.closed.wait(), timer.interval_s)

    async def CancelStep(self, request: stage_pb2.CancelStepRequest, context: _Context) -> stage_pb2.CancelStepResponse:
        async with answering(context, **self._where, request_id=request.request_id):
            stopped = await self._runtime.cancel(request.request_id, attempt=request.attempt, reason=request.reason)
            return stage_pb2.CancelStepResponse(stopped=stopped)

    async def ProbeEdge(self, request: stage_pb2.ProbeEdgeRequest, context: _Context) -> stage_pb2.ProbeEdgeResponse:
        async with answering(context, **self._where, edge=request.edge):
            found = await self._runtime.data_plane.probe(
                consumer=request.consumer, endpoint=request.endpoint, connector=name_of(request.connector)
            )
            return probe_to_wire(found)

    async def _execute(
        self, request: stage_pb2.ExecuteStepRequest, *, time_left_s: float | None
    ) -> AsyncGenerator[stage_pb2.ExecuteStepResponse]:
        events = self._runtime.execute(spec_from_wire(request), time_left_s=time_left_s)
        async with contextlib.aclosing(events):
            async for event in events:
                yield event_to_wire(event)


class _ReportTimer:
    """Decides when WatchLoad reports: at each interval while the replica is busy, less often while it is idle."""

    def __init__(self, request: stage_pb2.WatchLoadRequest) -> None:
        self.interval_s = request.interval_s or _DEFAULT_INTERVAL_S
        if not self.interval_s >= _MIN_INTERVAL_S:
            raise InvalidRequestError(
                f"interval_s is {self.interval_s:g}; it must be at least {_MIN_INTERVAL_S:g}, or 0 for 1"
            )
        ratio = request.idle_interval_s / self.interval_s
        if not math.isfinite(ratio):
            raise InvalidRequestError(
                f"idle_interval_s is {request.idle_interval_s:g}; it must be a number of seconds, or 0 for interval_s"
            )
        self._idle_intervals = max(1, round(ratio))
        """The number of intervals between two reports while the replica is idle."""
        self._intervals = self._idle_intervals
        self._was_busy = False

    def is_due(self, *, busy: bool) -> bool:
        """Returns whether WatchLoad reports after this interval. Always reports a change from busy to idle."""
        self._intervals += 1
        due = busy or self._was_busy or self._intervals >= self._idle_intervals
        self._was_busy = busy
        if due:
            self._intervals = 0
        return due
