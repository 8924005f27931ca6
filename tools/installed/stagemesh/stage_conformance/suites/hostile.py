"""Hostile inputs: whatever a peer sends, the process survives, and other requests are right."""

import asyncio
import contextlib
import random
from collections.abc import Callable
from typing import Any

import grpc

from stagemesh.common.wire.encoding import varint
from stagemesh.stage_conformance.cases import Needs, case
from stagemesh.stage_conformance.trial import Trial
from stagemesh.v1 import chunk_pb2, stage_pb2

_RULE = "Errors: an error ends one flow or one step; Connections and messages: sizes"
_SEED = 20_240
_METHODS = ("Describe", "ExecuteStep", "ExecuteSteps", "PutChunk", "CancelStep", "RebindStep", "GetChunk", "WatchLoad")


async def _call(channel: grpc.aio.Channel, method: str, *messages: bytes, within_s: float = 2.0) -> None:
    """Calls a method with these messages, and reads for a while what it answers."""
    opener: Any = channel.stream_stream
    call = opener(f"/stagemesh.v1.StageService/{method}")()
    with contextlib.suppress(grpc.aio.AioRpcError, TimeoutError, asyncio.InvalidStateError):
        async with asyncio.timeout(within_s):
            for message in messages:
                await call.write(message)
            await call.done_writing()
            while await call.read() is not grpc.aio.EOF:
                pass
    call.cancel()


def _hello(trial: Trial) -> bytes:
    return stage_pb2.PutChunkRequest(hello=trial.producer().hello()).SerializeToString()


@case("hostile.random-bytes", _RULE, alone=True, variants={each: each for each in _METHODS})
async def random_bytes(trial: Trial, method: str) -> None:
    source = random.Random(_SEED)
    first = [_hello(trial)] if method == "PutChunk" else []
    async with trial.own_channel() as channel:
        await asyncio.gather(
            *(
                _call(channel, method, *first, source.randbytes(source.choice((0, 1, 7, 300, 20_000))))
                for _ in range(40)
            )
        )
    await trial.expect_survival()


@case("hostile.mutated-step", _RULE, alone=True)
async def mutated_step(trial: Trial) -> None:
    source, good = random.Random(_SEED), trial.request().SerializeToString()
    async with trial.own_channel() as channel:
        await asyncio.gather(*(_call(channel, "ExecuteStep", _mutated(good, source), within_s=1.0) for _ in range(100)))
    await trial.expect_survival()


