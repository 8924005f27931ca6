"""The stage as a producer: its streams, credit, fragments, and what it does about answers and broken connections."""

import asyncio
import contextlib
from functools import partial
from typing import Any

from stagemesh.common.errors import Code
from stagemesh.stage_conformance.cases import FURTHER, RECOVERY, MismatchError, Needs, case, expect, expect_equal
from stagemesh.stage_conformance.content import UNKNOWN_FIELD
from stagemesh.stage_conformance.played_consumer import Consumer, Received
from stagemesh.stage_conformance.suites.calls import cancel
from stagemesh.stage_conformance.suites.consumer import LARGE_ERROR, expect_cause, large_error
from stagemesh.stage_conformance.trial import ROWS, Step, Trial, expect_contents, require
from stagemesh.v1 import chunk_pb2, stage_pb2
from stagemesh.v1.protocol_pb2 import Protocol

OUTPUT = Needs.OUTPUT
HELLO = "A flow: Hello and Welcome"
_PRODUCER = "The producer"
_CREDIT = "Credit (checklist 17)"
_KINDS = "Versions and unknown kinds (checklist 22)"
Reply = stage_pb2.PutReply


async def sending(trial: Trial, **settings: Any) -> tuple[Step, Consumer]:
    """Starts a step that sends to a played consumer, and gives it its whole input."""
    consumer = await trial.consumer(**settings)
    step = await trial.call(trial.request(consumer)).accepted()
    # The step may have failed already, because of what its consumer does.
    with contextlib.suppress(MismatchError):
        await trial.supply()
    return step, consumer


async def delivered(trial: Trial, step: Step, consumer: Consumer) -> None:
    """Waits until the step has finished. Its output must be right."""
    await step.finished(within_s=20)
    consumer.check()
    reference = trial.stage.reference
    if reference is not None:
        wanted = reference.contents
        expect_contents("the output of the first good request", wanted, consumer.contents(trial.request_id))


@case("producer.hello", HELLO, OUTPUT)
async def hello(trial: Trial) -> None:
    step, consumer = await sending(trial)
    await delivered(trial, step, consumer)
    found, described = consumer.connections[0].hello, trial.stage.described
    assert found is not None
    for name in ("replica", "incarnation", "pipeline", "generation"):
        expect_equal(f"`{name}` of Hello", getattr(described, name), getattr(found, name))
    expect(1 <= found.protocol.lowest_version <= 1 <= found.protocol.highest_version, "version 1", found.protocol)


@case("producer.waits-for-welcome", HELLO, OUTPUT)
async def waits_for_welcome(trial: Trial) -> None:
    consumer = await trial.consumer(welcomes=False)
    step = await trial.call(trial.request(consumer)).accepted()
    await trial.supply()
    await consumer.until(lambda: consumer.connections and consumer.connections[0].hello, "Hello")
    await asyncio.sleep(0.5)
    expect(not consumer.connections[0].items, "no items before Welcome", consumer.came)
    await consumer.connections[0].write(stage_pb2.PutChunkResponse(welcome=consumer.welcome()))
    await delivered(trial, step, consumer)


_PROTOCOLS = {"later": Protocol(lowest_version=8, highest_version=9), "none": None}


@case("producer.refuses-welcome", f"{HELLO}: a producer checks Welcome (checklist 5)", OUTPUT, variants=_PROTOCOLS)
async def refuses_welcome(trial: Trial, protocol: Protocol | None) -> None:
    step, consumer = await sending(trial, protocol=protocol)
    await step.failed(Code.FAILED_PRECONDITION, "NO_COMMON_VERSION", within_s=20)
    expect(not any(each.items for each in consumer.connections), "no items", consumer.came)


@case("producer.later-welcome", f"{HELLO}: ignore features that you do not know", OUTPUT)
async def later_welcome(trial: Trial) -> None:
    protocol = Protocol(lowest_version=1, highest_version=9, features=["conformance"], max_message_bytes=2 << 20)
    await delivered(trial, *await sending(trial, protocol=protocol))


