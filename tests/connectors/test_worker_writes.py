"""Packets that an engine's worker process writes reach another replica's engine without another copy."""

import asyncio
import multiprocessing
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection

import pytest

from stagemesh.common.plugins.connectors import GRPC, NIXL, SHM, ConnectorName
from stagemesh.conformance import assert_same, receive_all
from stagemesh.connectors.arena.worker_writer import ArenaWriter, Handle, PartitionAddress
from stagemesh.connectors.data_plane import DataPlane
from stagemesh.connectors.flow.outlet import FanOut, Outlet
from stagemesh.connectors.packets import Packet
from tests.connectors.contents import write_tensors
from tests.connectors.hosts import open_flow, packet, two_hosts

MIB = 1 << 20
COUNT = 80
SLAB_BYTES = 6 * MIB
"""More bytes than the data plane keeps of delivered chunks, which is a quarter of the arena."""
SPAWN = multiprocessing.get_context("spawn")
ALL = pytest.mark.parametrize("connector", [SHM, NIXL, GRPC])


def _write_packets(ticket: PartitionAddress, connection: Connection) -> None:
    writer = ArenaWriter(ticket)
    for seq in range(COUNT):
        connection.send(write_tensors(writer, packet(seq, 50_000).tensors, 30))


@contextmanager
def _worker(ticket: PartitionAddress) -> Iterator[Connection]:
    """Runs a process that writes packets and yields the connection over which it sends handles."""
    ours, theirs = SPAWN.Pipe()
    process = SPAWN.Process(target=_write_packets, args=(ticket, theirs), daemon=True)
    process.start()
    theirs.close()
    try:
        yield ours
    finally:
        process.kill()
        process.join()
        process.close()
        ours.close()


async def _forward(plane: DataPlane, outlet: Outlet | FanOut) -> None:
    """Sends the packets of a worker, which reuses its partition many times."""
    ticket = plane.arena.open_partition(SLAB_BYTES)
    with _worker(ticket) as connection:
        for seq in range(COUNT):
            handle: Handle = await asyncio.to_thread(connection.recv)
            await outlet.send(Packet(plane.arena.adopt(handle).held(), {"seq": seq}))
    await outlet.finish()
    plane.arena.close_partition(ticket)


@ALL
async def test_packets_of_a_worker_are_copied_once(connector: ConnectorName) -> None:
    async with two_hosts() as (a, b):
        outlet, inlet = open_flow(a, b, connector=connector)
        _, received = await asyncio.gather(_forward(a.plane, outlet), receive_all(inlet))
        assert_same(received, [packet(seq, 50_000) for seq in range(COUNT)])
        assert outlet.attempt.connector == connector
        assert a.plane.arena.copied_bytes == 0
        await a.settled()


async def test_two_consumers_of_a_worker_need_no_copy() -> None:
    async with two_hosts() as (_, c), two_hosts() as (a, b):
        fan_out = a.plane.fan_out()
        flows = [open_flow(a, consumer, request=f"r{n}") for n, consumer in enumerate((b, c))]
        for outlet, _ in flows:
            fan_out.add(outlet)
        _, *received = await asyncio.gather(_forward(a.plane, fan_out), *(receive_all(inlet) for _, inlet in flows))
        for got in received:
            assert_same(got or [], [packet(seq, 50_000) for seq in range(COUNT)])
        assert a.plane.arena.copied_bytes == 0
        await a.settled()


@ALL
async def test_packet_for_two_consumers_is_written_once(connector: ConnectorName) -> None:
    async with two_hosts() as (_, c), two_hosts() as (a, b):
        fan_out = a.plane.fan_out()
        inlets = []
        for request, consumer in (("r0", b), ("r1", c)):
            outlet, inlet = open_flow(a, consumer, request=request, connector=connector)
            fan_out.add(outlet)
            inlets.append(inlet)
        receiving = asyncio.gather(*map(receive_all, inlets))
        for seq in range(5):
            await fan_out.send(packet(seq, 50_000))
        await fan_out.finish()
        for got in await receiving:
            assert_same(got, [packet(seq, 50_000) for seq in range(5)])
        assert a.plane.arena.copied_bytes == 5 * packet(0, 50_000).size_bytes
        await a.settled()


async def test_packets_of_a_dead_worker_stay_intact() -> None:
    async with two_hosts() as (a, b):
        outlet, inlet = open_flow(a, b, connector=SHM)
        ticket = a.plane.arena.open_partition(SLAB_BYTES)
        with _worker(ticket) as connection:
            tensors = a.plane.arena.adopt(await asyncio.to_thread(connection.recv)).held()
        a.plane.arena.close_partition(ticket)
        await outlet.send(Packet(tensors, {"seq": 0}))
        del tensors
        _, received = await asyncio.gather(outlet.finish(), receive_all(inlet))
        assert_same(received, [packet(0, 50_000)])
        await a.settled()
