"""A stage that is made of stubs and docs/protocol.md alone receives flows and sends them on, between real replicas."""

import asyncio

import pytest

from stagemesh.common.wire.chunk_sizes import StepPolicy
from stagemesh.conformance import assert_same, packet, receive_all, send_all
from stagemesh.connectors.packets import ConsumerAddress, EdgeKey, Packet
from stagemesh.v1 import chunk_pb2
from tests.connectors import minimum_profile
from tests.connectors.hosts import serving, started_host

IDENTITY = minimum_profile.Identity("m-0", "1", "p", "g")


@pytest.mark.parametrize("size_bytes", [0, 300, 30_000, 200_000, 700_000])
async def test_a_stage_of_the_minimum_profile_passes_chunks_on(size_bytes: int) -> None:
    stage = minimum_profile.MinimumConsumer(IDENTITY)
    received = stage.flows["r"] = minimum_profile.Received()
    sent: list[Packet] = [packet(seq, size_bytes) for seq in range(4)]
    async with (
        serving(minimum_profile.stage_service(PutChunk=stage.handler()), minimum_profile.LIMITS) as endpoint,
        started_host("a-0") as a,
        started_host("c-0", window_bytes=minimum_profile.WINDOW_BYTES) as c,
    ):
        outlet = a.plane.open_outlet(
            EdgeKey("r", "a->m", 1), ConsumerAddress("m-0", endpoint), connector="auto", policy=StepPolicy()
        )
        await send_all(outlet, sent)
        await received.ended.wait()
        inlet = c.plane.open_inlet(EdgeKey("r", "m->c", 1), producer="m-0")
        key = chunk_pb2.EdgeKey(request_id="r", edge="m->c", attempt=1)
        _, arrived = await asyncio.gather(
            minimum_profile.send_on(key, received.chunks, identity=IDENTITY, endpoint=c.endpoint), receive_all(inlet)
        )
        assert_same(arrived, sent)
        assert "offer" not in stage.kinds
