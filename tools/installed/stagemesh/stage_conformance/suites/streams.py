"""The streams of producers: how they break, and how several of them share flows."""

import asyncio
from typing import Any

import grpc

from stagemesh.common.errors import Code
from stagemesh.stage_conformance.cases import MismatchError, case, expect, expect_equal
from stagemesh.stage_conformance.content import fragments_of
from stagemesh.stage_conformance.played_producer import Flow
from stagemesh.stage_conformance.suites.consumer import INPUT, TABLE, complete, more, open_item, started
from stagemesh.stage_conformance.trial import Trial
from stagemesh.v1 import chunk_pb2, stage_pb2


async def _moved(trial: Trial, flow: Flow) -> tuple[Flow, int]:
    """Opens a flow again on another stream. Returns it there, and the `next_seq` of the answer."""
    again = (await trial.stream()).flow(trial.key_in())
    again.sent |= flow.sent
    return again, (await again.open(2)).next_seq


@case("consumer.stream-breaks", "Broken connections (checklist 24)", INPUT)
async def stream_breaks(trial: Trial) -> None:
    step, stream, flow = await started(trial)
    await more(flow, 2)
    stream.cut()
    again, next_seq = await _moved(trial, flow)
    expect_equal("next_seq", 2, next_seq)
    await complete(step, again)


@case("consumer.stream-ends", "Broken connections: a stream that ends does not end its flows (checklist 24)", INPUT)
async def stream_ends(trial: Trial) -> None:
    step, stream, flow = await started(trial)
    await more(flow)
    await stream.call.done_writing()
    again, next_seq = await _moved(trial, flow)
    expect_equal("next_seq", 1, next_seq)
    await complete(step, again)


@case("consumer.flow-moves", f"{TABLE}: unless the flow has moved to another stream (checklist 12)", INPUT)
async def flow_moves(trial: Trial) -> None:
    step, first, flow = await started(trial)
    await more(flow)
    moved, next_seq = await _moved(trial, flow)
    expect_equal("next_seq", 1, next_seq)
    replies = len(flow.replies)
    await flow.send(trial.inputs.chunk(1, 4), 1)
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
        await trial.start(request_id=each)
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
    other_step, _ = await trial.start(request_id=other_id)
    other = await stream.open(trial.key_in(request_id=other_id))
    payload = trial.inputs.chunk(0, 8)
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
    await stream.put(open_item(chunk_pb2.EdgeKey(request_id="r" * 257, edge="x", attempt=1)))
    await stream.until(lambda: stream.ended, "the end of the stream")
