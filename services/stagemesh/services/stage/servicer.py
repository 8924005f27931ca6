"""The gRPC service StageService. Converts messages and calls `StageRuntime`."""

import asyncio
import math
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextlib import aclosing
from typing import TypeAlias

from stagemesh.common.errors import DeadlineError, InvalidRequestError, UnsupportedError
from stagemesh.common.notification import Journal
from stagemesh.common.plugins.connectors import descriptors, name_of, number_of
from stagemesh.common.plugins.descriptors import signature_to_wire
from stagemesh.common.process import settings
from stagemesh.common.process.host import host_token
from stagemesh.common.process.logs import bind_log_context
from stagemesh.common.tasks import end_tasks, wait_within
from stagemesh.common.wire.encoding import embedded, parse_message, tag_of, to_message, varint
from stagemesh.common.wire.versions import OFFERS, check_version, own_protocol, unknown_kind
from stagemesh.connectors.flow.flow_control import ReadyQueue
from stagemesh.connectors.packets import ConsumerAddress
from stagemesh.connectors.stream.connector_agreement import probe_to_wire
from stagemesh.connectors.wire import key_from_wire
from stagemesh.rpc.callers import check_reader
from stagemesh.rpc.channels import MAX_FIELDS, MAX_MESSAGE_BYTES
from stagemesh.rpc.error_mapping import error_to_wire
from stagemesh.rpc.handlers import Context, answered, checked_time_left_s, streaming, time_left_s, to_error
from stagemesh.rpc.message_streams import ServerStream
from stagemesh.services.stage.runtime import StageRuntime
from stagemesh.services.stage.step.spec import STATE_EDGE, rebinding_from_wire, spec_from_wire
from stagemesh.v1 import stage_pb2, stage_pb2_grpc

Attach: TypeAlias = Callable[[stage_pb2.ExecuteStepRequest, float | None], Journal[bytes]]
"""A function that starts a step, or attaches to it. Its arguments are the request and the remaining time in seconds, or
None if there is no deadline. Returns the journal of the step's events, which are serialized ExecuteStepResponses."""

SERVICE_NAME = stage_pb2.DESCRIPTOR.services_by_name["StageService"].full_name
_DEFAULT_INTERVAL_S, _MIN_INTERVAL_S = 1.0, 0.05

_MESSAGE_BYTES = 256 << 10
_HEADER_BYTES = 64
"""More than the size of a serialized response with one event, without the event."""
# The time that a caller has to read all responses and end the stream. Shorter than the server's grace period.
_READ_S = 0.5


@answered
class StageServicer(stage_pb2_grpc.StageServiceServicer):
    """The servicer of StageService for one replica."""

    def __init__(self, runtime: StageRuntime) -> None:
        self._runtime, self.where = runtime, runtime.where

    @streaming
    def ExecuteStep(
        self, request: stage_pb2.ExecuteStepRequest, context: Context
    ) -> AsyncIterator[stage_pb2.ExecuteStepResponse]:
        return self._runtime.execute(spec_from_wire(request), time_left_s=time_left_s(context))

    @streaming
    def ExecuteSteps(  # type: ignore[override]
        self, request_iterator: AsyncIterator[bytes], context: Context
    ) -> AsyncIterator[bytes]:
        """Messages are serialized bytes, because `add_stage_service` registers this method without protobuf codecs."""
        session = StepSession(self._attach, closing=self._runtime.closed, where=self.where)
        return session.serve(request_iterator)

    async def RebindStep(self, request: stage_pb2.RebindStepRequest, context: Context) -> stage_pb2.RebindStepResponse:
        self._runtime.rebind(rebinding_from_wire(request))
        return stage_pb2.RebindStepResponse()

    @streaming
    def PutChunk(  # type: ignore[override]
        self, request_iterator: AsyncIterator[bytes], context: Context
    ) -> AsyncIterator[bytes]:
        """Messages are serialized bytes, because `add_stage_service` registers this method without protobuf codecs."""
        return self._runtime.data_plane.serve_put(request_iterator)

    @streaming
    def GetChunk(
        self, request: stage_pb2.GetChunkRequest, context: Context
    ) -> AsyncIterator[stage_pb2.GetChunkResponse]:
        key = key_from_wire(request.key)
        if key.edge == STATE_EDGE:
            check_reader(stage=self._runtime.config.stage)
            return self._runtime.states.read(key)
        return self._runtime.data_plane.replay(key, first_seq=request.first_seq)

    async def Describe(self, request: stage_pb2.DescribeRequest, context: Context) -> stage_pb2.DescribeResponse:
        if request.HasField("protocol"):
            check_version(request.protocol, peer="the caller", own_name=f"replica {self._runtime.config.replica}")
        runtime, config, abilities = self._runtime, self._runtime.config, self._runtime.engine.abilities
        return to_message(
            stage_pb2.DescribeResponse,
            config,
            incarnation=runtime.data_plane.incarnation,
            state=runtime.lifecycle.state.value,
            detail=runtime.lifecycle.detail,
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
        self, request: stage_pb2.WatchLoadRequest, context: Context
    ) -> AsyncIterator[stage_pb2.WatchLoadResponse]:
        interval_s = _checked_interval_s(request)
        intervals = idle_intervals = max(1, round(request.idle_interval_s / interval_s))
        was_busy, adapters = False, list[str]()
        with self._runtime.lifecycle.rollout.verdict(request.verdict):
            while not self._runtime.closed.is_set():
                load = self._runtime.load()
                is_busy = bool(load.running or load.queued)
                # A change from busy to idle, or of the adapters, is reported at once.
                if is_busy or was_busy or intervals >= idle_intervals or adapters != load.adapters:
                    intervals = 0
                    yield load
                intervals, was_busy, adapters = intervals + 1, is_busy, list(load.adapters)
                await wait_within(interval_s, self._runtime.closed.wait())

    async def CancelStep(self, request: stage_pb2.CancelStepRequest, context: Context) -> stage_pb2.CancelStepResponse:
        return await self._runtime.cancel(
            request.request_id, attempt=request.attempt, reason=request.reason, when_left=request.when_left
        )

    async def ProbeEdge(self, request: stage_pb2.ProbeEdgeRequest, context: Context) -> stage_pb2.ProbeEdgeResponse:
        # After the arena was passed to a consumer, no worker of the engine can open it for writing.
        self._runtime.lifecycle.check_loaded()
        consumer = ConsumerAddress(request.consumer, request.endpoint, request.server_name)
        return probe_to_wire(await self._runtime.data_plane.probe(consumer, name_of(request.connector)))

    def _attach(self, request: stage_pb2.ExecuteStepRequest, time_left_s: float | None) -> Journal[bytes]:
        return self._runtime.attach(spec_from_wire(request), time_left_s=time_left_s)


