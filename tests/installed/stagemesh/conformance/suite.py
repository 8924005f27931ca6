"""The base class of all test suites in the conformance kit. Each suite tests one connector."""

import asyncio
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import asynccontextmanager, nullcontext
from typing import ClassVar

import pytest

from stagemesh.common.plugins.connectors import ConnectorDescriptor, ConnectorName, descriptor_of, registered
from stagemesh.conformance.replicas import Host, exchange, open_flow, two_hosts
from stagemesh.connectors.packets import Packet

BOUND_S = 60.0
"""The time limit in seconds for a test."""


@pytest.mark.asyncio
class Suite:
    """The base class of the test suites. If the connector is not installed, the tests are skipped with the reason."""

    connector: ClassVar[ConnectorName]
    """The name of the connector under test."""
    descriptor: ClassVar[ConnectorDescriptor | None] = None
    """The descriptor to register for the tests, or None if the connector is already registered."""

    @pytest.fixture(autouse=True)
    def _known(self) -> Iterator[None]:
        with nullcontext() if self.descriptor is None else registered(self.descriptor):
            missing = descriptor_of(self.connector).missing()
            if missing:
                pytest.skip(missing)
            yield

    @asynccontextmanager
    async def hosts(self, **limits: int) -> AsyncGenerator[tuple[Host, Host]]:
        """Yields a producer and a consumer. The connector transfers all bytes, because no tensor is sent inline.

        `limits` are size limits in bytes that are passed to DataPlane. Raises TimeoutError if the body of the `async
        with` block takes longer than BOUND_S seconds.
        """
        async with two_hosts(**{"inline_limit_bytes": 0, **limits}) as hosts, asyncio.timeout(BOUND_S):
            yield hosts

    async def carry(
        self, producer: Host, consumer: Host, packets: Sequence[Packet], *, request: str = "r", endpoint: str = ""
    ) -> list[Packet]:
        """Sends packets over a flow that uses the connector under test. Returns copies of the received packets.

        `request` is the id of the flow's request. The producer connects to `endpoint`, or to the consumer's endpoint if
        `endpoint` is empty.
        """
        outlet, inlet = open_flow(producer, consumer, request=request, connector=self.connector, endpoint=endpoint)
        received = await exchange(outlet, inlet, packets)
        assert outlet.attempt.connector == self.connector
        return received
