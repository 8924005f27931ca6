"""`DataPlane.probe`: the connector that a flow would use, without a flow."""

import asyncio

import pytest

from stagemesh.common.errors import InvalidRequestError, NotReadyError, UnavailableError
from stagemesh.common.plugins import connectors
from stagemesh.common.plugins.connectors import AUTO, GRPC, NIXL, SHM, ConnectorName
from stagemesh.conformance import Host, open_flow, packet, two_hosts
from stagemesh.connectors.packets import ConsumerAddress
from stagemesh.connectors.shm import ShmConnector
from stagemesh.connectors.stream.connector_agreement import EdgeProbe
from tests.rpc.call_errors import raises


async def _probe(producer: Host, consumer: Host, connector: ConnectorName = AUTO) -> EdgeProbe:
    return await producer.plane.probe(ConsumerAddress(consumer.replica, consumer.endpoint), connector)


@pytest.mark.parametrize(("connector", "found"), [(AUTO, SHM), (SHM, SHM), (GRPC, GRPC)])
async def test_probe_returns_the_connector_of_a_flow(connector: ConnectorName, found: ConnectorName) -> None:
    async with two_hosts() as (a, b):
        assert await _probe(a, b, connector) == EdgeProbe(found, {})


async def test_probe_and_flow_share_a_link() -> None:
    async with two_hosts() as (a, b):
        probing = asyncio.create_task(_probe(a, b))
        outlet, inlet = open_flow(a, b)
        await outlet.send(packet(0, 10_000))
        assert (await anext(aiter(inlet))).metadata["seq"] == 0
        assert (await probing).connector == outlet.attempt.connector


async def test_probe_returns_better_connectors_with_their_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    async def refuse(self: ShmConnector) -> bytes:
        raise NotReadyError("no memory is shared here", reason="CONNECTOR_UNAVAILABLE")

    monkeypatch.setattr(ShmConnector, "offer", refuse)
    _without_nixl(monkeypatch)
    async with two_hosts() as (a, b):
        found = await _probe(a, b)
    assert (found.connector, list(found.refusals)) == (GRPC, [SHM, NIXL])
    assert "nixl_cu12 is not installed" in found.refusals[NIXL].message


async def test_fixed_connector_that_cannot_work_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    _without_nixl(monkeypatch)
    async with two_hosts() as (a, b):
        with raises(
            NotReadyError,
            reason="CONNECTOR_UNAVAILABLE",
            match=r"nixl cannot be used with replica b-0: .*stagemesh\[nixl",
        ):
            await _probe(a, b, NIXL)


async def test_unknown_connector_is_named() -> None:
    async with two_hosts() as (a, b):
        with pytest.raises(InvalidRequestError, match="unknown connector 'pigeon'; use one of auto, shm"):
            await _probe(a, b, "pigeon")


async def test_probe_of_an_absent_consumer_is_unavailable() -> None:
    async with two_hosts() as (a, b):
        await b.server.stop(None)
        with pytest.raises(UnavailableError, match=f"b-0 at {b.endpoint}"):
            await _probe(a, b)


async def test_probe_ends_with_its_replica() -> None:
    async with two_hosts() as (a, b):
        await b.server.stop(None)
        probing = asyncio.create_task(_probe(a, b))
        await asyncio.sleep(0)
        await a.plane.close()
        with pytest.raises(UnavailableError):
            await probing


async def test_restarted_consumer_is_probed_again() -> None:
    async with two_hosts() as (a, b):
        await _probe(a, b)
        await b.close()
        with pytest.raises(UnavailableError):
            while True:
                await _probe(a, b)
                await asyncio.sleep(0)
        successor = await Host.started("b-0", listen=b.endpoint)
        assert (await _probe(a, b)).connector == SHM
        await successor.close()


def _without_nixl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connectors, "find_spec", lambda _: None)
