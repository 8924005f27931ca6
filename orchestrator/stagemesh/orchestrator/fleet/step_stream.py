"""The caller's side of ExecuteSteps: one stream for the steps of all requests on one replica."""

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
    """Returns the error of a call whose stream has ended."""

    def __call__(self, error: StagemeshError | None, *, running: bool) -> StagemeshError:
        """`error` is the reason why the stream ended, or None if this side closed it.

        `running` means that the call had received an event.
        """
        ...


class StepStream:
    """Handles the messages of the stream (`StreamHandler`).

    A stream that `is_closed` must be replaced by a new stream.
    """

    def __init__(self, channel: grpc.aio.Channel, *, peer: str, location: Mapping[str, str], to_error: ToError) -> None:
        """Requires a running event loop. `location` is added to the metadata of errors."""
        self.is_closed = False
        """Whether the stream has ended."""
        self._is_closing = False
        """Whether the stream accepts no more calls, because it has ended or because the replica announced its end."""
        self._peer, self._location, self._to_error = peer, location, to_error
        self._calls: dict[int, _Call] = {}
        self._numbers = itertools.count(1)
        self._unsent: dict[int, bytes] = {}
        """The messages that wait to be sent, by call number. Cancellations are sent first."""
        self._cancelled: deque[int] = deque()
        self._stream = ClientStream(channel, self, peer=f"replica {location['replica']}", method=_METHOD)
        # The context is empty, because the stream does not belong to the request that happens to be the first.
        self._running = asyncio.create_task(self._stream.run(), name=f"steps at {peer}", context=Context())

    async def execute(self, request: stage_pb2.ExecuteStepRequest, *, timeout_s: float, take: TakeEvent) -> None:
        """Runs a step to its end. Cancelling the call cancels the step.

        Raises the error of the step, or the error that `take` raised.
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
        """Ends the stream and its calls. Closing twice is harmless."""
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
    """One step on the stream."""

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
        """Raises the error with which the call ended, if it failed. Must be called only once."""
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
    """Returns a copy of an event that may be retained, because the original would keep its whole message alive.

    Outputs are not copied, because they are never retained.
    """
    if event.HasField("output"):
        return event
    own = stage_pb2.ExecuteStepResponse()
    own.CopyFrom(event)
    return own
