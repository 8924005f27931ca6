"""The answers of a hostile consumer to a producer, and of a hostile replica to an orchestrator, as fuzz targets."""

import asyncio
import contextlib
import time
from collections.abc import Sequence
from functools import cache, partial
from typing import Any, cast

import numpy as np

from stagemesh.common.errors import StagemeshError, UnavailableError
from stagemesh.common.notification import Notifier
from stagemesh.common.plugins.connectors import GRPC, SHM
from stagemesh.common.wire.chunk_sizes import StepPolicy
from stagemesh.common.wire.versions import OFFERS, own_protocol
from stagemesh.connectors.data_plane import DataPlane
from stagemesh.connectors.packets import ConsumerAddress, EdgeKey, Packet
from stagemesh.connectors.stream.connection import Connection
from stagemesh.connectors.stream.connector_agreement import probe_from_wire
from stagemesh.connectors.wire import key_to_wire
from stagemesh.orchestrator.fleet.fleet import Fleet
from stagemesh.orchestrator.fleet.membership import Member, check_names
from stagemesh.orchestrator.fleet.replica_loss import ReplicaErrors
from stagemesh.orchestrator.fleet.step_stream import StepStream
from stagemesh.orchestrator.planning.checkpoint_budget import CheckpointBudget
from stagemesh.orchestrator.planning.planner import PlannedStep
from stagemesh.orchestrator.request.failures import Failures
from stagemesh.orchestrator.request.output_record import RequestRecord
from stagemesh.orchestrator.request.recovery import Phase, StepState
from stagemesh.orchestrator.request.step_calls import StepCalls
from stagemesh.orchestrator.request.timeline import StepNotes
from stagemesh.orchestrator.request.validation import ValidRequest
from stagemesh.pipeline import Pipeline
from stagemesh.rpc.error_mapping import to_status
from stagemesh.v1 import chunk_pb2, request_pb2, stage_pb2
from tests.orchestrator.replicas import ready_description

KEY = EdgeKey("r", "a->b", 1)
_SHARED_KEY = KEY._replace(request_id="shared")
_CONSUMER = ConsumerAddress("b-0", "127.0.0.1:1")


class SilentStream:
    """A message stream whose other end reads nothing."""

    is_writable = True

    def write(self, data: bytes) -> None:
        """Drops a message."""

    def close(self, error: StagemeshError | None = None) -> None:
        """Does nothing, because the session is closed by the target."""


def split(data: bytes) -> list[bytes]:
    """Returns the messages of an input. Each has its length in two bytes before it."""
    parts: list[bytes] = []
    while data:
        length = int.from_bytes(data[:2], "little")
        parts.append(data[2 : 2 + length])
        data = data[2 + length :]
    return parts


def join(messages: Sequence[bytes]) -> bytes:
    """Returns the input that consists of these messages."""
    return b"".join(len(each).to_bytes(2, "little") + each for each in messages)


# -- a consumer


@cache
def _producer_plane() -> tuple[asyncio.AbstractEventLoop, DataPlane]:
    """Returns a producer's data plane, and the loop in which it was created."""

    async def make() -> DataPlane:
        return DataPlane(replica="a-0", pipeline="p", generation="g", arena_bytes=1 << 20)

    loop = asyncio.new_event_loop()
    return loop, loop.run_until_complete(make())


def read_replies(data: bytes) -> bool:
    """The messages of a consumer on the PutChunk stream of a producer that sends one flow over grpc and one over shm.

    Returns whether the first flow was committed.
    """
    loop, plane = _producer_plane()
    return loop.run_until_complete(_send(plane, data))


async def _send(plane: Any, data: bytes) -> bool:
    link = plane._link(_CONSUMER, GRPC)
    link._task = asyncio.create_task(asyncio.Event().wait())
    link._connection = connection = Connection(link._peer, take_reply=link._take_reply, on_negotiated=link._negotiated)
    session = connection._main
    session._stream = SilentStream()
    keys = {GRPC: KEY, SHM: _SHARED_KEY}
    outlets = [
        plane.open_outlet(key, _CONSUMER, connector=connector, policy=StepPolicy()) for connector, key in keys.items()
    ]
    sending = [asyncio.create_task(_send_all(outlet)) for outlet in outlets]
    try:
        with contextlib.suppress(StagemeshError):
            for message in split(data):
                await asyncio.sleep(0)
                session.received(message)
                if session._welcome.done():
                    link._accept(session._welcome.result())
        await asyncio.sleep(0)
        return outlets[0].attempt.is_over and sending[0].done() and sending[0].exception() is None
    finally:
        await connection.aclose()
        await link.close()
        plane._links.clear()
        await asyncio.gather(*sending, return_exceptions=True)


