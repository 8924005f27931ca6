"""The serving end of ExecuteSteps: the calls that one caller has of many steps, over one stream."""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import aclosing
from typing import Protocol

from google.protobuf.message import DecodeError

from stagemesh.connectors.channels import MAX_MESSAGE_BYTES
from stagemesh.connectors.errors import InvalidRequestError, UnsupportedError
from stagemesh.connectors.lanes import ServedLane
from stagemesh.connectors.wire import error_to_wire
from stagemesh.services.serving.answering import checked_time_left_s, to_error
from stagemesh.services.serving.logs import bind_log_context
from stagemesh.v1 import stage_pb2

_MESSAGE_BYTES = 256 << 10
# The message around what a call says takes some bytes as well.
_LARGEST_BYTES = MAX_MESSAGE_BYTES - 1024
# A caller that does not read holds up its calls from here on; what they have made by then is in the steps' journals.
_WAITING_BYTES = 1 << 20


class Execute(Protocol):
    """Runs a step, as ExecuteStep does."""

    def __call__(
        self, request: stage_pb2.ExecuteStepRequest, *, time_left_s: float | None
    ) -> AsyncGenerator[stage_pb2.ExecuteStepResponse]:
        """Its events; closing them hangs up."""
        ...


class StepSession:
    """Implements `LaneUser`. One message carries what all calls have to say within one turn of the event loop."""

    def __init__(self, execute: Execute, *, closing: asyncio.Event, where: Mapping[str, str]) -> None:
        """`closing` has the stream end with its last call; errors say `where` they come from."""
        self._execute, self._closing, self._where = execute, closing, where
        self._loop = asyncio.get_running_loop()
        self._lane = ServedLane(self)
        self._calls: dict[int, asyncio.Task[None]] = {}
        self._waiting: deque[stage_pb2.StepMessage] = deque()
        self._waiting_bytes = 0
        self._room = asyncio.Event()
        self._pump_is_due = False

    async def serve(self, requests: AsyncIterator[bytes]) -> AsyncGenerator[bytes]:
        """The messages for the caller, until it or the replica ends the stream; raises what it did wrong."""
        ending = asyncio.create_task(self._end_in_order())
        try:
            async with aclosing(self._lane.serve(requests)) as messages:
                async for message in messages:
                    yield message
        finally:
            tasks = [ending, *self._calls.values()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    # -- for the lane

    def received(self, data: bytes) -> None:
        """See `LaneUser`."""
        try:
            request = stage_pb2.ExecuteStepsRequest.FromString(data)
        except DecodeError as exc:
            raise InvalidRequestError("what came is no ExecuteStepsRequest") from exc
        number = request.call
        running = self._calls.get(number)
        if not request.HasField("step"):
            if running is not None:
                running.cancel()
            return
        if running is not None:
            raise InvalidRequestError(f"call {number} runs already; give each call of a stream a number of its own")
        self._calls[number] = task = self._loop.create_task(self._run(request), name=request.step.step_id)
        task.add_done_callback(lambda _: self._calls.pop(number))

    def writable(self) -> None:
        """See `LaneUser`."""
        self._pump()

    def closed(self, error: object) -> None:
        """See `LaneUser`: `serve` ends, and the calls with it."""

    # -- inner workings

    async def _run(self, request: stage_pb2.ExecuteStepsRequest) -> None:
        where = {**self._where, "request_id": request.step.request_id}
        bind_log_context(**where)
        ended = stage_pb2.StepEnded()
        try:
            time_left_s = checked_time_left_s(request.timeout_s if request.HasField("timeout_s") else None)
            async with aclosing(self._execute(request.step, time_left_s=time_left_s)) as events:
                async for event in events:
                    while self._waiting_bytes >= _WAITING_BYTES:
                        self._room.clear()
                        await self._room.wait()
                    message = stage_pb2.StepMessage(call=request.call, event=event)
                    _check_size(message)
                    self._say(message)
        except Exception as exc:  # noqa: BLE001
            ended.error.CopyFrom(error_to_wire(to_error(exc, where)))
        self._say(stage_pb2.StepMessage(call=request.call, ended=ended))

    async def _end_in_order(self) -> None:
        await self._closing.wait()
        while self._calls:
            await asyncio.wait(self._calls.values())
        while self._waiting:
            self._lane.write(self._next_message())
        self._lane.close()

    def _say(self, message: stage_pb2.StepMessage) -> None:
        self._waiting.append(message)
        self._waiting_bytes += message.ByteSize()
        if not self._pump_is_due:
            self._pump_is_due = True
            self._loop.call_soon(self._pump)

    def _pump(self) -> None:
        self._pump_is_due = False
        while self._waiting and self._lane.is_writable:
            self._lane.write(self._next_message())

    def _next_message(self) -> bytes:
        response = stage_pb2.ExecuteStepsResponse()
        left_bytes = _MESSAGE_BYTES
        while self._waiting and (not response.messages or self._waiting[0].ByteSize() <= left_bytes):
            message = self._waiting.popleft()
            size_bytes = message.ByteSize()
            left_bytes -= size_bytes
            self._waiting_bytes -= size_bytes
            response.messages.append(message)
        self._room.set()
        return response.SerializeToString()


def _check_size(message: stage_pb2.StepMessage) -> None:
    """Ends the one call whose message nobody would take; the stream is that of others, too."""
    if message.ByteSize() > _LARGEST_BYTES:
        what = message.event.WhichOneof("event")
        raise UnsupportedError(
            f"the step's {what} is {message.ByteSize()} bytes; a caller can be sent {_LARGEST_BYTES}: ask for another "
            "output, or for a smaller one",
            reason="OUTPUT_TOO_LARGE",
        )
