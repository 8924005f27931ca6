"""The connectors with which every fault is tested."""

from stagemesh.common.plugins.connectors import ConnectorName

CONNECTORS = ("shm", "nixl", "grpc")


def named(name: str) -> ConnectorName:
    """Returns the connector of that name."""
    return ConnectorName(name)
