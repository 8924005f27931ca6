"""The stream over which the orchestrator executes steps at one replica. The steps of all requests share it."""

import asyncio
import itertools
from collections import deque
from collections.abc import Awaitable, Callable
from contextvars import Context, copy_context
from typing import TypeAlias

import grpc

from stagemesh.common.errors import Code, InternalError, StagemeshError, UnavailableError
from stagemesh.common.wire.versions import unknown_kind
from stagemesh.orchestrator.fleet.replica_loss import REPLICA_LOST, ReplicaErrors
from stagemesh.rpc.error_mapping import error_from_wire
from stagemesh.rpc.message_streams import ClientStream
from stagemesh.v1 import stage_pb2

_EXECUTE_STEPS = "/stagemesh.v1.StageService/ExecuteSteps"
_STATUS_S = 1.0
"""The time limit for the status of a stream without messages, in seconds."""
_IDLE_S = 5.0
"""The time in seconds after which a stream without steps ends, and with it the frequent pings."""

TakeEvent: TypeAlias = Callable[[stage_pb2.ExecuteStepResponse], None]
ExecuteAlone: TypeAlias = Callable[[stage_pb2.ExecuteStepRequest, float, TakeEvent], Awaitable[None]]
"""A function that executes one step. Its arguments are the request, the time limit in seconds, and `take`."""
_StreamBytes: TypeAlias = "grpc.aio.StreamStreamMultiCallable[bytes, bytes]"


class StepStream:
    """Executes steps over one ExecuteSteps stream. If `is_closed` is True, a new stream must be opened."""

    def __init__(self, channel: grpc.aio.Channel, errors: ReplicaErrors, *, execute_alone: ExecuteAlone) -> None:
        """Opens the stream. Requires a running event loop.

        `execute_alone` executes the steps if the replica does not serve the stream.
        """
        self.is_closed = False
        """Whether the stream has ended and can execute no further steps."""
        self.is_unserved = False
        """Whether each step must be its own call: the replica does not serve ExecuteSteps, or has sent a message that
        cannot be received. Such a message ends the stream of all steps, although only one of them is at fault.
        """
        self._is_doubtful = False
        """Whether the stream ended without an answer and without the status of the replica."""
        self._is_answered = False
        """Whether a message of the replica has arrived, so that the replica serves the stream."""
        self._channel, self._execute_alone = channel, execute_alone
        self._is_closing = False
        """Whether new calls are rejected, because the stream has ended or the replica is about to end the stream."""
        self._errors = errors
        self._idle_since_s = 0.0
        self._idle_timer: asyncio.TimerHandle | None = None
        """The timer that ends the stream after it has had no calls for a while. None while it has calls."""
        self._calls: dict[int, _Call] = {}
        self._numbers = itertools.count(1)
        self._unsent: dict[int, bytes] = {}
        """The serialized step requests that have not been sent yet, by call number. Cancellations are sent first."""
        self._cancelled: deque[int] = deque()
        self._stream = ClientStream(channel, self, peer=f"replica {errors.location['replica']}", method=_EXECUTE_STEPS)
        # The context is empty, because the stream does not belong to the request that happens to be the first.
        self._running = asyncio.create_task(self._stream.run(), name=f"steps at {errors.peer}", context=Context())

    async def execute(self, request: stage_pb2.ExecuteStepRequest, *, timeout_s: float, take: TakeEvent) -> None:
        """Executes a step until it ends, and calls `take` with each event. Cancelling this call cancels the step.

        Raises the error with which the step failed, or the error that `take` raised.
        """
        if self._is_closing:
            raise self._errors.after_stream(None, running=False)
        number = next(self._numbers)
        action = stage_pb2.ExecuteStepsRequest(call=number)
        # Assigning a message that contains the request would copy the request twice.
        action.start.step.CopyFrom(request)
        action.start.timeout_s = timeout_s
        message = self._errors.check_size(action.SerializeToString())
        call = self._calls[number] = _Call(take)
        if not self._is_answered:
            call.start = action.start
        self._unsent[number] = message
        del request, message, action
        self.writable()
        try:
            await call.ended
            if self._is_doubtful and not self.is_unserved:
                await self._ask_for_status()
            if self.is_unserved and call.start is not None:
                await self._execute_alone(call.start.step, call.start.timeout_s, take)
            else:
                call.raise_failure()
        finally:
            del self._calls[number]
            if self._unsent.pop(number, None) is None and not call.has_ended:
                self._cancelled.append(number)
                self.writable()
            if not self._calls:
                self._note_idle()
            # A raised error refers to this frame, which would keep the call alive.
            del call

    async def _ask_for_status(self) -> None:
        """Determines whether the replica serves ExecuteSteps, by a stream without messages.

        gRPC hides the status of a stream if a write fails before the status arrives.
        """
        with self._errors.mapped():
            open_stream: _StreamBytes = self._channel.stream_stream(_EXECUTE_STEPS, None, None)
            asked = open_stream(iter(()), timeout=_STATUS_S)
            self.is_unserved = await asked.code() is grpc.StatusCode.UNIMPLEMENTED

    async def close(self) -> None:
        """Closes the stream, which ends all of its calls. Idempotent."""
        self._stream.close()
        await asyncio.wait([self._running])

    def _note_idle(self) -> None:
        loop = asyncio.get_running_loop()
        self._idle_since_s = loop.time()
        if self._idle_timer is None and not self.is_closed:
            self._idle_timer = loop.call_later(_IDLE_S, self._end_if_idle)

    def _end_if_idle(self) -> None:
        self._idle_timer = None
        if self._calls or self.is_closed:
            return
        loop = asyncio.get_running_loop()
        ends_s = self._idle_since_s + _IDLE_S
        if loop.time() < ends_s:
            self._idle_timer = loop.call_at(ends_s, self._end_if_idle)
        else:
            self.is_closed = self._is_closing = True
            self._stream.finish()

    # -- StreamHandler

    def received(self, data: bytes) -> None:
        try:
            response = self._errors.read(stage_pb2.ExecuteStepsResponse, data)
        except InternalError:
            self.is_unserved = True
            raise
        self._is_answered = True
        for message in response.messages:
            call = self._calls.get(message.call)
            if call is not None:
                call.start = None
                self._take(call, message)
        if response.closing:
            self._is_closing = True
            self._stream.finish()

    def _take(self, call: "_Call", message: stage_pb2.StepMessage) -> None:
        if message.HasField("event"):
            call.take(message.event)
        elif not message.HasField("ended"):
            error = unknown_kind(message, of=self._errors.peer)
            if error is not None:
                call.fail(error.located(**self._errors.location))
        elif message.ended.HasField("error"):
            call.end(error_from_wire(message.ended.error).located(**self._errors.location))
        else:
            call.end(None)

    def writable(self) -> None:
        while not self._is_closing and self._stream.is_writable:
            if self._cancelled:
                cancel = stage_pb2.ExecuteStepsRequest(call=self._cancelled.popleft(), cancel=stage_pb2.CancelCall())
                self._stream.write(cancel.SerializeToString())
            elif self._unsent:
                self._stream.write(self._unsent.pop(next(iter(self._unsent))))
            else:
                break

    def closed(self, error: StagemeshError | None) -> None:
        self.is_closed = self._is_closing = True
        if not self._is_answered and error is not None:
            self.is_unserved |= error.code == Code.UNIMPLEMENTED
            self._is_doubtful = isinstance(error, UnavailableError)
        if error is not None and error.reason == "MESSAGE_TOO_LARGE":
            self.is_unserved, error = True, UnavailableError(error.message, reason=REPLICA_LOST)
        if self._idle_timer is not None:
            self._idle_timer.cancel()
        self._unsent.clear()
        self._cancelled.clear()
        for call in self._calls.values():
            call.end(self._errors.after_stream(error, running=call.has_events))


