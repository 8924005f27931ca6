"""The calling end of ExecuteSteps: what all requests have to do with one replica, over one stream."""

import asyncio
import itertools
from collections import deque
from collections.abc import AsyncGenerator, Callable, Mapping

import grpc
from google.protobuf.message import DecodeError

from stagemesh.connectors.errors import InternalError, StagemeshError
from stagemesh.connectors.lanes import GrpcLane
from stagemesh.connectors.wire import error_from_wire
from stagemesh.v1 import stage_pb2

_METHOD = f"/{stage_pb2.DESCRIPTOR.services_by_name['StageService'].full_name}/ExecuteSteps"


class StepStream:
    """Implements `LaneUser`. Made within a running event loop; one that `is_over` takes no more calls."""

    def __init__(
        self,
        channel: grpc.aio.Channel,
        *,
        peer: str,
        where: Mapping[str, str],
        broken: Callable[[StagemeshError | None, bool], StagemeshError],
    ) -> None:
        """Errors say `where` they come from. `broken` makes that of a call under which the stream ended, of why, and of
        whether anything had been heard of it.
        """
        self.is_over = False
        self._peer, self._where, self._broken = peer, where, broken
        self._calls: dict[int, _Call] = {}
        self._numbers = itertools.count(1)
        self._waiting: deque[stage_pb2.ExecuteStepsRequest] = deque()
        self._lane = GrpcLane(channel, self, peer=peer, method=_METHOD)
        self._running = asyncio.create_task(self._lane.run(), name=f"steps at {peer}")

    async def execute(
        self, request: stage_pb2.ExecuteStepRequest, *, timeout_s: float
    ) -> AsyncGenerator[stage_pb2.ExecuteStepResponse]:
        """A step's events; closing them hangs up. Raises what it failed with."""
        number = next(self._numbers)
        call = self._calls[number] = _Call()
        self._send(stage_pb2.ExecuteStepsRequest(call=number, step=request, timeout_s=timeout_s))
        heard = False
        try:
            while (message := await call.next()) is not None:
                if message.HasField("ended"):
                    call.is_over = True
                    if message.ended.HasField("error"):
                        raise error_from_wire(message.ended.error).located(**self._where)
                    return
                heard = True
                yield _own(message.event)
            raise self._broken(call.error, heard)
        finally:
            del self._calls[number]
            if not call.is_over:
                self._send(stage_pb2.ExecuteStepsRequest(call=number))

    async def close(self) -> None:
        """Ends the stream, and the calls with it. Closing twice is harmless."""
        self._lane.close()
        await asyncio.wait([self._running])

    # -- for the lane

    def received(self, data: bytes) -> None:
        """See `LaneUser`."""
        try:
            response = stage_pb2.ExecuteStepsResponse.FromString(data)
        except DecodeError as exc:
            raise InternalError(f"{self._peer} sent what is no ExecuteStepsResponse") from exc
        for message in response.messages:
            call = self._calls.get(message.call)
            if call is not None:
                call.take(message)

    def writable(self) -> None:
        """See `LaneUser`."""
        while self._waiting and self._lane.is_writable:
            self._lane.write(self._waiting.popleft().SerializeToString())

    def closed(self, error: StagemeshError | None) -> None:
        """See `LaneUser`."""
        self.is_over = True
        self._waiting.clear()
        for call in self._calls.values():
            call.end(error)

    def _send(self, request: stage_pb2.ExecuteStepsRequest) -> None:
        if not self.is_over:
            self._waiting.append(request)
            self.writable()


class _Call:
    """What has come for one call and is not taken yet."""

    def __init__(self) -> None:
        self.is_over = False
        self.error: StagemeshError | None = None
        """What ended the stream under it."""
        self._messages: deque[stage_pb2.StepMessage] = deque()
        self._more: asyncio.Future[None] | None = None

    def take(self, message: stage_pb2.StepMessage) -> None:
        self._messages.append(message)
        self._wake()

    def end(self, error: StagemeshError | None) -> None:
        self.is_over, self.error = True, error
        self._wake()

    async def next(self) -> stage_pb2.StepMessage | None:
        """What comes next; None where the stream ended before."""
        while not self._messages:
            if self.is_over:
                return None
            self._more = asyncio.get_running_loop().create_future()
            await self._more
        return self._messages.popleft()

    def _wake(self) -> None:
        if self._more is not None and not self._more.done():
            self._more.set_result(None)


def _own(event: stage_pb2.ExecuteStepResponse) -> stage_pb2.ExecuteStepResponse:
    """An event that may be kept: a part of a message holds on to all of it. Outputs are not kept."""
    if event.HasField("output"):
        return event
    own = stage_pb2.ExecuteStepResponse()
    own.CopyFrom(event)
    return own