def _mutated(message: bytes, source: random.Random) -> bytes:
    content = bytearray(message)
    for _ in range(source.randint(1, 8)):
        content[source.randrange(len(content))] = source.randrange(256)
    return bytes(content[: source.randint(len(content) // 2, len(content))])


@case("hostile.mutated-flow", _RULE, Needs.INPUT, alone=True)
async def mutated_flow(trial: Trial) -> None:
    source, key = random.Random(_SEED), trial.key_in()
    await trial.start()
    chunk = chunk_pb2.Chunk(key=key, data=trial.inputs.chunk(0, 4).inline())
    opening = stage_pb2.OpenEdge(key=key, connector=chunk_pb2.CONNECTOR_GRPC, opening=1)
    items = [stage_pb2.PutItem(open=opening), stage_pb2.PutItem(chunk=chunk)]
    good = [stage_pb2.PutChunkRequest(items=[each]).SerializeToString() for each in items]
    async with trial.own_channel() as channel:
        for _ in range(50):
            messages = [_mutated(each, source) if source.random() < 0.7 else each for each in good]
            await _call(channel, "PutChunk", _hello(trial), *messages, within_s=0.5)
    await trial.expect_survival()


def _values(count: int) -> bytes:
    step = stage_pb2.ExecuteStepRequest(request_id="r", step_id="s", attempt=1)
    one = stage_pb2.ExecuteStepRequest(absent=[""])
    return step.SerializeToString() + one.SerializeToString() * count


def _nested(depth: int) -> bytes:
    content = b""
    for _ in range(depth):
        content = b"\x0a" + varint(len(content)) + content
    return content


_LARGE: dict[str, tuple[str, Callable[[], bytes]]] = {
    "many-values": ("ExecuteStep", lambda: _values(3_000_000)),
    "many-options": (
        "ExecuteStep",
        lambda: b"".join(b"\x2a\x08\x12\x06\x0a\x04" + b"%04d" % each for each in range(9999)),
    ),
    "nested": ("ExecuteStep", lambda: _nested(3000)),
    "many-items": ("PutChunk", lambda: b"\x12\x00" * 1_000_000),
    "many-tensors": (
        "PutChunk",
        lambda: stage_pb2.PutChunkRequest(
            items=[stage_pb2.PutItem(chunk=chunk_pb2.Chunk(data=chunk_pb2.ChunkData.FromString(b"\x0a\x00" * 100_000)))]
        ).SerializeToString(),
    ),
    "zeros": ("PutChunk", lambda: bytes(4 << 20)),
    "above-8-mib": ("PutChunk", lambda: b"\x12\x80\x80\x80\x05" + bytes(10 << 20)),
    "many-steps": ("ExecuteSteps", lambda: b"\x08\x01\x12\x00" * 100_000),
}


@case("hostile.large", _RULE, alone=True, variants=_LARGE)
async def large(trial: Trial, variant: tuple[str, Callable[[], bytes]]) -> None:
    method, make = variant
    first = [_hello(trial)] if method == "PutChunk" else []
    content = make()
    async with trial.own_channel() as channel:
        for _ in range(2):
            await _call(channel, method, *first, content)
    await trial.expect_survival()


@case("hostile.many-streams", _RULE, alone=True)
async def many_streams(trial: Trial) -> None:
    hello = _hello(trial)
    async with trial.own_channel() as channel:
        await asyncio.gather(*(_call(channel, "PutChunk", hello, within_s=1.0) for _ in range(100)))
    await trial.expect_survival()


@case("hostile.many-openings", _RULE, alone=True)
async def many_openings(trial: Trial) -> None:
    items = [
        stage_pb2.PutItem(
            open=stage_pb2.OpenEdge(
                key=chunk_pb2.EdgeKey(request_id=f"flood.{number}", edge="x->y", attempt=1),
                connector=chunk_pb2.CONNECTOR_GRPC,
                opening=1,
            )
        )
        for number in range(2000)
    ]
    message = stage_pb2.PutChunkRequest(items=items).SerializeToString()
    async with trial.own_channel() as channel:
        await _call(channel, "PutChunk", _hello(trial), *[message] * 5)
    await trial.expect_survival()


@case("hostile.many-steps", _RULE, alone=True)
async def many_steps(trial: Trial) -> None:
    messages = [trial.request(request_id=f"{trial.request_id}.s{number}").SerializeToString() for number in range(64)]
    async with trial.own_channel() as channel:
        await asyncio.gather(*(_call(channel, "ExecuteStep", each, within_s=0.3) for each in messages))
    for number in range(64):
        request = stage_pb2.CancelStepRequest(request_id=f"{trial.request_id}.s{number}")
        with contextlib.suppress(grpc.aio.AioRpcError):
            await trial.stub.CancelStep(request, timeout=5)
    await trial.expect_survival()


@case("hostile.random-answers", _RULE, Needs.OUTPUT, alone=True)
async def random_answers(trial: Trial) -> None:
    """A consumer answers with bytes that are not a message."""
    source = random.Random(_SEED)

    async def put_chunk(requests: Any, context: Any) -> None:
        for _ in range(20):
            await context.write(source.randbytes(source.choice((1, 9, 400))))
        async for _ in requests:
            await context.write(source.randbytes(50))

    make: Any = grpc.stream_stream_rpc_method_handler
    server = grpc.aio.server()
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler("stagemesh.v1.StageService", {"PutChunk": make(put_chunk)}),)
    )
    port = server.add_insecure_port("0.0.0.0:0")
    await server.start()
    try:
        consumer = await trial.consumer()
        request = trial.request(consumer)
        request.outputs[0].endpoint = f"{trial.stage.host}:{port}"
        step = trial.call(request)
        if trial.inputs.tensors:
            await step.accepted()
            await (await trial.stream()).open(trial.key_in())
        await asyncio.sleep(1.0)
    finally:
        await server.stop(0)
    await trial.expect_survival()
