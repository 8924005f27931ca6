"""The stage as a consumer: streams, flows, credit, and unknown kinds. Test vectors have the other cases."""

import asyncio
from collections.abc import Callable
from typing import Any

import grpc

from stagemesh.common.errors import Code
from stagemesh.stage_conformance.cases import FURTHER, RECOVERY, MismatchError, Needs, case, expect, expect_equal
from stagemesh.stage_conformance.content import OWN_REASON, UNKNOWN_FIELD, fragments_of
from stagemesh.stage_conformance.peers import Consumer, Flow, Stream
from stagemesh.stage_conformance.suites.steps import running
from stagemesh.stage_conformance.trial import Step, Trial, require
from stagemesh.v1 import chunk_pb2, stage_pb2, tensor_pb2
from stagemesh.v1.protocol_pb2 import Protocol

INPUT = Needs.INPUT
_LARGE_WINDOW_BYTES = 64 << 20
_TABLE = "The consumer: the table of items"
_HELLO = "A flow: Hello and Welcome (checklist 5)"
_CREDIT = "Credit (checklist 13)"
_KINDS = "Versions and unknown kinds (checklist 22)"


async def started(trial: Trial, *, attempt: int = 1) -> tuple[Step, Stream, Flow]:
    """Starts a step, and opens its incoming flow."""
    consumer = await trial.consumer() if trial.stage.has_output else None
    request = trial.request(consumer, attempt=attempt)
    step = await trial.call(request).accepted()
    stream = await trial.stream()
    return step, stream, await stream.open(trial.key_in(attempt))


async def complete(step: Step, flow: Flow, *, chunks: int = 2) -> None:
    """Sends further chunks and the end of a flow, and waits for the end of the step."""
    await more(flow, chunks)
    await flow.end()
    await flow.committed()
    await step.finished()


async def more(flow: Flow, chunks: int = 1) -> None:
    """Sends further chunks of 4 rows."""
    for _ in range(chunks):
        await flow.send(flow.stream.inputs.chunk(len(flow.sent), 4))
    await flow.acknowledged(len(flow.sent))


# -- Hello and Welcome


@case("consumer.welcome", _HELLO, INPUT)
async def welcome(trial: Trial) -> None:
    stream = await trial.stream()
    found, described = stream.welcome, trial.stage.described
    assert found is not None
    expect_equal("the replica", described.replica, found.replica)
    expect_equal("the incarnation", described.incarnation, found.incarnation)
    expect(
        found.protocol.lowest_version <= 1 <= found.protocol.highest_version,
        "a protocol with version 1",
        found.protocol,
    )
    expect(found.protocol.lowest_version >= 1, "a lowest version of at least 1", found.protocol)
    expect(not found.held_lease_ids, "no leases", list(found.held_lease_ids))


_REFUSED_HELLO: dict[str, tuple[dict[str, Any], Code, str]] = {
    "pipeline": ({"pipeline": "conformance.none"}, Code.FAILED_PRECONDITION, "WRONG_PIPELINE"),
    "generation": ({"generation": "conformance.none"}, Code.FAILED_PRECONDITION, "WRONG_GENERATION"),
    "no-replica": ({"replica": ""}, Code.INVALID_ARGUMENT, "NO_HELLO"),
    "no-incarnation": ({"incarnation": ""}, Code.INVALID_ARGUMENT, "NO_HELLO"),
    "no-protocol": ({"protocol": None}, Code.FAILED_PRECONDITION, "NO_COMMON_VERSION"),
    "later-protocol": (
        {"protocol": Protocol(lowest_version=8, highest_version=9)},
        Code.FAILED_PRECONDITION,
        "NO_COMMON_VERSION",
    ),
}


@case("consumer.refuses-hello", _HELLO, INPUT, variants=_REFUSED_HELLO)
async def refuses_hello(trial: Trial, variant: tuple[dict[str, Any], Code, str]) -> None:
    changes, code, reason = variant
    producer = trial.producer()
    stream = await producer.raw_stream()
    await stream.put(hello=producer.hello(**changes))
    await stream.refused(code, reason)
    expect(stream.welcome is None, "no Welcome", stream.came)


