"""Calls from the orchestrator to one replica of a stage. The steps of all requests share one gRPC stream."""

import asyncio
import itertools
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator
from contextlib import contextmanager
from contextvars import Context, copy_context
from copy import copy
from typing import TypeAlias

import grpc
from google.protobuf.message import DecodeError
from grpc_health.v1 import health_pb2

from stagemesh.common.connector_descriptors import AUTO, GRPC, ConnectorName, number_of
from stagemesh.common.errors import (
    Code,
    InternalError,
    InvalidRequestError,
    StagemeshError,
    UnavailableError,
    UnsupportedError,
)
from stagemesh.common.unknown_kinds import unknown_kind
from stagemesh.common.versions import own_protocol
from stagemesh.connectors.stream.wire import EdgeProbe, probe_from_wire
from stagemesh.rpc.channels import MAX_MESSAGE_BYTES, open_channel
from stagemesh.rpc.credentials import PROCESS
from stagemesh.rpc.error_mapping import error_from_wire, from_rpc_error
from stagemesh.rpc.message_streams import ClientStream
from stagemesh.v1 import control_pb2, stage_pb2, stage_pb2_grpc

REPLICA_LOST = "REPLICA_LOST"
CONTROL_NAME = control_pb2.DESCRIPTOR.services_by_name["StageControlService"].full_name
_EXECUTE_STEPS = f"/{stage_pb2.DESCRIPTOR.services_by_name['StageService'].full_name}/ExecuteSteps"
_LOAD_INTERVAL_S = 0.5
_IDLE_INTERVAL_S = 30.0
_DIAL_S = 1.0
_STEP_PING_S, _STEP_PING_TIMEOUT_S = 0.5, 0.5
"""A stopped or partitioned replica that runs a step is detected within 1.5 seconds. A replica that answers late costs
nothing, because its steps continue on a new connection.
"""
_STEPS_IDLE_S = 5.0
"""The time in seconds after which a stream without steps ends, and with it the frequent pings."""

# The codes that gRPC itself reports if the replica or the connection fails. Errors of a service have a reason.
_BROKEN = frozenset({Code.UNAVAILABLE, Code.CANCELLED, Code.UNKNOWN, Code.INTERNAL})

TakeEvent: TypeAlias = Callable[[stage_pb2.ExecuteStepResponse], None]
ExecuteAlone: TypeAlias = Callable[[stage_pb2.ExecuteStepRequest, float, TakeEvent], Awaitable[None]]
"""A function that executes one step. Its arguments are the request, the time limit in seconds, and `take`."""
Verdict: TypeAlias = "stage_pb2.RolloutVerdict.ValueType"
"""Whether a rolling update may count a replica as ready."""
_StreamBytes: TypeAlias = "grpc.aio.StreamStreamMultiCallable[bytes, bytes]"
_UnaryBytes: TypeAlias = "grpc.aio.UnaryUnaryMultiCallable[bytes, bytes]"


