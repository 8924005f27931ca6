"""Runs the conformance kit for each built-in connector."""

from stagemesh.common.connector_descriptors import GRPC, NIXL, SHM
from stagemesh.connectors.conformance import ConnectorSuite, FlowSuite


class TestShm(ConnectorSuite):
    connector = SHM


class TestNixl(ConnectorSuite):
    connector = NIXL


class TestGrpc(FlowSuite):
    connector = GRPC