@case("consumer.no-hello-first", _HELLO, INPUT)
async def no_hello_first(trial: Trial) -> None:
    stream = await trial.producer().raw_stream()
    key = trial.key_in()
    await stream.put(stage_pb2.PutItem(open=stage_pb2.OpenEdge(key=key, connector=chunk_pb2.CONNECTOR_GRPC, opening=1)))
    await stream.refused(Code.INVALID_ARGUMENT, "NO_HELLO")


@case("consumer.no-hello", "Time limits: Hello within 10 s of the start of a stream", INPUT, waits_s=10)
async def no_hello(trial: Trial) -> None:
    stream = await trial.producer().raw_stream()
    # Without a message, gRPC may not even start the call.
    await asyncio.sleep(0)
    await stream.until(lambda: stream.ended, "the end of a stream without Hello", within_s=13.0)


@case("consumer.hello-features", f"{_HELLO}: ignore features that you do not know", INPUT)
async def hello_features(trial: Trial) -> None:
    producer = trial.producer()
    stream = await producer.raw_stream()
    protocol = Protocol(lowest_version=1, highest_version=5, features=["x" * 100, "offers"], max_message_bytes=8 << 20)
    await stream.put(hello=producer.hello(protocol=protocol))
    await stream.until(lambda: stream.welcome, "`welcome`")


# -- which flows are accepted


def _open(key: chunk_pb2.EdgeKey) -> stage_pb2.PutItem:
    return stage_pb2.PutItem(open=stage_pb2.OpenEdge(key=key, connector=chunk_pb2.CONNECTOR_GRPC, opening=1))


_ITEMS: dict[str, Callable[[chunk_pb2.EdgeKey], stage_pb2.PutItem]] = {
    "open": _open,
    "chunk": lambda key: stage_pb2.PutItem(chunk=chunk_pb2.Chunk(key=key, data=chunk_pb2.ChunkData())),
    "fragment": lambda key: stage_pb2.PutItem(fragment=chunk_pb2.ChunkFragment(key=key, total_bytes=1, payload=b"x")),
    "demand": lambda key: stage_pb2.PutItem(demand=stage_pb2.CreditDemand(key=key, size_bytes=1)),
}


@case("consumer.unknown-flow", f"{_TABLE}: of an unknown flow", INPUT, variants=_ITEMS)
async def unknown_flow(trial: Trial, item: Callable[[chunk_pb2.EdgeKey], stage_pb2.PutItem]) -> None:
    stream = await trial.stream()
    flow = stream.flow(trial.key_in())
    await stream.put(item(flow.key))
    error = await flow.rejected(Code.NOT_FOUND, "UNKNOWN_FLOW")
    expect_equal("the metadata `edge`", trial.edge_in, error.metadata.get("edge"))


_KEYS: dict[str, tuple[dict[str, Any], Code, str]] = {
    "unknown-edge": ({"edge": "conformance.none->x"}, Code.NOT_FOUND, "UNKNOWN_FLOW"),
    "unknown-request": ({"request_id": "conformance.none"}, Code.NOT_FOUND, "UNKNOWN_FLOW"),
    "lower-attempt": ({"attempt": 2}, Code.FAILED_PRECONDITION, "STALE_ATTEMPT"),
    "higher-attempt": ({"attempt": 4}, Code.NOT_FOUND, "UNKNOWN_FLOW"),
}


@case("consumer.refuses-open", f"{_TABLE}: of an unknown flow, STALE_ATTEMPT", INPUT, variants=_KEYS)
async def refuses_open(trial: Trial, variant: tuple[dict[str, Any], Code, str]) -> None:
    changes, code, reason = variant
    step, stream, flow = await started(trial, attempt=3)
    expected: dict[str, Any] = {"request_id": trial.request_id, "edge": trial.edge_in, "attempt": 3}
    other = stream.flow(chunk_pb2.EdgeKey(**{**expected, **changes}))
    await other.ask_open()
    await other.rejected(code, reason)
    await complete(step, flow)


async def _refuses_stranger(trial: Trial) -> None:
    """Opens the flow of the trial as another replica."""
    producer = trial.producer()
    producer.name += ".other"
    stranger = (await producer.stream()).flow(trial.key_in())
    await stranger.ask_open()
    await stranger.rejected(Code.NOT_FOUND, "UNKNOWN_FLOW")


