"""The counts of a data plane, compared with what the test itself counts."""

import asyncio
import time
from typing import Any

import pytest

from stagemesh.conformance import Host, send_all
from stagemesh.connectors.flow.edge_meters import OTHER_EDGES, EdgeMeter, EdgeMeters
from stagemesh.connectors.flow.outlet_attempt import OutletAttempt
from tests.connectors import EACH_CONNECTOR
from tests.connectors.contents import packet_of
from tests.connectors.hosts import flow_of_hosts

CHUNKS = 40


def _meter(host: Host, connector: str) -> EdgeMeter:
    (meter,) = [meter for _, used, meter in host.plane.meters if used == connector]
    return meter


class Transfers:
    """The sum of the seconds of all transfers, as the test measures it: a lower and an upper bound."""

    def __init__(self) -> None:
        self.count = 0
        self.least_s = self.most_s = 0.0


@pytest.fixture
def transfers(monkeypatch: pytest.MonkeyPatch) -> Transfers:
    sent_s, measured, encode, acknowledge = dict[int, tuple[float, float]](), Transfers(), "_encode", "acknowledge"
    inner_encode, inner_acknowledge = getattr(OutletAttempt, encode), OutletAttempt.acknowledge

    def timed_encode(attempt: OutletAttempt, chunk: Any, sent: Any, **options: Any) -> None:
        before_s = time.perf_counter()
        inner_encode(attempt, chunk, sent, **options)
        if sent.tail is None:
            sent_s[sent.seq] = (before_s, time.perf_counter())

    def timed_acknowledge(attempt: OutletAttempt, next_seq: int) -> None:
        before_s = time.perf_counter()
        inner_acknowledge(attempt, next_seq)
        after_s = time.perf_counter()
        for first_s, last_s in [sent_s.pop(seq) for seq in list(sent_s) if seq < next_seq]:
            measured.count += 1
            measured.least_s += before_s - last_s
            measured.most_s += after_s - first_s

    monkeypatch.setattr(OutletAttempt, encode, timed_encode)
    monkeypatch.setattr(OutletAttempt, acknowledge, timed_acknowledge)
    return measured


@EACH_CONNECTOR
async def test_bytes_and_seconds_are_those_that_were_transferred(connector: str, transfers: Transfers) -> None:
    packets = [packet_of("r", seq, size_bytes=1000 + 977 * seq) for seq in range(CHUNKS)]
    async with flow_of_hosts(connector=connector) as (a, _, outlet, inlet):

        async def receive() -> None:
            async for _ in inlet:
                # Chunks then wait to be acknowledged for different times.
                await asyncio.sleep(0.001)

        await asyncio.gather(send_all(outlet, packets), receive())
        meter = _meter(a, connector)
    assert meter.size_bytes == sum(packet.size_bytes for packet in packets)
    assert meter.transfer_s.count == CHUNKS == transfers.count
    assert 0.99 * transfers.least_s <= meter.transfer_s.sum <= 1.01 * transfers.most_s
    assert transfers.most_s < 1.5 * transfers.least_s, "the test cannot tell a wrong time"
    assert meter.resent == 0


@EACH_CONNECTOR
async def test_the_wait_for_credit_is_counted(connector: str) -> None:
    packet = packet_of("r", 0, size_bytes=60_000)
    async with flow_of_hosts({"window_bytes": 64_000}, connector=connector) as (a, _, outlet, inlet):
        await outlet.send(packet)
        # The first chunk waits until the consumer has accepted the flow.
        before_s, began_s = _meter(a, connector).credit_wait_s, time.monotonic()
        sending = asyncio.create_task(outlet.send(packet))
        while not outlet.chunks.wanted_bytes:
            await asyncio.sleep(0)
        await asyncio.sleep(0.3)
        packets = aiter(inlet)
        await anext(packets)
        await sending
        waited_s = time.monotonic() - began_s
        finishing = asyncio.create_task(outlet.finish())
        assert len([each async for each in packets]) == 1
        await finishing
        assert 0.3 <= _meter(a, connector).credit_wait_s - before_s <= waited_s


def test_further_names_of_edges_are_counted_together() -> None:
    meters = EdgeMeters()
    for number in range(2000):
        meters.of(f"edge {number}", "shm").add(1, 0.0)
    counted = list(meters)
    assert len(counted) == 1025
    assert {edge: meter.size_bytes for edge, _, meter in counted}[OTHER_EDGES] == 2000 - 1024
