"""Runs the conformance kit for each built-in connector."""

from stagemesh.connectors.conformance import ConnectorSuite, FlowSuite
from stagemesh.connectors.edge import GRPC, NIXL, SHM


class TestShm(ConnectorSuite):
    connector = SHM


class TestNixl(ConnectorSuite):
    connector = NIXL


class TestGrpc(FlowSuite):
    connector = GRPC