class _Call:
    """The execution of one step on a stream."""

    def __init__(self, take: TakeEvent) -> None:
        self.has_events = self.has_ended = False
        """Whether an event has arrived (`has_events`), and whether the replica has ended the call (`has_ended`)."""
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.start: stage_pb2.StartStep | None = None
        """The call's request, until the call's first message. None if the replica is known to serve the stream."""
        self._failure: Exception | None = None
        self._take, self._context = take, copy_context()

    def take(self, event: stage_pb2.ExecuteStepResponse) -> None:
        self.has_events = True
        if self.ended.done():
            return
        try:
            self._context.run(self._take, _detached(event))
        except Exception as exc:  # noqa: BLE001
            self.fail(exc)

    def fail(self, error: Exception) -> None:
        """Ends the call although the replica still executes the step. The stream then cancels the step."""
        self._end(error)

    def end(self, error: StagemeshError | None) -> None:
        self.has_ended = True
        self._end(error)

    def raise_failure(self) -> None:
        """Raises the error with which the step failed, or returns if the step succeeded. Must be called only once."""
        # The error refers to frames that refer to this call.
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


def _detached(event: stage_pb2.ExecuteStepResponse) -> stage_pb2.ExecuteStepResponse:
    """Returns a copy of an event, so that the event does not keep the message that contains it in memory.

    Returns an output event without copying it, because output events are never retained.
    """
    if event.HasField("output"):
        return event
    own = stage_pb2.ExecuteStepResponse()
    own.CopyFrom(event)
    return own