def _checked_interval_s(request: stage_pb2.WatchLoadRequest) -> float:
    interval_s = request.interval_s or _DEFAULT_INTERVAL_S
    if not interval_s >= _MIN_INTERVAL_S:
        raise InvalidRequestError(f"interval_s is {interval_s:g}; it must be at least {_MIN_INTERVAL_S:g}, or 0 for 1")
    if not math.isfinite(request.idle_interval_s / interval_s):
        raise InvalidRequestError(
            f"idle_interval_s is {request.idle_interval_s:g}; it must be a number of seconds, or 0 for interval_s"
        )
    return interval_s


class StepCall:
    """One call of an ExecuteSteps stream: a reader of the journal of a step's events."""

    def __init__(self, number: int, where: Mapping[str, str], on_change: Callable[["StepCall"], None]) -> None:
        """`number` is the call's number on its stream. `where` is added to the metadata of errors. `on_change` is
        called when `take` has something to return.
        """
        self._where, self._on_change = where, on_change
        head = stage_pb2.StepMessage(call=number).SerializeToString()
        self._event_head, self._ended_head = head + _EVENT, head + _ENDED
        self._journal: Journal[bytes] | None = None
        self._position = 0
        self._taken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._end = b""

    async def follow(self, journal: Journal[bytes]) -> None:
        """Lets `take` return the events of a step and then the end of the call. Waits until it has returned them.

        Raises UnsupportedError if an event is larger than `MAX_MESSAGE_BYTES`, because a message that is too large
        would end the stream, which all calls share.
        """
        self._journal = journal
        with journal.reading(self._changed):
            self._changed()
            try:
                await self._taken
            finally:
                self._journal = None

    def fail(self, error: Exception) -> None:
        """Lets `take` return the end of the call, with an error."""
        self._end = self._ended(error)
        self._changed()

    def take(self, max_bytes: int, *, at_least_one: bool) -> list[bytes]:
        """Returns the next events, and the end of the call after them, up to `max_bytes` bytes.

        Each is a serialized ExecuteStepsResponse with one message. If `at_least_one` is True, the first event may be
        larger. If events are left, calls `on_change`.
        """
        taken = list[bytes]()
        journal = self._journal
        if journal is None:
            return [self._end] if self._end else taken
        events, position = journal.items, self._position
        while position < len(events):
            event = events[position]
            if len(event) > max_bytes and (taken or not at_least_one):
                break
            if len(event) > MAX_MESSAGE_BYTES - _HEADER_BYTES:
                self._stop(_too_large(event))
                return taken
            taken.append(_framed(self._event_head, event))
            max_bytes -= len(taken[-1])
            position += 1
        self._position = position
        if position < len(events):
            self._changed()
        elif journal.closed:
            taken.append(self._ended(journal.error))
            self._stop(None)
        return taken

    def _changed(self) -> None:
        self._on_change(self)

    def _stop(self, error: UnsupportedError | None) -> None:
        self._journal = None
        if self._taken.done():
            return
        if error is None:
            self._taken.set_result(None)
        else:
            self._taken.set_exception(error)

    def _ended(self, error: Exception | None) -> bytes:
        ended = stage_pb2.StepEnded(error=None if error is None else error_to_wire(to_error(error, self._where)))
        return _framed(self._ended_head, ended.SerializeToString())


