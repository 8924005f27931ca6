"""A consumer that falsely claims to be on its producer's host: it is detected, and served over the network."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
import pytest

from stagemesh.common.errors import NotReadyError
from stagemesh.common.wire.chunk_policies import StepPolicy
from stagemesh.common.wire.versions import own_protocol
from stagemesh.connectors.flow.inlet import Inlet
from stagemesh.connectors.flow.outlet import Outlet
from stagemesh.connectors.packets import EdgeKey, MetadataValue
from stagemesh.rpc.channels import open_channel
from stagemesh.rpc.message_streams import PUT_CHUNK
from stagemesh.v1 import stage_pb2
from tests.connectors.connector_names import named
from tests.connectors.hosts import Host, open_flow, packet, two_hosts
from tests.connectors.relays import relayed

NOBODYS = "stagemesh-nobody-listens-here"


async def _local_socket_of(host: Host) -> str:
    """Returns the local socket name that a replica sends to its producers."""
    async with open_channel(host.endpoint) as channel:
        call: grpc.aio.StreamStreamCall[bytes, bytes] = channel.stream_stream(PUT_CHUNK, None, None)()
        hello = stage_pb2.Hello(
            replica="curious", incarnation="i", pipeline="p", generation="g", protocol=own_protocol()
        )
        await call.write(stage_pb2.PutChunkRequest(hello=hello).SerializeToString())
        answer = await call.read()
        assert isinstance(answer, bytes)
        call.cancel()
        return stage_pb2.PutChunkResponse.FromString(answer).welcome.local_socket


@asynccontextmanager
async def _claimed(connector: str, *, somebodys: bool) -> AsyncIterator[tuple[Host, Host, Outlet, Inlet]]:
    """Yields a flow to a consumer that names another replica's local socket, or one that does not exist."""
    async with two_hosts() as (a, b), relayed(b.endpoint) as relay:
        other = await Host.started("c-0")
        try:
            relay.false_socket = await _local_socket_of(other) if somebodys else NOBODYS
            key = EdgeKey("r", "a->b", 1)
            inlet = b.plane.open_inlet(key, producer="a-0")
            outlet = a.plane.open_outlet(
                key, endpoint=relay.endpoint, consumer="b-0", connector=named(connector), policy=StepPolicy()
            )
            yield a, other, outlet, inlet
        finally:
            await other.close()


async def _carry(outlet: Outlet, inlet: Inlet) -> list[MetadataValue]:
    async def send() -> None:
        for seq in range(5):
            await outlet.send(packet(seq, 100_000))
        await outlet.finish()

    async def receive() -> list[MetadataValue]:
        seqs = [got.metadata["seq"] async for got in inlet]
        await inlet.aclose()
        return seqs

    return (await asyncio.gather(send(), receive()))[1]


@pytest.mark.parametrize("somebodys", [True, False])
async def test_auto_serves_a_false_claimant_over_the_network(somebodys: bool) -> None:
    async with _claimed("auto", somebodys=somebodys) as (a, other, outlet, inlet):
        assert await _carry(outlet, inlet) == list(range(5))
        assert outlet.attempt.connector != "shm"
        # The replica that owns the socket still works.
        assert await _carry(*open_flow(a, other, request="r2", connector=named("shm"))) == list(range(5))


@pytest.mark.parametrize("somebodys", [True, False])
async def test_shm_is_rejected_for_a_false_claimant(somebodys: bool) -> None:
    async with _claimed("shm", somebodys=somebodys) as (_, _, outlet, _):
        with pytest.raises(NotReadyError, match="not on one host"):
            await outlet.send(packet(0, 100_000))
