"""The connectors that every fault is tried on."""

from stagemesh.common.connector_descriptors import ConnectorName

CONNECTORS = ("shm", "nixl", "grpc")


def named(name: str) -> ConnectorName:
    """The connector of that name."""
    return ConnectorName(name)
