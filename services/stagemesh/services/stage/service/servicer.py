"""The gRPC service StageService. Converts messages and calls `StageRuntime`."""

import asyncio
import logging
import math
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextlib import aclosing, suppress
from typing import TYPE_CHECKING, Any, TypeAlias

from google.protobuf.message import DecodeError

from stagemesh.common import settings
from stagemesh.common.connector_descriptors import descriptors, name_of, number_of
from stagemesh.common.errors import DeadlineError, InternalError, InvalidRequestError, UnsupportedError
from stagemesh.common.host import host_token
from stagemesh.common.logs import bind_log_context
from stagemesh.common.signatures import signature_to_wire
from stagemesh.common.unknown_kinds import unknown_kind
from stagemesh.common.versions import OFFERS, check_version, own_protocol
from stagemesh.connectors.stream.wire import key_from_wire, probe_to_wire
from stagemesh.rpc.channels import MAX_MESSAGE_BYTES
from stagemesh.rpc.error_mapping import error_to_wire
from stagemesh.rpc.handlers import answered, checked_time_left_s, streaming, time_left_s, to_error
from stagemesh.rpc.message_streams import ServerStream
from stagemesh.services.stage.replica.runtime import StageRuntime
from stagemesh.services.stage.step.spec import STATE_EDGE, rebinding_from_wire, spec_from_wire
from stagemesh.v1 import chunk_pb2, stage_pb2, stage_pb2_grpc

if TYPE_CHECKING:
    import grpc

_Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
_Events: TypeAlias = AsyncGenerator[stage_pb2.ExecuteStepResponse]
Execute: TypeAlias = Callable[[stage_pb2.ExecuteStepRequest, float | None], _Events]
"""A function that runs a step in the same way as the ExecuteStep RPC. Its arguments are the request and the remaining
time in seconds, or None if there is no deadline. It yields the step's events. Closing the generator ends the call."""

SERVICE_NAME = stage_pb2.DESCRIPTOR.services_by_name["StageService"].full_name
_DEFAULT_INTERVAL_S, _MIN_INTERVAL_S = 1.0, 0.05

_log = logging.getLogger(__name__)

_MESSAGE_BYTES = 256 << 10
# Above this limit, calls wait until the caller reads responses. Meanwhile, events remain in the steps' journals.
_WAITING_BYTES = 1 << 20
# The time that a caller has to read all responses and end the stream. Shorter than the server's grace period.
_READ_S = 0.5


@answered
class StageServicer(stage_pb2_grpc.StageServiceServicer):
    """The servicer of StageService for one replica."""

    def __init__(self, runtime: StageRuntime) -> None:
        self._runtime, self.where = runtime, runtime.where

    @streaming
    def ExecuteStep(
        self, request: stage_pb2.ExecuteStepRequest, context: _Context
    ) -> AsyncIterator[stage_pb2.ExecuteStepResponse]:
        return self._execute(request, time_left_s(context))

    @streaming
    def ExecuteSteps(  # type: ignore[override]
        self, request_iterator: AsyncIterator[bytes], context: _Context
    ) -> AsyncIterator[bytes]:
        """Messages are serialized bytes, because `add_stage_service` registers this method without protobuf codecs."""
        session = StepSession(self._execute, closing=self._runtime.closed, where=self.where)
        return session.serve(request_iterator)

    async def RebindStep(self, request: stage_pb2.RebindStepRequest, context: _Context) -> stage_pb2.RebindStepResponse:
        self._runtime.rebind(rebinding_from_wire(request))
        return stage_pb2.RebindStepResponse()

    @streaming
    def PutChunk(  # type: ignore[override]
        self, request_iterator: AsyncIterator[bytes], context: _Context
    ) -> AsyncIterator[bytes]:
        """Messages are serialized bytes, because `add_stage_service` registers this method without protobuf codecs."""
        return self._runtime.data_plane.serve_put(request_iterator)

    @streaming
    def GetChunk(
        self, request: stage_pb2.GetChunkRequest, context: _Context
    ) -> AsyncIterator[stage_pb2.GetChunkResponse]:
        key = key_from_wire(request.key)
        if key.edge == STATE_EDGE:
            return self._runtime.states.read(key)
        return self._runtime.data_plane.replay(key, first_seq=request.first_seq)

    async def Describe(self, request: stage_pb2.DescribeRequest, context: _Context) -> stage_pb2.DescribeResponse:
        if request.HasField("protocol"):
            check_version(request.protocol, peer="the caller", own_name=f"replica {self._runtime.config.replica}")
        runtime, config, abilities = self._runtime, self._runtime.config, self._runtime.engine.abilities
        return stage_pb2.DescribeResponse(
            pipeline=config.pipeline,
            generation=config.generation,
            stage=config.stage,
            replica=config.replica,
            incarnation=runtime.data_plane.incarnation,
            engine=config.engine,
            model=config.model or "",
            state=runtime.state.value,
            detail=runtime.detail,
            signature=signature_to_wire(
                runtime.signature, can_pause=abilities.can_pause, can_resume=abilities.can_resume
            ),
            connectors=[number_of(each.name) for each in descriptors().values() if not each.missing()],
            protocol=own_protocol(OFFERS),
            host=host_token(),
            zone=settings.zone() if config.zone is None else config.zone,
        )

    @streaming
    async def WatchLoad(
        self, request: stage_pb2.WatchLoadRequest, context: _Context
    ) -> AsyncIterator[stage_pb2.WatchLoadResponse]:
        interval_s = _checked_interval_s(request)
        intervals = idle_intervals = max(1, round(request.idle_interval_s / interval_s))
        was_busy, adapters = False, list[str]()
        with self._runtime.rollout.verdict(request.verdict):
            while not self._runtime.closed.is_set():
                load = self._runtime.load()
                is_busy = bool(load.running or load.queued)
                # A change from busy to idle, or of the adapters, is reported at once.
                if is_busy or was_busy or intervals >= idle_intervals or adapters != load.adapters:
                    intervals = 0
                    yield load
                intervals, was_busy, adapters = intervals + 1, is_busy, list(load.adapters)
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._runtime.closed.wait(), interval_s)

    async def CancelStep(self, request: stage_pb2.CancelStepRequest, context: _Context) -> stage_pb2.CancelStepResponse:
        return await self._runtime.cancel(request.request_id, attempt=request.attempt, reason=request.reason)

    async def ProbeEdge(self, request: stage_pb2.ProbeEdgeRequest, context: _Context) -> stage_pb2.ProbeEdgeResponse:
        found = await self._runtime.data_plane.probe(
            consumer=request.consumer,
            endpoint=request.endpoint,
            connector=name_of(request.connector),
            server_name=request.server_name,
        )
        return probe_to_wire(found)

    def _execute(self, request: stage_pb2.ExecuteStepRequest, time_left_s: float | None) -> _Events:
        return self._runtime.execute(spec_from_wire(request), time_left_s=time_left_s)


