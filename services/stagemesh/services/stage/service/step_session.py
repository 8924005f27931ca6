"""The serving end of ExecuteSteps: the calls that one caller has of many steps, over one stream."""

import asyncio
import logging
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import aclosing
from typing import Protocol

from google.protobuf.message import DecodeError

from stagemesh.common.errors import DeadlineError, InternalError, InvalidRequestError, UnsupportedError
from stagemesh.common.logs import bind_log_context
from stagemesh.connectors.stream.wire import error_to_wire
from stagemesh.rpc.channels import MAX_MESSAGE_BYTES
from stagemesh.rpc.handlers import checked_time_left_s, to_error
from stagemesh.rpc.message_streams import ServerStream
from stagemesh.v1 import chunk_pb2, stage_pb2

_log = logging.getLogger(__name__)

_MESSAGE_BYTES = 256 << 10
# A caller that does not read holds up its calls from here on; what they have made by then is in the steps' journals.
_WAITING_BYTES = 1 << 20
# How long a caller has to read all that was said, and to end the stream; less than a process gives what it serves.
_READ_S = 0.5


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
        """`closing` has the stream end after its last call; errors say `where` they come from."""
        self._execute, self._closing, self._where = execute, closing, where
        self._loop = asyncio.get_running_loop()
        self._lane = ServerStream(self)
        self._calls: dict[int, asyncio.Task[None]] = {}
        self._waiting: deque[bytes] = deque()
        """Serialized responses, each of one message. One behind the other they are one response of all these."""
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
                    # It may be large, and the next one far away.
                    del message
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
        error: chunk_pb2.Error | None = None
        try:
            await self._follow(request)
        except Exception as exc:  # noqa: BLE001
            error = _error_of(exc, where)
        self._say(_serialized(stage_pb2.StepMessage(call=request.call, ended=stage_pb2.StepEnded(error=error))))

    async def _follow(self, request: stage_pb2.ExecuteStepsRequest) -> None:
        time_left_s = checked_time_left_s(request.timeout_s if request.HasField("timeout_s") else None)
        try:
            async with (
                asyncio.timeout(time_left_s),
                aclosing(self._execute(request.step, time_left_s=time_left_s)) as events,
            ):
                async for event in events:
                    while self._waiting_bytes >= _WAITING_BYTES:
                        self._room.clear()
                        await self._room.wait()
                    response = _serialized(stage_pb2.StepMessage(call=request.call, event=event))
                    _check_size(response, event)
                    self._say(response)
        except TimeoutError as exc:
            raise DeadlineError(f"the call took longer than its {time_left_s:g} s; allow more time") from exc

    async def _end_in_order(self) -> None:
        await self._closing.wait()
        while self._calls:
            await asyncio.wait(self._calls.values())
        while self._waiting:
            self._lane.write(self._next_message())
        self._lane.write(stage_pb2.ExecuteStepsResponse(closing=True).SerializeToString())
        # The stream is over before, once the caller has ended it.
        await asyncio.sleep(_READ_S)
        self._lane.close()

    def _say(self, response: bytes) -> None:
        self._waiting.append(response)
        self._waiting_bytes += len(response)
        if not self._pump_is_due:
            self._pump_is_due = True
            self._loop.call_soon(self._pump)

    def _pump(self) -> None:
        self._pump_is_due = False
        while self._waiting and self._lane.is_writable:
            self._lane.write(self._next_message())

    def _next_message(self) -> bytes:
        """As much of what waits as goes in one message, at least one response."""
        size_bytes, responses = 0, list[bytes]()
        while self._waiting and (not responses or size_bytes + len(self._waiting[0]) <= _MESSAGE_BYTES):
            responses.append(self._waiting.popleft())
            size_bytes += len(responses[-1])
        self._waiting_bytes -= size_bytes
        self._room.set()
        return b"".join(responses)


def _serialized(message: stage_pb2.StepMessage) -> bytes:
    return stage_pb2.ExecuteStepsResponse(messages=[message]).SerializeToString()


def _error_of(exc: Exception, where: Mapping[str, str]) -> chunk_pb2.Error:
    try:
        return error_to_wire(to_error(exc, where))
    except Exception:  # noqa: BLE001
        # A caller that hears nothing waits.
        _log.exception("what a call failed with cannot be told")
        unspeakable = InternalError(
            "the call failed with what cannot be told; the service's log has it", metadata=where
        )
        return error_to_wire(unspeakable)


def _check_size(response: bytes, event: stage_pb2.ExecuteStepResponse) -> None:
    """Ends the one call whose message nobody would take; the stream is that of others, too."""
    if len(response) > MAX_MESSAGE_BYTES:
        raise UnsupportedError(
            f"the step's {event.WhichOneof('event')} takes {len(response)} bytes, and {MAX_MESSAGE_BYTES} can be sent; "
            "ask for another output, or for a smaller one",
            reason="OUTPUT_TOO_LARGE",
        )
