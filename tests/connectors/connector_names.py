"""The connectors that every fault is tried on."""

from stagemesh.connectors.edge import ConnectorName

CONNECTORS = ("shm", "nixl", "grpc")


def named(name: str) -> ConnectorName:
    """The connector of that name."""
    return ConnectorName(name)