class StepSession:
    """The session of one ExecuteSteps stream, over which a caller runs several steps at the same time.

    Combines all responses of one event loop iteration into one message. What a caller does not read remains in the
    journals of its steps. Implements `StreamHandler`.
    """

    def __init__(self, attach: Attach, *, closing: asyncio.Event, where: Mapping[str, str]) -> None:
        """`attach` starts one step. `where` is added to the metadata of errors. When `closing` is set, the session ends
        the stream after the last running call has ended.
        """
        self._attach, self._closing, self._where = attach, closing, where
        self._loop = asyncio.get_running_loop()
        self._stream = ServerStream(self)
        self._calls: dict[int, asyncio.Task[None]] = {}
        self._ready = ReadyQueue[StepCall](self._write_ready)
        """The calls that have something to write, in the order in which they take turns."""

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
            await end_tasks((ending, *self._calls.values()))

    # -- StreamHandler

    def received(self, data: bytes) -> None:
        # A step has the fields of a client's request, and the fields of its edges.
        request = parse_message(stage_pb2.ExecuteStepsRequest, data, max_fields=2 * MAX_FIELDS)
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
        self._write_ready()

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
        StepCall(request.call, self._where, self._ready.add).fail(error)

    async def _run(self, number: int, start: stage_pb2.StartStep) -> None:
        where = {**self._where, "request_id": start.step.request_id}
        bind_log_context(**where, attempt=str(start.step.attempt))
        call = StepCall(number, where, self._ready.add)
        try:
            await self._follow(call, start)
        except Exception as exc:  # noqa: BLE001
            call.fail(exc)

    async def _follow(self, call: StepCall, start: stage_pb2.StartStep) -> None:
        time_left_s = checked_time_left_s(start.timeout_s if start.HasField("timeout_s") else None)
        try:
            async with asyncio.timeout(time_left_s):
                await call.follow(self._attach(start.step, time_left_s))
        except TimeoutError as exc:
            raise DeadlineError(f"the call took longer than its {time_left_s:g} s; allow more time") from exc

    async def _end_in_order(self) -> None:
        await self._closing.wait()
        while self._calls:
            await asyncio.wait(self._calls.values())
        while message := self._next_message():
            self._stream.write(message)
        self._stream.write(stage_pb2.ExecuteStepsResponse(closing=True).SerializeToString())
        # The session waits, so that the caller can end the stream first.
        await asyncio.sleep(_READ_S)
        self._stream.close()

    def _write_ready(self) -> None:
        while self._stream.is_writable and (message := self._next_message()):
            self._stream.write(message)

    def _next_message(self) -> bytes:
        """Takes what the ready calls have to write, up to about `_MESSAGE_BYTES` bytes. Returns it as one serialized
        message, which is empty if they have nothing.
        """
        left_bytes, responses = _MESSAGE_BYTES, list[bytes]()
        while left_bytes > 0 and (call := self._ready.first()) is not None:
            self._ready.discard(call)
            taken = call.take(left_bytes, at_least_one=not responses)
            left_bytes -= sum(map(len, taken))
            responses += taken
            if call in self._ready:
                break
        # The concatenation of serialized responses is the serialization of one response with all of their messages.
        return b"".join(responses)


def _framed(head: bytes, field: bytes) -> bytes:
    """Returns a serialized ExecuteStepsResponse with one StepMessage.

    `head` contains the serialized fields of the StepMessage and the tag of its last field, whose content is `field`.
    """
    return embedded(_MESSAGE, head, varint(len(field)), field)


_MESSAGE = tag_of(stage_pb2.ExecuteStepsResponse.DESCRIPTOR, "messages")
_EVENT = tag_of(stage_pb2.StepMessage.DESCRIPTOR, "event")
_ENDED = tag_of(stage_pb2.StepMessage.DESCRIPTOR, "ended")


def _too_large(event: bytes) -> UnsupportedError:
    kind = stage_pb2.ExecuteStepResponse.FromString(event).WhichOneof("event")
    return UnsupportedError(
        f"the step's {kind} has {len(event)} bytes, but at most {MAX_MESSAGE_BYTES} can be sent; request another "
        "output, or a smaller one",
        reason="OUTPUT_TOO_LARGE",
    )
