"""The base of all suites of the kit: the connector under test."""

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager, nullcontext
from typing import ClassVar

import pytest

from stagemesh.common.connector_descriptors import ConnectorDescriptor, ConnectorName, descriptor_of, registered
from stagemesh.connectors.conformance.replicas import Host, open_flow, receive_all, send_all, two_hosts
from stagemesh.connectors.edge import Packet

BOUND_S = 30.0
"""A test step that takes longer has failed."""


@pytest.mark.asyncio
class Suite:
    """Tests one connector. The tests are skipped, with the reason, if it is not installed."""

    connector: ClassVar[ConnectorName]
    """The connector's name."""
    descriptor: ClassVar[ConnectorDescriptor | None] = None
    """Its descriptor, if no entry point names one."""

    @pytest.fixture(autouse=True)
    def _known(self) -> Iterator[None]:
        with _registered(self.descriptor):
            missing = descriptor_of(self.connector).missing()
            if missing:
                pytest.skip(missing)
            yield

    def hosts(self, **limits: int) -> AbstractAsyncContextManager[tuple[Host, Host]]:
        """Yields a producer and a consumer that send no tensor inline, so that the connector transfers all bytes."""
        return two_hosts(**{"inline_limit_bytes": 0, **limits})

    async def carry(
        self, producer: Host, consumer: Host, packets: Sequence[Packet], *, request: str = "r"
    ) -> list[Packet]:
        """Sends packets over a flow of the connector and returns copies of the received ones."""
        outlet, inlet = open_flow(producer, consumer, request=request, connector=self.connector)
        async with asyncio.timeout(BOUND_S):
            _, received = await asyncio.gather(send_all(outlet, packets), receive_all(inlet))
        assert outlet.usage.connector == self.connector
        return received


def _registered(descriptor: ConnectorDescriptor | None) -> AbstractContextManager[None]:
    return nullcontext() if descriptor is None else registered(descriptor)
