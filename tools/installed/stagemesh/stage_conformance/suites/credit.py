"""The credit that the stage grants to producers."""

import asyncio

from stagemesh.common.errors import Code
from stagemesh.stage_conformance.cases import FURTHER, MismatchError, Needs, case, expect, expect_equal
from stagemesh.stage_conformance.played_consumer import Consumer
from stagemesh.stage_conformance.played_producer import Flow, Stream
from stagemesh.stage_conformance.suites.consumer import INPUT, TABLE, more, started
from stagemesh.stage_conformance.trial import Step, Trial, require
from stagemesh.v1 import chunk_pb2, stage_pb2

_LARGE_WINDOW_BYTES = 64 << 20
_CREDIT = "Credit (checklist 13)"


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
    await flow.send(trial.inputs.chunk(0, 4, size_bytes=opened.window_bytes // 3))
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
    inputs = trial.inputs
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
    payload = trial.inputs.chunk(1, 4, size_bytes=window)
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
        await flow.send(trial.inputs.chunk(number, 4, size_bytes=window // parts))
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


@case("consumer.credit-after-break", f"{TABLE}: `opened` has the current credit limits", INPUT, Needs.OUTPUT)
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
