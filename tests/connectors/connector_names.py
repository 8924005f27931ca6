"""The connectors that every fault test runs with."""

from stagemesh.common.connector_descriptors import ConnectorName

CONNECTORS = ("shm", "nixl", "grpc")


def named(name: str) -> ConnectorName:
    """Returns the connector of a test parameter."""
    return ConnectorName(name)
