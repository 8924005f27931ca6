"""Runs the conformance kit for each built-in connector."""

from stagemesh.common.plugins.connectors import GRPC, NIXL, SHM
from stagemesh.conformance import ConnectorSuite, FlowSuite


class TestShm(ConnectorSuite):
    connector = SHM


class TestNixl(ConnectorSuite):
    connector = NIXL


class TestGrpc(FlowSuite):
    connector = GRPC
