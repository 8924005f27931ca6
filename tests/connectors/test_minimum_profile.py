"""A stage that is made of stubs and docs/protocol.md alone receives flows and sends them on, between real replicas."""

import asyncio

import grpc
import pytest

from stagemesh.common.wire.chunk_sizes import StepPolicy
from stagemesh.conformance import Host, assert_same, packet, receive_all, send_all
from stagemesh.connectors.packets import ConsumerAddress, EdgeKey, Packet
from stagemesh.v1 import chunk_pb2
from tests.connectors.minimum_profile import (
    LIMITS,
    WINDOW_BYTES,
    Identity,
    MinimumConsumer,
    Received,
    send_on,
    stage_service,
)

IDENTITY = Identity("m-0", "1", "p", "g")


@pytest.mark.parametrize("size_bytes", [0, 300, 30_000, 200_000, 700_000])
async def test_a_stage_of_the_minimum_profile_passes_chunks_on(size_bytes: int) -> None:
    stage, server = MinimumConsumer(IDENTITY), grpc.aio.server(options=LIMITS)
    server.add_generic_rpc_handlers((stage_service(PutChunk=stage.handler()),))
    endpoint = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    a, c = await Host.started("a-0"), await Host.started("c-0", window_bytes=WINDOW_BYTES)
    sent: list[Packet] = [packet(seq, size_bytes) for seq in range(4)]
    try:
        received = stage.flows["r"] = Received()
        outlet = a.plane.open_outlet(
            EdgeKey("r", "a->m", 1), ConsumerAddress("m-0", endpoint), connector="auto", policy=StepPolicy()
        )
        await send_all(outlet, sent)
        await received.ended.wait()
        inlet = c.plane.open_inlet(EdgeKey("r", "m->c", 1), producer="m-0")
        key = chunk_pb2.EdgeKey(request_id="r", edge="m->c", attempt=1)
        _, arrived = await asyncio.gather(
            send_on(key, received.chunks, identity=IDENTITY, endpoint=c.endpoint), receive_all(inlet)
        )
        assert_same(arrived, sent)
        assert "offer" not in stage.kinds
    finally:
        await a.close()
        await c.close()
        await server.stop(None)
