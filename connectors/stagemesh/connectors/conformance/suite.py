"""The base class of all suites of the conformance kit, which determines the connector under test."""

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager, nullcontext
from typing import ClassVar

import pytest

from stagemesh.common.connector_descriptors import ConnectorDescriptor, ConnectorName, descriptor_of, registered
from stagemesh.connectors.conformance.replicas import Host, open_flow, receive_all, send_all, two_hosts
from stagemesh.connectors.edge import Packet

BOUND_S = 30.0
"""The time limit in seconds for one step of a test."""


@pytest.mark.asyncio
class Suite:
    """Tests one connector. If the connector is not installed, the tests are skipped with the reason."""

    connector: ClassVar[ConnectorName]
    """The name of the connector under test."""
    descriptor: ClassVar[ConnectorDescriptor | None] = None
    """The descriptor of the connector, or None if an entry point registers the descriptor."""

    @pytest.fixture(autouse=True)
    def _known(self) -> Iterator[None]:
        with _registered(self.descriptor):
            missing = descriptor_of(self.connector).missing()
            if missing:
                pytest.skip(missing)
            yield

    def hosts(self, **limits: int) -> AbstractAsyncContextManager[tuple[Host, Host]]:
        """Yields a producer and a consumer that do not send tensors inline. The connector transfers all bytes."""
        return two_hosts(**{"inline_limit_bytes": 0, **limits})

    async def carry(
        self, producer: Host, consumer: Host, packets: Sequence[Packet], *, request: str = "r"
    ) -> list[Packet]:
        """Sends packets over a flow that uses the connector and returns copies of the received packets."""
        outlet, inlet = open_flow(producer, consumer, request=request, connector=self.connector)
        async with asyncio.timeout(BOUND_S):
            _, received = await asyncio.gather(send_all(outlet, packets), receive_all(inlet))
        assert outlet.usage.connector == self.connector
        return received


def _registered(descriptor: ConnectorDescriptor | None) -> AbstractContextManager[None]:
    return nullcontext() if descriptor is None else registered(descriptor)