@case("consumer.other-replica", f"{_TABLE}: from another replica", INPUT)
async def other_replica(trial: Trial) -> None:
    step, _, flow = await started(trial)
    await _refuses_stranger(trial)
    await complete(step, flow)


@case("consumer.other-incarnation", f"{_TABLE}: STALE_INCARNATION; Hello of another incarnation", INPUT)
async def other_incarnation(trial: Trial) -> None:
    _, _, flow = await started(trial)
    await more(flow)
    again = (await trial.stream(incarnation="second")).flow(trial.key_in())
    await again.ask_open()
    await again.rejected(None, "STALE_INCARNATION", "PEER_LOST")


@case("consumer.committed-to-another", f"{_TABLE}: committed, of another replica", INPUT)
async def committed_to_another(trial: Trial) -> None:
    step, _, flow = await started(trial)
    await complete(step, flow)
    await _refuses_stranger(trial)


# -- streams


@case("consumer.stream-breaks", "Broken connections (checklist 24)", INPUT)
async def stream_breaks(trial: Trial) -> None:
    step, stream, flow = await started(trial)
    await more(flow, 2)
    stream.cut()
    again = (await trial.stream()).flow(trial.key_in())
    again.sent |= flow.sent
    opened = await again.open(2)
    expect_equal("next_seq", 2, opened.next_seq)
    await complete(step, again)


@case("consumer.stream-ends", "Broken connections: a stream that ends does not end its flows (checklist 24)", INPUT)
async def stream_ends(trial: Trial) -> None:
    step, stream, flow = await started(trial)
    await more(flow)
    await stream.call.done_writing()
    again = (await trial.stream()).flow(trial.key_in())
    again.sent |= flow.sent
    expect_equal("next_seq", 1, (await again.open(2)).next_seq)
    await complete(step, again)


@case("consumer.flow-moves", f"{_TABLE}: unless the flow has moved to another stream (checklist 12)", INPUT)
async def flow_moves(trial: Trial) -> None:
    step, first, flow = await started(trial)
    await more(flow)
    second = await trial.stream()
    moved = second.flow(trial.key_in())
    moved.sent |= flow.sent
    expect_equal("next_seq", 1, (await moved.open(2)).next_seq)
    replies = len(flow.replies)
    await flow.send(_inputs(trial).chunk(1, 4), 1)
    # A further flow, whose answer comes after everything that the chunk might cause.
    barrier = first.flow(trial.key_in(request_id=f"{trial.request_id}.none"))
    await barrier.ask_open()
    await barrier.rejected(Code.NOT_FOUND, "UNKNOWN_FLOW")
    kinds = [each.WhichOneof("reply") for each in flow.replies[replies:]]
    expect(not {"resync", "rejected", "ack"} & set(kinds), "nothing about the flow on its former stream", kinds)
    await complete(step, moved)


@case("consumer.two-streams", "The consumer: several streams of one producer (checklist 12)", INPUT)
async def two_streams(trial: Trial) -> None:
    ids = [f"{trial.request_id}.{number}" for number in range(2)]
    streams = [await trial.stream() for _ in ids]
    for each in ids:
        consumer = await trial.consumer() if trial.stage.has_output else None
        await trial.call(trial.request(consumer, request_id=each)).accepted()
    flows = await asyncio.gather(
        *(trial.feed(stream, key=trial.key_in(request_id=each)) for stream, each in zip(streams, ids, strict=True))
    )
    await asyncio.gather(*(flow.committed() for flow in flows))


@case("consumer.shared-stream", "Errors: an error of one flow never ends the stream (checklist 23)", INPUT)
async def shared_stream(trial: Trial) -> None:
    step, stream, flow = await started(trial)
    other_id = f"{trial.request_id}.other"
    await trial.call(trial.request(request_id=other_id)).accepted()
    bad = await stream.open(trial.key_in(request_id=other_id))
    await bad.end(count=5)
    await bad.rejected(Code.INVALID_ARGUMENT, "DIGEST_MISMATCH")
    await complete(step, flow)


