"""The conformance kit, for each connector that comes with Stagemesh."""

from stagemesh.common.connector_descriptors import GRPC, NIXL, SHM
from stagemesh.connectors.conformance import ConnectorSuite, FlowSuite


class TestShm(ConnectorSuite):
    connector = SHM


class TestNixl(ConnectorSuite):
    connector = NIXL


class TestGrpc(FlowSuite):
    connector = GRPC
