"""What every suite of the kit knows: the connector that it is run for."""

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager, nullcontext
from typing import ClassVar

import pytest

from stagemesh.common.connector_descriptors import ConnectorDescriptor, ConnectorName, descriptor_of, registered
from stagemesh.connectors.conformance.replicas import Host, open_flow, receive_all, send_all, two_hosts
from stagemesh.connectors.edge import Packet

BOUND_S = 30.0
"""What takes longer has failed."""


@pytest.mark.asyncio
class Suite:
    """Tests of one connector. They are skipped, with the reason, where it is not installed."""

    connector: ClassVar[ConnectorName]
    """The connector's name."""
    card: ClassVar[ConnectorDescriptor | None] = None
    """Its card, as long as no entry point names it."""

    @pytest.fixture(autouse=True)
    def _known(self) -> Iterator[None]:
        with _registered(self.card):
            missing = descriptor_of(self.connector).missing()
            if missing:
                pytest.skip(missing)
            yield

    def hosts(self, **limits: int) -> AbstractAsyncContextManager[tuple[Host, Host]]:
        """A producer and a consumer between which nothing goes inline, so that the connector carries all."""
        return two_hosts(**{"inline_limit_bytes": 0, **limits})

    async def carry(
        self, producer: Host, consumer: Host, packets: Sequence[Packet], *, request: str = "r"
    ) -> list[Packet]:
        """Sends packets over a flow of the connector; returns copies of those that come."""
        outlet, inlet = open_flow(producer, consumer, request=request, connector=self.connector)
        async with asyncio.timeout(BOUND_S):
            _, received = await asyncio.gather(send_all(outlet, packets), receive_all(inlet))
        assert outlet.usage.connector == self.connector
        return received


def _registered(card: ConnectorDescriptor | None) -> AbstractContextManager[None]:
    return nullcontext() if card is None else registered(card)
