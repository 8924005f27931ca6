"""The calling end of ExecuteSteps: what all requests have to do with one replica, over one stream."""

import asyncio
import itertools
from collections import deque
from collections.abc import Callable, Mapping
from contextvars import Context, copy_context
from typing import TypeAlias

import grpc
from google.protobuf.message import DecodeError

from stagemesh.common.errors import InternalError, InvalidRequestError, StagemeshError
from stagemesh.connectors.stream.wire import error_from_wire
from stagemesh.rpc.channels import MAX_MESSAGE_BYTES
from stagemesh.rpc.message_streams import ClientStream
from stagemesh.v1 import stage_pb2

TakeEvent: TypeAlias = Callable[[stage_pb2.ExecuteStepResponse], None]

_METHOD = f"/{stage_pb2.DESCRIPTOR.services_by_name['StageService'].full_name}/ExecuteSteps"


class StepStream:
    """Implements `LaneUser`. Made within a running event loop; one that `is_closed` is replaced by another."""

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
        self.is_closed = False
        """Whether the stream has ended."""
        self._is_over = False
        """Whether it takes no more calls: the replica has said that it is about to end it, or it has ended."""
        self._peer, self._where, self._broken = peer, where, broken
        self._calls: dict[int, _Call] = {}
        self._numbers = itertools.count(1)
        self._orders: dict[int, bytes] = {}
        """By call, those that wait to be sent; hang-ups go before them."""
        self._hung_up: deque[int] = deque()
        self._lane = ClientStream(channel, self, peer=f"replica {where['replica']}", method=_METHOD)
        # The stream is not that of the request which happens to be the first.
        self._running = asyncio.create_task(self._lane.run(), name=f"steps at {peer}", context=Context())

    async def execute(self, request: stage_pb2.ExecuteStepRequest, *, timeout_s: float, take: TakeEvent) -> None:
        """Runs a step to its end; cancelling it hangs up. Raises what it failed with, or what `take` raised."""
        if self._is_over:
            raise self._broken(None, False)
        number = next(self._numbers)
        order = stage_pb2.ExecuteStepsRequest(call=number, step=request, timeout_s=timeout_s).SerializeToString()
        if len(order) > MAX_MESSAGE_BYTES:
            raise self._too_large(len(order))
        call = self._calls[number] = _Call(take)
        self._orders[number] = order
        del request, order
        self.writable()
        try:
            await call.ended
            call.check()
        finally:
            del self._calls[number]
            if self._orders.pop(number, None) is None and not call.is_over:
                self._hung_up.append(number)
                self.writable()
            # What is raised holds this frame, and would hold itself.
            del call

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
            if call is None:
                continue
            if message.HasField("event"):
                call.take(message.event)
            elif message.ended.HasField("error"):
                call.end(error_from_wire(message.ended.error).located(**self._where))
            else:
                call.end(None)
        if response.closing:
            self._is_over = True
            self._lane.finish()

    def writable(self) -> None:
        """See `LaneUser`."""
        while not self._is_over and self._lane.is_writable:
            if self._hung_up:
                self._lane.write(stage_pb2.ExecuteStepsRequest(call=self._hung_up.popleft()).SerializeToString())
            elif self._orders:
                self._lane.write(self._orders.pop(next(iter(self._orders))))
            else:
                break

    def closed(self, error: StagemeshError | None) -> None:
        """See `LaneUser`."""
        self.is_closed = self._is_over = True
        self._orders.clear()
        self._hung_up.clear()
        for call in self._calls.values():
            call.end(self._broken(error, call.heard))

    def _too_large(self, size_bytes: int) -> InvalidRequestError:
        return InvalidRequestError(
            f"what {self._peer} is to be told of the request takes {size_bytes} bytes, and {MAX_MESSAGE_BYTES} can be "
            "sent; give a smaller input",
            reason="REQUEST_TOO_LARGE",
            metadata=self._where,
        )


class _Call:
    def __init__(self, take: TakeEvent) -> None:
        self.heard = self.is_over = False
        """Whether anything has come, and whether nothing more will."""
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._failure: Exception | None = None
        self._take, self._context = take, copy_context()

    def take(self, event: stage_pb2.ExecuteStepResponse) -> None:
        self.heard = True
        if self.ended.done():
            return
        try:
            self._context.run(self._take, _own(event))
        except Exception as exc:  # noqa: BLE001
            self._end(exc)

    def end(self, error: StagemeshError | None) -> None:
        self.is_over = True
        self._end(error)

    def check(self) -> None:
        """Raises what the call failed with, once."""
        failure, self._failure = self._failure, None
        try:
            if failure is not None:
                raise failure
        finally:
            del failure

    def _end(self, failure: Exception | None) -> None:
        if not self.ended.done():
            self._failure = failure
            self.ended.set_result(None)


def _own(event: stage_pb2.ExecuteStepResponse) -> stage_pb2.ExecuteStepResponse:
    """An event that may be kept: a part of a message holds on to all of it. Outputs are not kept."""
    if event.HasField("output"):
        return event
    own = stage_pb2.ExecuteStepResponse()
    own.CopyFrom(event)
    return own
