"""The client side of the ExecuteSteps RPC: one gRPC stream for the steps of all requests on one replica."""

import asyncio
import itertools
from collections import deque
from collections.abc import Callable, Mapping
from contextvars import Context, copy_context
from typing import Protocol, TypeAlias

import grpc
from google.protobuf.message import DecodeError

from stagemesh.common.errors import InternalError, InvalidRequestError, StagemeshError
from stagemesh.connectors.stream.wire import error_from_wire
from stagemesh.rpc.channels import MAX_MESSAGE_BYTES
from stagemesh.rpc.message_streams import ClientStream
from stagemesh.v1 import stage_pb2

TakeEvent: TypeAlias = Callable[[stage_pb2.ExecuteStepResponse], None]

_METHOD = f"/{stage_pb2.DESCRIPTOR.services_by_name['StageService'].full_name}/ExecuteSteps"


class ToError(Protocol):
    """A function that determines the error of a step after the stream has ended."""

    def __call__(self, error: StagemeshError | None, *, running: bool) -> StagemeshError:
        """Returns the error of a step.

        - `error` is the error with which the stream ended, or None if the orchestrator closed it.
        - `running` is True if the step had received an event.
        """
        ...


class StepStream:
    """Executes steps over one ExecuteSteps stream. If `is_closed` is True, the stream must be replaced."""

    def __init__(self, channel: grpc.aio.Channel, *, peer: str, location: Mapping[str, str], to_error: ToError) -> None:
        """Opens the stream. Requires a running event loop. `location` is added to the metadata of errors."""
        self.is_closed = False
        """Whether the stream has ended, so that it can execute no further steps."""
        self._is_closing = False
        """Whether new calls are rejected, because the stream has ended or the replica has announced its end."""
        self._peer, self._location, self._to_error = peer, location, to_error
        self._calls: dict[int, _Call] = {}
        self._numbers = itertools.count(1)
        self._unsent: dict[int, bytes] = {}
        """The serialized step requests that were not sent yet, by call number. Cancellations are sent before them."""
        self._cancelled: deque[int] = deque()
        self._stream = ClientStream(channel, self, peer=f"replica {location['replica']}", method=_METHOD)
        # The context is empty, because the stream does not belong to the request that happens to be the first.
        self._running = asyncio.create_task(self._stream.run(), name=f"steps at {peer}", context=Context())

    async def execute(self, request: stage_pb2.ExecuteStepRequest, *, timeout_s: float, take: TakeEvent) -> None:
        """Executes a step until it ends, and calls `take` with each event. Cancelling this call cancels the step.

        Raises the error with which the step failed, or the error that `take` raised.
        """
        if self._is_closing:
            raise self._to_error(None, running=False)
        number = next(self._numbers)
        message = stage_pb2.ExecuteStepsRequest(call=number, step=request, timeout_s=timeout_s).SerializeToString()
        if len(message) > MAX_MESSAGE_BYTES:
            raise self._too_large(len(message))
        call = self._calls[number] = _Call(take)
        self._unsent[number] = message
        del request, message
        self.writable()
        try:
            await call.ended
            call.raise_failure()
        finally:
            del self._calls[number]
            if self._unsent.pop(number, None) is None and not call.has_ended:
                self._cancelled.append(number)
                self.writable()
            # A raised error refers to this frame, which would keep the call alive.
            del call

    async def close(self) -> None:
        """Closes the stream, which ends all of its calls. Idempotent."""
        self._stream.close()
        await asyncio.wait([self._running])

    # -- StreamHandler

    def received(self, data: bytes) -> None:
        try:
            response = stage_pb2.ExecuteStepsResponse.FromString(data)
        except DecodeError as exc:
            raise InternalError(f"{self._peer} sent a message that is not an ExecuteStepsResponse") from exc
        for message in response.messages:
            call = self._calls.get(message.call)
            if call is None:
                continue
            if message.HasField("event"):
                call.take(message.event)
            elif message.ended.HasField("error"):
                call.end(error_from_wire(message.ended.error).located(**self._location))
            else:
                call.end(None)
        if response.closing:
            self._is_closing = True
            self._stream.finish()

    def writable(self) -> None:
        while not self._is_closing and self._stream.is_writable:
            if self._cancelled:
                self._stream.write(stage_pb2.ExecuteStepsRequest(call=self._cancelled.popleft()).SerializeToString())
            elif self._unsent:
                self._stream.write(self._unsent.pop(next(iter(self._unsent))))
            else:
                break

    def closed(self, error: StagemeshError | None) -> None:
        self.is_closed = self._is_closing = True
        self._unsent.clear()
        self._cancelled.clear()
        for call in self._calls.values():
            call.end(self._to_error(error, running=call.has_events))

    def _too_large(self, size_bytes: int) -> InvalidRequestError:
        return InvalidRequestError(
            f"the request to {self._peer} is {size_bytes} bytes long; the limit is {MAX_MESSAGE_BYTES}; shorten the "
            "input",
            reason="REQUEST_TOO_LARGE",
            metadata=self._location,
        )


class _Call:
    """The execution of one step on the stream."""

    def __init__(self, take: TakeEvent) -> None:
        self.has_events = self.has_ended = False
        """Whether an event has arrived (`has_events`), and whether the replica has ended the call (`has_ended`)."""
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._failure: Exception | None = None
        self._take, self._context = take, copy_context()

    def take(self, event: stage_pb2.ExecuteStepResponse) -> None:
        self.has_events = True
        if self.ended.done():
            return
        try:
            self._context.run(self._take, _detached(event))
        except Exception as exc:  # noqa: BLE001
            self._end(exc)

    def end(self, error: StagemeshError | None) -> None:
        self.has_ended = True
        self._end(error)

    def raise_failure(self) -> None:
        """Raises the error with which the step failed, if any. Must be called only once."""
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
    """Returns a copy of an event that does not keep the event's whole message in memory.

    Returns outputs as they are, because outputs are never retained.
    """
    if event.HasField("output"):
        return event
    own = stage_pb2.ExecuteStepResponse()
    own.CopyFrom(event)
    return own