def _checked_interval_s(request: stage_pb2.WatchLoadRequest) -> float:
    interval_s = request.interval_s or _DEFAULT_INTERVAL_S
    if not interval_s >= _MIN_INTERVAL_S:
        raise InvalidRequestError(f"interval_s is {interval_s:g}; it must be at least {_MIN_INTERVAL_S:g}, or 0 for 1")
    if not math.isfinite(request.idle_interval_s / interval_s):
        raise InvalidRequestError(
            f"idle_interval_s is {request.idle_interval_s:g}; it must be a number of seconds, or 0 for interval_s"
        )
    return interval_s


class StepSession:
    """The session of one ExecuteSteps stream, over which a caller runs several steps at the same time.

    Combines all responses of one event loop iteration into one message. Implements `StreamHandler`.
    """

    def __init__(self, execute: Execute, *, closing: asyncio.Event, where: Mapping[str, str]) -> None:
        """`execute` runs one step. `where` is added to the metadata of errors. When `closing` is set, the session ends
        the stream after the last running call has ended.
        """
        self._execute, self._closing, self._where = execute, closing, where
        self._loop = asyncio.get_running_loop()
        self._stream = ServerStream(self)
        self._calls: dict[int, asyncio.Task[None]] = {}
        self._waiting: deque[bytes] = deque()
        """Serialized responses that have not been written yet. Each contains the message of one call. Their
        concatenated bytes are the serialization of one response with all of these messages."""
        self._waiting_bytes = 0
        self._has_space = asyncio.Event()
        self._write_is_due = False

    async def serve(self, requests: AsyncIterator[bytes]) -> AsyncGenerator[bytes]:
        """Yields the serialized messages for the caller until the caller or the session ends the stream.

        Raises InvalidRequestError if the caller sends an invalid message.
        """
        ending = asyncio.create_task(self._end_in_order())
        try:
            async with aclosing(self._stream.serve(requests)) as messages:
                async for message in messages:
                    yield message
                    # The message is deleted, because it may be large and the next message may arrive much later.
                    del message
        finally:
            tasks = [ending, *self._calls.values()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    # -- StreamHandler

    def received(self, data: bytes) -> None:
        try:
            request = stage_pb2.ExecuteStepsRequest.FromString(data)
        except DecodeError as exc:
            raise InvalidRequestError("the message is not an ExecuteStepsRequest") from exc
        number = request.call
        running = self._calls.get(number)
        match request.WhichOneof("action"):
            case "start" if running is not None:
                raise InvalidRequestError(
                    f"call {number} is already running; give each call of a stream its own number"
                )
            case "start":
                running = self._loop.create_task(self._run(number, request.start), name=request.start.step.step_id)
                self._calls[number] = running
                running.add_done_callback(lambda _: self._calls.pop(number))
            case "cancel":
                if running is not None:
                    running.cancel()
            case None:
                self._refuse_unknown(request, running)

    def writable(self) -> None:
        self._write_waiting()

    def closed(self, error: object) -> None:
        """Does nothing, because `serve` ends together with the stream and then cancels the stream's calls."""

    # -- internal

    def _refuse_unknown(self, request: stage_pb2.ExecuteStepsRequest, running: asyncio.Task[None] | None) -> None:
        """Ends the call of an action of an unknown kind, unless the caller has marked the action as ignorable."""
        error = unknown_kind(request, of="the caller")
        if error is None:
            return
        if running is not None:
            running.cancel()
        self._end(request.call, _error_of(error, self._where))

    async def _run(self, number: int, start: stage_pb2.StartStep) -> None:
        where = {**self._where, "request_id": start.step.request_id}
        bind_log_context(**where)
        error: chunk_pb2.Error | None = None
        try:
            await self._follow(number, start)
        except Exception as exc:  # noqa: BLE001
            error = _error_of(exc, where)
        self._end(number, error)

    def _end(self, number: int, error: chunk_pb2.Error | None) -> None:
        self._respond(_serialized(stage_pb2.StepMessage(call=number, ended=stage_pb2.StepEnded(error=error))))

    async def _follow(self, number: int, start: stage_pb2.StartStep) -> None:
        time_left_s = checked_time_left_s(start.timeout_s if start.HasField("timeout_s") else None)
        try:
            async with (
                asyncio.timeout(time_left_s),
                aclosing(self._execute(start.step, time_left_s)) as events,
            ):
                async for event in events:
                    while self._waiting_bytes >= _WAITING_BYTES:
                        self._has_space.clear()
                        await self._has_space.wait()
                    response = _serialized(stage_pb2.StepMessage(call=number, event=event))
                    _check_size(response, event)
                    self._respond(response)
        except TimeoutError as exc:
            raise DeadlineError(f"the call took longer than its {time_left_s:g} s; allow more time") from exc

    async def _end_in_order(self) -> None:
        await self._closing.wait()
        while self._calls:
            await asyncio.wait(self._calls.values())
        while self._waiting:
            self._stream.write(self._next_message())
        self._stream.write(stage_pb2.ExecuteStepsResponse(closing=True).SerializeToString())
        # The session waits, so that the caller can end the stream first.
        await asyncio.sleep(_READ_S)
        self._stream.close()

    def _respond(self, response: bytes) -> None:
        self._waiting.append(response)
        self._waiting_bytes += len(response)
        if not self._write_is_due:
            self._write_is_due = True
            self._loop.call_soon(self._write_waiting)

    def _write_waiting(self) -> None:
        self._write_is_due = False
        while self._waiting and self._stream.is_writable:
            self._stream.write(self._next_message())

    def _next_message(self) -> bytes:
        """Removes the oldest waiting responses and returns them as one serialized message.

        The message contains at least one response, and further responses up to a total of `_MESSAGE_BYTES` bytes.
        """
        size_bytes, responses = 0, list[bytes]()
        while self._waiting and (not responses or size_bytes + len(self._waiting[0]) <= _MESSAGE_BYTES):
            responses.append(self._waiting.popleft())
            size_bytes += len(responses[-1])
        self._waiting_bytes -= size_bytes
        self._has_space.set()
        return b"".join(responses)


def _serialized(message: stage_pb2.StepMessage) -> bytes:
    return stage_pb2.ExecuteStepsResponse(messages=[message]).SerializeToString()


def _error_of(exc: Exception, where: Mapping[str, str]) -> chunk_pb2.Error:
    try:
        return error_to_wire(to_error(exc, where))
    except Exception:  # noqa: BLE001
        # Without an error the caller would wait until its deadline.
        _log.exception("the error of a call cannot be converted")
        unknown = InternalError(
            "the call failed with an error that cannot be sent; the service's log has it", metadata=where
        )
        return error_to_wire(unknown)


def _check_size(response: bytes, event: stage_pb2.ExecuteStepResponse) -> None:
    """Raises UnsupportedError if a serialized response is larger than `MAX_MESSAGE_BYTES`. The error ends only the call
    of this event. A message that is too large would end the stream, which all calls share.
    """
    if len(response) > MAX_MESSAGE_BYTES:
        raise UnsupportedError(
            f"the step's {event.WhichOneof('event')} has {len(response)} bytes, but at most {MAX_MESSAGE_BYTES} can be "
            "sent; request another output, or a smaller one",
            reason="OUTPUT_TOO_LARGE",
        )
