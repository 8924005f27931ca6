"""The conformance kit: tests that check all guarantees of the data plane for a given connector.

    from stagemesh.conformance import ConnectorSuite

    class TestMine(ConnectorSuite):
        connector = "mine"

The kit requires pytest and pytest-asyncio. The tests run real data planes with real gRPC on loopback in the test's
event loop.
"""

import pytest

_MODULES = ("replicas", "suite", "data_suite", "fault_suite", "reader_suite")
pytest.register_assert_rewrite(*(f"{__name__}.{module}" for module in _MODULES))

from stagemesh.conformance.data_suite import DataSuite  # noqa: E402 - asserts are rewritten only in later imports
from stagemesh.conformance.fault_suite import FaultSuite, Proxy, proxied  # noqa: E402
from stagemesh.conformance.reader_suite import ReaderSuite  # noqa: E402
from stagemesh.conformance.replicas import (  # noqa: E402
    Host,
    assert_same,
    exchange,
    open_flow,
    open_outlet,
    packet,
    receive_all,
    send_all,
    two_hosts,
    until,
)

__all__ = [
    "ConnectorSuite",
    "FlowSuite",
    "Host",
    "Proxy",
    "assert_same",
    "exchange",
    "open_flow",
    "open_outlet",
    "packet",
    "proxied",
    "receive_all",
    "send_all",
    "two_hosts",
    "until",
]


class FlowSuite(DataSuite, FaultSuite):
    """The test suites that apply to every connector, including `grpc`, which does not read arenas."""


class ConnectorSuite(FlowSuite, ReaderSuite):
    """All test suites of the kit, for connectors that read arenas."""