@case("consumer.interleaved", "Fragments of other flows may be between them", INPUT)
async def interleaved(trial: Trial) -> None:
    step, stream, flow = await started(trial)
    other_id = f"{trial.request_id}.other"
    consumer = await trial.consumer() if trial.stage.has_output else None
    other_step = await trial.call(trial.request(consumer, request_id=other_id)).accepted()
    other = await stream.open(trial.key_in(request_id=other_id))
    payload = _inputs(trial).chunk(0, 8)
    content = b"".join(payload.contents)
    size = max(1, len(content) // 3)
    for pair in zip(*(fragments_of(each.key, 0, content, size=size) for each in (flow, other)), strict=True):
        for item in pair:
            await stream.put(item)
    for each in (flow, other):
        await each.send_data(payload.streamed(), 0)
        await each.acknowledged(1)
    for each, ended in ((flow, step), (other, other_step)):
        await each.end()
        await ended.finished()


@case("consumer.malformed", "Errors: the stream ends for a malformed message, and others go on", INPUT)
async def malformed(trial: Trial) -> None:
    step, _, flow = await started(trial)
    await more(flow)
    producer = trial.producer()
    async with trial.own_channel() as channel:
        opener: Any = channel.stream_stream
        call = opener("/stagemesh.v1.StageService/PutChunk")()
        await call.write(stage_pb2.PutChunkRequest(hello=producer.hello()).SerializeToString())
        await call.write(b"\x12\xff\xff\xff\xff\x0f")
        try:
            async with asyncio.timeout(5):
                while await call.read() is not grpc.aio.EOF:
                    pass
        except grpc.aio.AioRpcError:
            pass
        except TimeoutError:
            raise MismatchError("the end of the stream", "the stream continues") from None
        call.cancel()
    await complete(step, flow)


@case("consumer.long-key", "A step: request_id and edge have at most 256 characters each", INPUT)
async def long_key(trial: Trial) -> None:
    stream = await trial.stream()
    await stream.put(_open(chunk_pb2.EdgeKey(request_id="r" * 257, edge="x", attempt=1)))
    await stream.until(lambda: stream.ended, "the end of the stream")


# -- credit


def _inputs(trial: Trial) -> Any:
    return trial.stage.inputs


@case("consumer.credit-in-opened", _CREDIT, INPUT)
async def credit_in_opened(trial: Trial) -> None:
    _, stream, _ = await started(trial)
    opened = stream.flows[0].all("opened")[0]
    expect(opened.window_bytes > 0, "window_bytes", opened.window_bytes)
    expect_equal("the limit of the first `opened`", opened.window_bytes, opened.credit_limit_bytes)
    expect(opened.credit_limit_chunks > 0, "credit_limit_chunks", opened.credit_limit_chunks)
    expect_equal("the connector", chunk_pb2.CONNECTOR_GRPC, opened.connector)


@case("consumer.credit-grows", f"{_CREDIT}: it grows as the engine reads", INPUT)
async def credit_grows(trial: Trial) -> None:
    step, stream, flow = await started(trial)
    opened = flow.all("opened")[0]
    require(opened.window_bytes <= _LARGE_WINDOW_BYTES, "the window is large")
    before = flow.limit_bytes
    await flow.send(trial.stage.inputs.chunk(0, 4, size_bytes=opened.window_bytes // 3))
    await stream.until(
        lambda: flow.limit_bytes > before, "a higher limit after a third of the window was read", within_s=15
    )
    expect(
        flow.limit_bytes <= flow.sent_bytes + opened.window_bytes,
        "at most the bytes read plus the window",
        flow.limit_bytes,
    )
    await flow.end()
    await step.finished()


@case("consumer.credit-exceeded-bytes", f"{_CREDIT}: checked for total_bytes at the first fragment", INPUT)
async def credit_exceeded_bytes(trial: Trial) -> None:
    _, stream, flow = await started(trial)
    limit = flow.limit_bytes
    fragment = chunk_pb2.ChunkFragment(key=flow.key, total_bytes=limit + 1, payload=b"x")
    await stream.put(stage_pb2.PutItem(fragment=fragment))
    await flow.rejected(Code.INVALID_ARGUMENT, "CREDIT_EXCEEDED", "CHUNK_TOO_LARGE")


@case("consumer.credit-exceeded-chunks", f"{_CREDIT}: the number of data chunks", INPUT)
async def credit_exceeded_chunks(trial: Trial) -> None:
    _, stream, flow = await started(trial)
    require(flow.limit_chunks <= 100_000, f"the limit of {flow.limit_chunks} chunks is large")
    inputs = _inputs(trial)
    require(inputs.row_bytes and inputs.row_bytes <= 64, "the accepted tensors have no small rows")
    while len(flow.sent) <= flow.limit_chunks + 200 and not flow.all("rejected"):
        data = {seq: inputs.chunk(seq, 1).inline() for seq in range(len(flow.sent), len(flow.sent) + 500)}
        items = [
            stage_pb2.PutItem(chunk=chunk_pb2.Chunk(key=flow.key, seq=seq, data=each)) for seq, each in data.items()
        ]
        flow.sent |= data
        await stream.put(*items)
        if len(flow.sent) > 2 * 100_000:
            break
        await asyncio.sleep(0)
    await stream.until(
        lambda: flow.all("rejected") or flow.acked >= len(flow.sent), "`rejected`, or more credit", within_s=20
    )
    if flow.all("rejected"):
        await flow.rejected(Code.INVALID_ARGUMENT, "CREDIT_EXCEEDED")
    else:
        expect(flow.limit_chunks >= flow.acked, "no acknowledgement beyond credit_limit_chunks", flow.limit_chunks)


@case("consumer.demand", f"{_CREDIT}: a chunk above half the window gets it by `demand`", INPUT)
async def demand(trial: Trial) -> None:
    step, stream, flow = await started(trial)
    window = flow.all("opened")[0].window_bytes
    require(window <= _LARGE_WINDOW_BYTES, "the window is large")
    await more(flow)
    # It lacks credit, unless the limit was raised by the few bytes that were sent.
    payload = trial.stage.inputs.chunk(1, 4, size_bytes=window)
    needed = flow.sent_bytes + payload.size_bytes
    await flow.put(demand=stage_pb2.CreditDemand(key=flow.key, size_bytes=payload.size_bytes))
    await stream.until(lambda: flow.limit_bytes >= needed, "the credit for the demanded chunk", within_s=15)
    await flow.send(payload)
    await flow.acknowledged(2, within_s=15)
    await flow.end()
    await step.finished()


async def _unread(trial: Trial, *, parts: int, chunks: int) -> tuple[Step, Consumer, Stream, Flow]:
    """Starts a step whose consumer grants no credit, and sends chunks that each take a part of the stage's window."""
    peer = await trial.consumer(raises=False)
    step = await trial.call(trial.request(peer, is_cut=False)).accepted()
    stream = await trial.stream()
    flow = await stream.open(trial.key_in())
    window = flow.all("opened")[0].window_bytes
    require(window <= _LARGE_WINDOW_BYTES, "the window is large")
    for number in range(chunks):
        await flow.send(trial.stage.inputs.chunk(number, 4, size_bytes=window // parts))
    await flow.acknowledged(chunks)
    await peer.arrived(lambda each: each.openings, "`open` of the outgoing flow")
    return step, peer, stream, flow


@case("consumer.slow-engine", f"{_CREDIT}: it grows only as the engine reads", INPUT, Needs.OUTPUT, level=FURTHER)
async def slow_engine(trial: Trial) -> None:
    step, peer, _, flow = await _unread(trial, parts=16, chunks=12)
    await asyncio.sleep(0.5)
    window = flow.all("opened")[0].window_bytes
    most = window + flow.sent_bytes // 2
    expect(flow.limit_bytes <= most, f"a limit of at most {most} while nothing can be sent", flow.limit_bytes)
    await flow.end()
    await peer.raise_limits(limit_bytes=1 << 40, chunks=1 << 30)
    await step.finished()


@case("consumer.credit-after-break", f"{_TABLE}: `opened` has the current credit limits", INPUT, Needs.OUTPUT)
async def credit_after_break(trial: Trial) -> None:
    step, peer, stream, flow = await _unread(trial, parts=4, chunks=3)
    stream.cut()
    # The stage notices the break, and reads what has arrived while no stream is open.
    await asyncio.sleep(0.2)
    await peer.raise_limits(limit_bytes=1 << 40, chunks=1 << 30)
    await asyncio.sleep(0.5)
    again = (await trial.stream()).flow(trial.key_in())
    again.sent |= flow.sent
    wanted, opening = flow.all("opened")[0].window_bytes + flow.sent_bytes // 2, 1
    try:
        async with asyncio.timeout(8):
            while again.limit_bytes < wanted:
                opening += 1
                await again.open(opening)
                await asyncio.sleep(0.05)
    except TimeoutError:
        raise MismatchError(f"a limit of at least {wanted}", str(again.limit_bytes)) from None
    await again.end()
    await step.finished()


# -- chunks


_UNKNOWN = "UNKNOWN_KIND"


def _located(**location: Any) -> Callable[[Any], None]:
    def change(tensor: Any) -> None:
        for name, value in location.items():
            getattr(tensor, name).CopyFrom(value)

    return change


_LOCATIONS: dict[str, tuple[Callable[[Any], object], tuple[str, ...]]] = {
    "device": (_located(device=tensor_pb2.DeviceRegion(kind="cuda_ipc", size_bytes=4)), (_UNKNOWN,)),
    "ticket": (
        lambda tensor: (
            tensor.ClearField("dtype"),
            tensor.ClearField("shape"),
            tensor.handover.CopyFrom(tensor_pb2.Handover(kind="conformance.none", time_limit_s=5)),
        ),
        ("TICKET_REFUSED", _UNKNOWN),
    ),
    "unknown": (lambda tensor: (tensor.ClearField("inline"), tensor.MergeFromString(UNKNOWN_FIELD)), (_UNKNOWN,)),
    "none": (lambda tensor: tensor.ClearField("inline"), ("INVALID_CHUNK", _UNKNOWN)),
    "shm-over-grpc": (
        _located(shm=tensor_pb2.ShmRegion(size_bytes=4, generation=1)),
        ("INVALID_CHUNK", "STALE_REGION", _UNKNOWN),
    ),
}


@case("consumer.refuses-location", f"{_KINDS}: Tensor.location", INPUT, variants=_LOCATIONS)
async def refuses_location(trial: Trial, variant: tuple[Callable[[Any], object], tuple[str, ...]]) -> None:
    change, reasons = variant
    step, _, flow = await started(trial)
    data = _inputs(trial).chunk(0, 4).inline()
    change(data.tensors[0])
    if data.tensors[0].WhichOneof("location") == "handover":
        data.size_bytes, data.lease_id = sum(len(each.inline) for each in data.tensors), 1
        data.tensors.append(data.tensors[0])
        del data.tensors[0]
    await flow.send_data(data, 0)
    await flow.rejected(None, *reasons)
    await step.failed(None)


def _unknown(message: Any) -> Any:
    message.MergeFromString(UNKNOWN_FIELD)
    return message


_KINDLESS: dict[str, tuple[Callable[[chunk_pb2.EdgeKey], stage_pb2.PutItem], tuple[str, ...]]] = {
    "no-content": (lambda key: _item(chunk=chunk_pb2.Chunk(key=key)), ("INVALID_CHUNK", _UNKNOWN)),
    "unknown-content": (lambda key: _item(chunk=_unknown(chunk_pb2.Chunk(key=key))), (_UNKNOWN,)),
    "unknown-item": (lambda key: _unknown(_item(key=key)), (_UNKNOWN,)),
}
_item = stage_pb2.PutItem


@case("consumer.refuses-item", f"{_KINDS}: PutItem, Chunk.content", INPUT, variants=_KINDLESS)
async def refuses_item(trial: Trial, variant: Any) -> None:
    make, reasons = variant
    _, stream, flow = await started(trial)
    await stream.put(make(flow.key))
    await flow.rejected(None, *reasons)


@case("consumer.ignorable-item", f"{_KINDS}: PutItem", INPUT)
async def ignorable_item(trial: Trial) -> None:
    step, stream, flow = await started(trial)
    await stream.put(_unknown(_item(key=flow.key, ignorable=True)), _unknown(_item(ignorable=True)))
    await complete(step, flow)


@case("consumer.unknown-item-without-key", f"{_KINDS}: PutItem", INPUT)
async def unknown_item_without_key(trial: Trial) -> None:
    stream = await trial.stream()
    await stream.put(_unknown(_item()))
    await stream.refused(Code.UNIMPLEMENTED, _UNKNOWN)


@case("consumer.unknown-fields", f"{_KINDS}: a field of a message is ignored", INPUT)
async def unknown_fields(trial: Trial) -> None:
    step, _, flow = await started(trial)
    data = _inputs(trial).chunk(0, 4).inline()
    for message in (data, data.tensors[0]):
        _unknown(message)
    await flow.send_data(data, 0)
    await flow.acknowledged(1)
    await complete(step, flow)


# -- ends


@case("consumer.abort-reason", "The consumer: `abort`; Errors: an error keeps its reason and `stage`", INPUT)
async def abort_reason(trial: Trial) -> None:
    step, peer, flow = await running(trial)
    assert flow is not None
    error = chunk_pb2.Error(
        code=Code.INVALID_ARGUMENT, reason=OWN_REASON, message="played", metadata={"stage": "upstream"}
    )
    abort = chunk_pb2.Chunk(key=flow.key, seq=1, abort=chunk_pb2.ChunkAbort(error=error))
    await flow.stream.put(stage_pb2.PutItem(chunk=abort))
    failed = await step.failed(Code.INVALID_ARGUMENT, OWN_REASON)
    stage = "the metadata `stage`, in which the error occurred first"
    expect_equal(stage, "upstream", failed.metadata.get("stage"))
    if peer is not None:
        passed_on = (await peer.arrived(lambda each: each.abort, "`abort` of the outgoing flow")).abort
        assert passed_on is not None
        expect_equal("the reason of `abort`", OWN_REASON, passed_on.reason)
        expect_equal(stage, "upstream", passed_on.metadata.get("stage"))


@case("consumer.not-read", "The consumer: a step that fails for good rejects its flows (NOT_READ)", INPUT, Needs.OUTPUT)
async def not_read(trial: Trial) -> None:
    step, peer, flow = await running(trial)
    assert peer is not None
    assert flow is not None
    outgoing = await peer.arrived(lambda each: each.openings, "`open` of the outgoing flow")
    error = chunk_pb2.Error(code=Code.INVALID_ARGUMENT, reason=OWN_REASON, message="played")
    await peer.connections[-1].reply(stage_pb2.PutReply(rejected=stage_pb2.EdgeRejected(key=outgoing.key, error=error)))
    # An engine that waits for input may notice the rejection when it sends the result.
    await flow.send(trial.stage.inputs.chunk(1, 4))
    await flow.rejected(Code.CANCELLED, "NOT_READ")
    await step.failed(Code.INVALID_ARGUMENT, OWN_REASON)


@case("consumer.chunk-after-end", f"{_TABLE}: a flow that was committed", INPUT)
async def chunk_after_end(trial: Trial) -> None:
    step, stream, flow = await started(trial)
    await complete(step, flow)
    await flow.send(_inputs(trial).chunk(2, 4), 3)
    await stream.until(lambda: len(flow.all("commit")) >= 2 or flow.all("rejected"), "`commit` again")
    expect(not flow.all("rejected"), "`commit` again", stream.came)


@case(
    "consumer.abort-of-lost-peer",
    "The consumer: wait 15 s for RebindStep if another producer may take over",
    INPUT,
    level=RECOVERY,
)
async def abort_of_lost_peer(trial: Trial) -> None:
    await trial.require_rebinding()
    step, stream, flow = await started(trial)
    error = chunk_pb2.Error(code=Code.UNAVAILABLE, reason="PEER_LOST", message="played")
    abort = chunk_pb2.Chunk(key=flow.key, seq=0, abort=chunk_pb2.ChunkAbort(error=error))
    await stream.put(stage_pb2.PutItem(chunk=abort))
    await flow.acknowledged(1)
    await asyncio.sleep(2.0)
    expect(not step.is_over, "a step that waits for RebindStep", step.came)