@case("producer.open", f"{_PRODUCER}: openings count from 1", OUTPUT)
async def opens(trial: Trial) -> None:
    step, consumer = await sending(trial)
    await delivered(trial, step, consumer)
    item = consumer.connections[0].items[0]
    expect(item.HasField("open"), "`open` as the first item", consumer.log[:4])
    expect_equal("the opening", 1, item.open.opening)
    expect_equal("the key", trial.key_in().request_id, item.open.key.request_id)
    expect_equal("the edge", trial.edge_out, item.open.key.edge)


@case(
    "producer.waits-for-opened", f"{_PRODUCER}: nothing is sent before `opened`, and another number is ignored", OUTPUT
)
async def waits_for_opened(trial: Trial) -> None:
    withheld = list[Any]()

    def answer(consumer: Consumer, item: stage_pb2.PutItem) -> Any:
        if withheld or not item.HasField("open"):
            return None
        reply = next(iter(consumer.take(item)))
        withheld.append((consumer.connection, reply))
        wrong = Reply()
        wrong.CopyFrom(reply)
        wrong.opened.opening += 5
        return [wrong]

    step, consumer = await sending(trial, answer=answer)
    await consumer.until(lambda: withheld, "`open`")
    await asyncio.sleep(0.5)
    kinds = {each.WhichOneof("item") for each in consumer.connections[0].items}
    expect(kinds == {"open"}, "nothing but `open`", kinds)
    connection, reply = withheld[0]
    await connection.reply(reply)
    await delivered(trial, step, consumer)


@case("producer.unknown-fields", f"{_KINDS}: a field of a message is ignored", OUTPUT)
async def unknown_fields(trial: Trial) -> None:
    def answer(consumer: Consumer, item: stage_pb2.PutItem) -> Any:
        replies = list(consumer.take(item))
        for each in replies:
            for message in (each, getattr(each, str(each.WhichOneof("reply")))):
                message.MergeFromString(UNKNOWN_FIELD)
        return replies

    await delivered(trial, *await sending(trial, answer=answer))


# -- content


@case("producer.selects", "A step: the tensors of the binding are selected (checklist 20)", OUTPUT)
async def selects(trial: Trial) -> None:
    require(trial.stage.cut_tensor, "the stage emits nothing that has rows")
    step, consumer = await sending(trial)
    await delivered(trial, step, consumer)
    names = {tensor.name for each in consumer.only().chunks for tensor in each.data.tensors}
    expect(names <= {trial.stage.cut_tensor}, f"the tensor {trial.stage.cut_tensor!r} alone", names)


@case("producer.fragments", "Fragments; inline_limit_bytes of Welcome (checklist 14)", OUTPUT)
async def sends_fragments(trial: Trial) -> None:
    await delivered(trial, *await sending(trial, inline_limit_bytes=0))


@case("producer.large-chunk", "Fragments: at most 1 MiB each; Protocol.max_message_bytes", Needs.INPUT, OUTPUT)
async def large_chunk(trial: Trial) -> None:
    inputs, reference = trial.inputs, trial.stage.reference
    made = sum(map(len, reference.contents.values())) if reference is not None else 0
    require(
        made and inputs.row_bytes, "nothing is known of the sizes of its output, or the accepted tensors have no rows"
    )
    # Three chunks of these rows make an output of about 3 MiB.
    rows = ROWS * (3 << 20) // made + 1
    require(rows * inputs.row_bytes < 2 << 20, "the input would be large")
    protocol = Protocol(lowest_version=1, highest_version=1, max_message_bytes=2 << 20)
    consumer = await trial.consumer(protocol=protocol, inline_limit_bytes=8 << 20)
    request = trial.request(consumer)
    request.outputs[0].policy.whole.SetInParent()
    step = await trial.call(request).accepted()
    await trial.feed(await trial.stream(), rows=rows)
    await step.finished(within_s=20)
    consumer.check()