class ReplicaClient:
    """Calls the replica at one address. The calls raise the errors of `stagemesh.common.errors`.

    The steps have a channel of their own, on which a lost replica is detected sooner. Its frequent pings would use a
    few percent of a core in an orchestrator with a hundred idle replicas, so that it has pings only while steps run.
    """

    def __init__(self, *, stage: str, replica: str, endpoint: str, server_name: str = "") -> None:
        """Creates a client for the replica at `endpoint` ("host:port").

        `server_name` is the name in the replica's TLS certificate, or empty if it is the host in `endpoint`.
        """
        self._endpoint, self._server_name = endpoint, server_name
        self._errors = _ReplicaErrors(stage=stage, replica=replica, endpoint=endpoint)
        self._steps: _StepStream | None = None
        self._health_watch: grpc.aio.Call | None = None
        self._open()

    def _open(self) -> None:
        self._certificates = PROCESS.credentials.version
        self._channel = open_channel(self._endpoint, server_name=self._server_name)
        self._stub = stage_pb2_grpc.StageServiceStub(self._channel)
        self._step_channel = open_channel(
            self._endpoint,
            server_name=self._server_name,
            keepalive_s=_STEP_PING_S,
            ping_timeout_s=_STEP_PING_TIMEOUT_S,
            pings_without_calls=False,
        )
        self._step_stub = stage_pb2_grpc.StageServiceStub(self._step_channel)
        self._watch_health = self._channel.unary_stream(
            "/grpc.health.v1.Health/Watch",
            health_pb2.HealthCheckRequest.SerializeToString,
            health_pb2.HealthCheckResponse.FromString,
        )

    async def _renew_certificates(self) -> None:
        """Connects again if the certificates of this process have been renewed since the connection was opened.

        A channel never reads them again. The calls that still run end.
        """
        if PROCESS.credentials.version != self._certificates:
            await self.close()
            self._open()

    def execute(self, request: stage_pb2.ExecuteStepRequest, *, timeout_s: float, take: TakeEvent) -> Awaitable[None]:
        """Executes a step until it ends, and calls `take` with each event. Cancelling this call cancels the step.

        Steps share one ExecuteSteps stream. Each is a call of ExecuteStep if the replica does not serve ExecuteSteps.

        Raises the error with which the step failed, or the error that `take` raised. Raises UnavailableError
        (REPLICA_LOST) if the replica terminates or becomes unreachable.
        """
        if self._steps is not None and self._steps.is_unserved:
            return self._execute_alone(request, timeout_s, take)
        if self._steps is None or self._steps.is_closed:
            with self._errors.mapped():
                self._steps = _StepStream(self._step_channel, self._errors, execute_alone=self._execute_alone)
        return self._steps.execute(request, timeout_s=timeout_s, take=take)

    async def _execute_alone(self, request: stage_pb2.ExecuteStepRequest, timeout_s: float, take: TakeEvent) -> None:
        """Executes a step by ExecuteStep. The arguments and the errors are those of `execute`."""
        with self._errors.mapped():
            call = self._step_stub.ExecuteStep(request, timeout=timeout_s)
            try:
                async for event in call:
                    take(event)
            finally:
                call.cancel()

    async def cancel(self, request: stage_pb2.CancelStepRequest, *, timeout_s: float) -> stage_pb2.CancelStepResponse:
        """Cancels a request's steps on the replica. Returns after the engine has released the steps."""
        with self._errors.mapped():
            return await self._step_stub.CancelStep(request, timeout=timeout_s)

    async def rebind(self, request: stage_pb2.RebindStepRequest, *, timeout_s: float) -> None:
        """Replaces the upstream or downstream replicas on some edges of a running step.

        Raises NotFoundError (UNKNOWN_STEP) if the step is not running on the replica. Raises NotReadyError (CHUNK_GONE)
        if the replica no longer retains the first chunks of an outgoing edge.
        """
        with self._errors.mapped():
            await self._step_stub.RebindStep(request, timeout=timeout_s)

    async def probe_edge(
        self,
        edge: str,
        *,
        consumer: str,
        endpoint: str,
        server_name: str = "",
        connector: ConnectorName,
        timeout_s: float,
    ) -> EdgeProbe:
        """Returns the connector that the replica would use to send data to `consumer`, which listens at `endpoint`.

        `server_name` is the name in the TLS certificate of `consumer`, or empty if it is the host in `endpoint`.
        `connector` is the connector that the pipeline file names for the edge. If no connector works, raises a
        StagemeshError that contains the reason. A replica that does not serve ProbeEdge sends by the grpc connector.
        """
        request = stage_pb2.ProbeEdgeRequest(
            edge=edge,
            consumer=consumer,
            endpoint=endpoint,
            server_name=server_name,
            connector=number_of(connector),
        )
        try:
            with self._errors.mapped():
                return probe_from_wire(await self._stub.ProbeEdge(request, timeout=timeout_s))
        except UnsupportedError:
            if connector not in (AUTO, GRPC):
                raise
            return EdgeProbe(GRPC, {})

    async def describe(self, *, timeout_s: float) -> stage_pb2.DescribeResponse:
        """Returns the replica's state, identity and location.

        If the replica cannot be reached, the next call uses the certificates of this process that have been renewed.
        """
        try:
            with self._errors.mapped():
                return await self._stub.Describe(stage_pb2.DescribeRequest(protocol=own_protocol()), timeout=timeout_s)
        except UnavailableError:
            await self._renew_certificates()
            raise

    async def watch_load(self, verdict: Verdict) -> AsyncGenerator[stage_pb2.WatchLoadResponse]:
        """Yields load reports of the replica periodically, less often if the replica is idle.

        Iterate within `aclosing`. `verdict` holds until the iteration ends.
        """
        request = stage_pb2.WatchLoadRequest(
            interval_s=_LOAD_INTERVAL_S, idle_interval_s=_IDLE_INTERVAL_S, verdict=verdict
        )
        with self._errors.mapped():
            call = self._stub.WatchLoad(request)
            try:
                async for report in call:
                    yield report
            finally:
                call.cancel()

    async def wait_while_serving(self) -> None:
        """Waits until the replica reports that it no longer accepts steps.

        Raises a StagemeshError if the replica becomes unreachable.
        """
        with self._errors.mapped():
            call = self._health_watch = self._watch_health(health_pb2.HealthCheckRequest())
            try:
                async for answer in call:
                    if answer.status != health_pb2.HealthCheckResponse.SERVING:
                        return
            finally:
                call.cancel()

    def end_health_watch(self) -> None:
        """Ends `wait_while_serving` with an error, so that its caller asks the replica for its state. Idempotent."""
        if self._health_watch is not None:
            self._health_watch.cancel()

    async def is_port_closed(self) -> bool:
        """Returns whether it is certain that no process listens at the address."""
        host, _, port = self._endpoint.rpartition(":")
        try:
            async with asyncio.timeout(_DIAL_S):
                _, writer = await asyncio.open_connection(host.strip("[]"), int(port))
        except ConnectionRefusedError:
            return True
        except (OSError, TimeoutError, ValueError):
            return False
        writer.close()
        return False

    async def control(self, method: str, request: bytes, *, timeout_s: float) -> bytes:
        """Calls the method `method` of StageControlService. The request and the response are serialized messages."""
        call: _UnaryBytes = self._channel.unary_unary(f"/{CONTROL_NAME}/{method}", None, None)
        with self._errors.mapped():
            return await call(request, timeout=timeout_s)

    async def close(self) -> None:
        """Closes the connection, which ends all calls. Idempotent."""
        if self._steps is not None:
            await self._steps.close()
        await self._step_channel.close()
        await self._channel.close()