async def _send_all(outlet: Any) -> None:
    for size_bytes in (10, 5000):
        await outlet.send(Packet({"x": np.zeros(size_bytes, np.uint8)}))
    await outlet.finish()


def reply_seeds() -> list[bytes]:
    """Returns the answers of consumers that receive both flows to their ends."""
    reply, key = stage_pb2.PutReply, key_to_wire(KEY)
    hello = stage_pb2.Welcome(incarnation="i", inline_limit_bytes=4096, protocol=own_protocol(OFFERS))
    opened = {"credit_limit_bytes": 1 << 20, "window_bytes": 1 << 20, "credit_limit_chunks": 4096, "opening": 1}
    error = chunk_pb2.Error(code=14, message="again", retry_after_s=1, metadata={"stage": "b"})
    first = [
        reply(opened=stage_pb2.EdgeOpened(key=key, connector=chunk_pb2.CONNECTOR_GRPC, **opened)),
        reply(ack=stage_pb2.ChunkAck(key=key, next_seq=3, credit_limit_bytes=2 << 20)),
        reply(commit=stage_pb2.EdgeCommit(key=key)),
    ]
    shared = [
        reply(offer_answer=stage_pb2.OfferAnswer(connector=chunk_pb2.CONNECTOR_SHM)),
        reply(opened=stage_pb2.EdgeOpened(key=key_to_wire(_SHARED_KEY), **opened)),  # type: ignore[arg-type]
        reply(release=stage_pb2.LeaseRelease(lease_ids=[1, 2])),
        reply(accept=stage_pb2.AcceptTickets(lease_id=1, acceptance=1)),
        reply(credit=stage_pb2.CreditGrant(key=key_to_wire(_SHARED_KEY), credit_limit_bytes=1 << 20)),
        reply(resync=stage_pb2.EdgeResync(key=key, error=error, failed=chunk_pb2.CONNECTOR_SHM)),
        reply(rejected=stage_pb2.EdgeRejected(key=key, error=error)),
    ]
    welcome = stage_pb2.PutChunkResponse(welcome=hello)
    made = [[welcome, *(stage_pb2.PutChunkResponse(replies=[each]) for each in part)] for part in (first, shared)]
    return [join([each.SerializeToString() for each in messages]) for messages in made]


# -- a replica


class _SilentCall:
    """A channel and its only call, on which nothing arrives."""

    def __init__(self) -> None:
        self._over = asyncio.Event()

    def stream_stream(self, *_: object) -> Any:
        return lambda: self

    async def read(self) -> None:
        await self._over.wait()

    async def write(self, data: bytes) -> None:
        """Drops a message."""

    async def done_writing(self) -> None:
        """Does nothing."""

    async def code(self) -> None:
        """Returns at once, because the call is over."""

    def cancel(self) -> None:
        self._over.set()


def read_answers(data: bytes, pipeline: Pipeline) -> bool:
    """The messages of a replica that executes a step of stage relay, which are also read as its other answers.

    Returns whether the step has finished.
    """
    return asyncio.run(_execute(data, pipeline))