@case("producer.checksum", "ChunkData.checksum: if it is set, it is right", OUTPUT, level=FURTHER)
async def checksum(trial: Trial) -> None:
    import zlib

    step, consumer = await sending(trial)
    await delivered(trial, step, consumer)
    for each in consumer.only().chunks:
        if each.data.checksum.algorithm == chunk_pb2.CHECKSUM_ALGORITHM_CRC32:
            expect_equal("the checksum", zlib.crc32(b"".join(each.contents)), each.data.checksum.value)


# -- credit


@case("producer.credit-bytes", f"{_CREDIT}: bytes", OUTPUT)
async def credit_bytes(trial: Trial) -> None:
    step, consumer = await sending(trial, raises=False, limit_bytes=0, limit_chunks=1 << 30)
    flow = await consumer.arrived(lambda each: each.openings, "`open`")
    await asyncio.sleep(0.3)
    sized = [each for each in flow.chunks if each.size_bytes]
    expect(not sized, "no chunk with bytes without credit", consumer.came)
    for limit in range(1, 2000, 97):
        await consumer.raise_limits(limit_bytes=limit)
        await asyncio.sleep(0)
    await consumer.raise_limits(limit_bytes=1 << 40)
    await delivered(trial, step, consumer)


@case("producer.credit-chunks", f"{_CREDIT}: the number of data chunks", OUTPUT)
async def credit_chunks(trial: Trial) -> None:
    trial.require_chunks()
    step, consumer = await sending(trial, raises=False, limit_bytes=1 << 40, limit_chunks=1)
    flow = await consumer.arrived(lambda each: len(each.chunks) == 1, "one chunk")
    await asyncio.sleep(0.3)
    expect(len(flow.chunks) == 1, "one chunk with credit for one", consumer.came)
    for limit in range(2, 20):
        await consumer.raise_limits(chunks=limit)
        await consumer.arrived(partial(_has, limit), f"chunk {limit - 1}")
        if flow.end:
            break
    await consumer.raise_limits(chunks=1 << 30)
    await delivered(trial, step, consumer)


def _has(count: int, flow: Received) -> bool:
    return len(flow.chunks) >= count or flow.end is not None


@case("producer.credit-by-ack", f"{_CREDIT}: ChunkAck may raise the limits", OUTPUT)
async def credit_by_ack(trial: Trial) -> None:
    await delivered(trial, *await sending(trial, window_bytes=1 << 20, window_chunks=1))


@case("producer.demand", f"{_CREDIT}: `demand` for a chunk above half the window", OUTPUT)
async def demand(trial: Trial) -> None:
    # The window is smaller than each chunk.
    step, consumer = await sending(trial, window_bytes=1)
    await step.finished(within_s=20)
    flow = consumer.only()
    sizes = [each.size_bytes for each in flow.chunks]
    expect(
        set(sizes) <= set(flow.demands) | {0, 1}, f"a demand for each of the sizes {sorted(set(sizes))}", flow.demands
    )
    consumer.check()


# -- answers


@case("producer.opened-above-sent", f"{_PRODUCER}: a `next_seq` above what you sent fails the flow", OUTPUT)
async def opened_above_sent(trial: Trial) -> None:
    def answer(consumer: Consumer, item: stage_pb2.PutItem) -> Any:
        replies = list(consumer.take(item))
        if item.HasField("open"):
            replies[0].opened.next_seq = 1 << 40
        return replies

    step, _ = await sending(trial, answer=answer)
    await step.failed(Code.INVALID_ARGUMENT, "INVALID_CHUNK")


@case(
    "producer.opened-below-acknowledged",
    f"{_PRODUCER}: a `next_seq` below what was acknowledged fails the flow",
    OUTPUT,
)
async def opened_below_acknowledged(trial: Trial) -> None:
    trial.require_chunks()

    def answer(consumer: Consumer, item: stage_pb2.PutItem) -> Any:
        if item.chunk.seq > 1:
            return []
        replies = list(consumer.take(item))
        if item.HasField("open") and item.open.opening > 1:
            replies[0].opened.next_seq = 0
        elif item.chunk.seq == 1 and len(consumer.only().openings) == 1:
            replies.append(_resync(consumer.flow(item.chunk.key)))
        return replies

    step, _ = await sending(trial, answer=answer)
    await step.failed(Code.INVALID_ARGUMENT, "INVALID_CHUNK")