class _ReplicaErrors:
    """Creates the errors of calls to one replica. The messages and metadata of the errors name the replica."""

    def __init__(self, *, stage: str, replica: str, endpoint: str) -> None:
        self.location = {"stage": stage, "replica": replica}
        self.peer = f"stage {stage!r} (replica {replica} at {endpoint})"

    @contextmanager
    def mapped(self) -> Generator[None]:
        """Converts errors of gRPC calls within the block to StagemeshErrors.

        Also converts the errors of a channel that is closed before or during the call.
        """
        try:
            yield
        except grpc.aio.AioRpcError as exc:
            raise self._after_call(exc) from exc
        except grpc.aio.UsageError as exc:
            raise self._lost(f"is no longer connected ({exc})") from exc
        except asyncio.CancelledError as exc:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            raise self.after_stream(None, running=False) from exc

    def after_stream(self, error: StagemeshError | None, *, running: bool) -> StagemeshError:
        """Returns the error of a step whose stream has ended with `error`.

        - `error` is None if the orchestrator closed the stream.
        - `running` is True if an event of the step had arrived.
        """
        if error is None:
            return self._lost("is no longer connected (this process ended its calls)")
        if error.code not in _BROKEN:
            return copy(error).located(**self.location)
        return self._lost(
            f"{'became unreachable while the request ran' if running else 'cannot be reached'} ({error.message})"
        )

    def too_large(self, size_bytes: int) -> InvalidRequestError:
        """Returns the error of a step whose serialized request has `size_bytes` bytes, which is too large."""
        return InvalidRequestError(
            f"the request to {self.peer} is {size_bytes} bytes long; the limit is {MAX_MESSAGE_BYTES}; shorten the "
            "input",
            reason="MESSAGE_TOO_LARGE",
            metadata=self.location,
        )

    def _after_call(self, exc: grpc.aio.AioRpcError) -> StagemeshError:
        error = from_rpc_error(exc, peer=self.peer).located(**self.location)
        # An error that gRPC reports contains the name of this client's peer. An error that the stage forwards does not.
        is_broken = error.metadata.get("peer") == self.peer and exc.code().value[0] in _BROKEN
        return self._lost(f"cannot be reached ({exc.details()})") if is_broken else error

    def _lost(self, event: str) -> UnavailableError:
        return UnavailableError(
            f"{self.peer} {event}; a supervised replica is restarted: try again",
            reason=REPLICA_LOST,
            metadata=self.location,
            retry_after_s=1.0,
        )


class _StepStream:
    """Executes steps over one ExecuteSteps stream. If `is_closed` is True, a new stream must be opened."""

    def __init__(self, channel: grpc.aio.Channel, errors: _ReplicaErrors, *, execute_alone: ExecuteAlone) -> None:
        """Opens the stream. Requires a running event loop.

        `execute_alone` executes the steps if the replica does not serve the stream.
        """
        self.is_closed = False
        """Whether the stream has ended and can execute no further steps."""
        self.is_unserved = False
        """Whether the replica does not serve ExecuteSteps."""
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
        message = action.SerializeToString()
        if len(message) > MAX_MESSAGE_BYTES:
            raise self._errors.too_large(len(message))
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
            asked = open_stream(iter(()), timeout=_DIAL_S)
            self.is_unserved = await asked.code() is grpc.StatusCode.UNIMPLEMENTED

    async def close(self) -> None:
        """Closes the stream, which ends all of its calls. Idempotent."""
        self._stream.close()
        await asyncio.wait([self._running])

    def _note_idle(self) -> None:
        loop = asyncio.get_running_loop()
        self._idle_since_s = loop.time()
        if self._idle_timer is None and not self.is_closed:
            self._idle_timer = loop.call_later(_STEPS_IDLE_S, self._end_if_idle)

    def _end_if_idle(self) -> None:
        self._idle_timer = None
        if self._calls or self.is_closed:
            return
        loop = asyncio.get_running_loop()
        ends_s = self._idle_since_s + _STEPS_IDLE_S
        if loop.time() < ends_s:
            self._idle_timer = loop.call_at(ends_s, self._end_if_idle)
        else:
            self.is_closed = self._is_closing = True
            self._stream.finish()

    # -- StreamHandler

    def received(self, data: bytes) -> None:
        try:
            response = stage_pb2.ExecuteStepsResponse.FromString(data)
        except DecodeError as exc:
            raise InternalError(f"{self._errors.peer} sent a message that is not an ExecuteStepsResponse") from exc
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
            self.is_unserved = error.code == Code.UNIMPLEMENTED
            self._is_doubtful = isinstance(error, UnavailableError)
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