async def _execute(data: bytes, pipeline: Pipeline) -> bool:
    fleet, member = Fleet(pipeline, []), Member("relay", "h:1", "relay-0")
    fleet.join(member)
    replica = fleet.create_replica(member, cast("Any", None))
    fleet.registry.add(replica)
    route, changed = pipeline.route(["text"]), Notifier()
    states: Any = {
        name: StepState(step=PlannedStep(stage, replica, lambda: None), attempt=1, budget=CheckpointBudget(1 << 20))
        for name, stage in pipeline.stages.items()
    }
    state = states["relay"]
    state.notes = StepNotes(stage="relay", replica="relay-0", attempt=1, began_s=0.0, clock=time.monotonic)
    state.phase = Phase.STARTING
    request = ValidRequest("r", request_pb2.Input(), request_pb2.Parameters(), ())
    calls = StepCalls(
        request,
        route,
        states,
        record=RequestRecord(),
        failures=Failures(changed),
        changed=changed,
        input_producer="@input",
    )
    errors = ReplicaErrors(stage="relay", replica="relay-0", endpoint="h:1")
    silent: Any = _SilentCall()
    steps = StepStream(silent, errors, execute_alone=_execute_alone)
    take = partial(calls.take, state, 1)
    running = asyncio.create_task(steps.execute(stage_pb2.ExecuteStepRequest(), timeout_s=9, take=take))
    await asyncio.sleep(0)
    readers: dict[Any, Any] = {
        stage_pb2.DescribeResponse: partial(fleet.admit, replica),
        stage_pb2.WatchLoadResponse: replica.record_load,
        stage_pb2.ProbeEdgeResponse: probe_from_wire,
    }
    try:
        for message in split(data):
            _reported(lambda message=message: steps.received(message))
            for kind, read in readers.items():
                _reported(lambda kind=kind, read=read, message=message: _checked(errors.read(kind, message), read))
    finally:
        await steps.close()
        (outcome,) = await asyncio.gather(running, return_exceptions=True)
    if isinstance(outcome, StagemeshError):
        to_status(outcome)
    elif outcome is not None:
        raise outcome
    return state.phase is Phase.FINISHED


async def _execute_alone(*_: object) -> None:
    """Is called after an answer that cannot be read, because only one of the steps is at fault."""
    raise UnavailableError("no replica listens here", reason="REPLICA_LOST")


def _checked(message: Any, read: Any) -> None:
    if not isinstance(message, stage_pb2.ProbeEdgeResponse):
        check_names(message)
    read(message)


def _reported(read: Any) -> None:
    """Reads an answer. The error of a bad one must have a status."""
    try:
        read()
    except StagemeshError as exc:
        to_status(exc)


def answer_seeds(pipeline: Pipeline) -> list[bytes]:
    """Returns the answers of a replica that finishes a step, and its other answers."""
    event = stage_pb2.ExecuteStepResponse
    checkpoint = stage_pb2.Checkpoint(engine_steps=1, token_ids=[1, 2], outputs={"text": 2}, rows={"text": 2})
    usage = request_pb2.Usage(output_tokens=2)
    events = [
        event(accepted=stage_pb2.StepAccepted()),
        event(progress=stage_pb2.StepProgress(engine_steps=1, total_engine_steps=3)),
        event(output=request_pb2.Output(name="text", text="hi")),
        event(checkpoint=checkpoint),
        event(spans=stage_pb2.StepSpans(spans=[stage_pb2.StepSpan()])),
        event(finished=stage_pb2.StepFinished(usage=usage)),
    ]
    paused = [events[0], event(paused=stage_pb2.StepPaused(checkpoint=checkpoint))]
    ended = stage_pb2.StepMessage(call=1, ended=stage_pb2.StepEnded())
    failed = stage_pb2.StepMessage(call=1, ended=stage_pb2.StepEnded(error=chunk_pb2.Error(code=13, retry_after_s=1)))
    described = ready_description("relay", pipeline=pipeline, host="h", zone="z")
    described.replica, described.incarnation = "relay-0", "i"
    probe = stage_pb2.ProbeEdgeResponse(
        connector=chunk_pb2.CONNECTOR_GRPC,
        refusals=[stage_pb2.ConnectorRefusal(connector=chunk_pb2.CONNECTOR_SHM, error=chunk_pb2.Error(code=9))],
    )
    load = stage_pb2.WatchLoadResponse(running=1, work_s=2.0, adapters=["x"])
    closing = stage_pb2.ExecuteStepsResponse(closing=True)
    return [
        join([each.SerializeToString() for each in messages])
        for messages in (
            [*map(_event, events), _message(ended)],
            [*map(_event, paused), _message(failed), closing],
            [described, load, probe, *map(_event, events)],
        )
    ]


def _event(event: stage_pb2.ExecuteStepResponse) -> stage_pb2.ExecuteStepsResponse:
    return _message(stage_pb2.StepMessage(call=1, event=event))


def _message(message: stage_pb2.StepMessage) -> stage_pb2.ExecuteStepsResponse:
    return stage_pb2.ExecuteStepsResponse(messages=[message])