def _resync(flow: Received) -> Reply:
    error = chunk_pb2.Error(code=Code.INVALID_ARGUMENT, reason="SEQUENCE_GAP", message="played")
    return Reply(resync=stage_pb2.EdgeResync(key=flow.key, error=error))


@case("producer.rejected-large-error", f"{LARGE_ERROR}, also one of `rejected`", OUTPUT)
async def rejected_large_error(trial: Trial) -> None:
    def answer(consumer: Consumer, item: stage_pb2.PutItem) -> Any:
        rejected = stage_pb2.EdgeRejected(key=consumer.flow(item.open.key).key, error=large_error())
        return [Reply(rejected=rejected)] if item.HasField("open") else []

    step, _ = await sending(trial, answer=answer)
    await expect_cause(step)


@case("producer.resync-limit", f"{_PRODUCER}: more than 10 resyncs without a new acknowledgement fail the flow", OUTPUT)
async def resync_limit(trial: Trial) -> None:
    count = list[int]()

    def answer(consumer: Consumer, item: stage_pb2.PutItem) -> Any:
        if item.HasField("open"):
            count.append(1)
            return [*consumer.take(item), _resync(consumer.flow(item.open.key))]
        return []

    step, consumer = await sending(trial, answer=answer)
    await step.failed(Code.INVALID_ARGUMENT, "INVALID_CHUNK", within_s=20)
    expect(len(count) == 11, "11 openings before the flow fails", consumer.log)


@case("producer.silence", f"{_PRODUCER}: silence for 2 s, then `open` again (checklist 18)", OUTPUT)
async def silence(trial: Trial) -> None:
    lost = list[int]()

    def answer(consumer: Consumer, item: stage_pb2.PutItem) -> Any:
        if item.HasField("open") and not lost:
            lost.append(1)
            return []
        return None

    step, consumer = await sending(trial, answer=answer)
    await consumer.arrived(lambda each: each.openings, "a second `open` after 2 s of silence", within_s=6)
    await delivered(trial, step, consumer)


@case("producer.lost-ack", f"{_PRODUCER}: silence after a chunk", OUTPUT)
async def lost_ack(trial: Trial) -> None:
    def answer(consumer: Consumer, item: stage_pb2.PutItem) -> Any:
        return None if item.HasField("open") or len(consumer.only().openings) >= 2 else []

    step, consumer = await sending(trial, answer=answer)
    await delivered(trial, step, consumer)
    expect(len(consumer.only().openings) >= 2, "a second `open` after a lost chunk", consumer.came)


@case("producer.aborts", f"{_PRODUCER}: a step that is cancelled sends `abort` (checklist 10)", OUTPUT, level=RECOVERY)
async def aborts(trial: Trial) -> None:
    consumer = await trial.consumer(raises=False, limit_bytes=1 << 30, limit_chunks=1)
    await trial.call(trial.request(consumer)).accepted()
    if trial.inputs.tensors:
        await (await trial.stream()).open(trial.key_in())
    await consumer.arrived(lambda each: each.openings, "`open`")
    await cancel(trial)
    flow = await consumer.arrived(lambda each: each.abort, "`abort`")
    assert flow.abort is not None
    expect_equal("the code of `abort`", Code.CANCELLED, flow.abort.code)
    consumer.check()


@case("producer.slow-consumer", f"{_CREDIT}: one that never grants credit blocks the request, and nothing else", OUTPUT)
async def slow_consumer(trial: Trial) -> None:
    step, consumer = await sending(trial, raises=False)
    await consumer.arrived(lambda each: each.openings, "`open`")
    trial.expect_same(await trial.good())
    expect(not step.is_over, "the blocked step goes on", step.came)
    await consumer.raise_limits(limit_bytes=1 << 40, chunks=1 << 30)
    await delivered(trial, step, consumer)
