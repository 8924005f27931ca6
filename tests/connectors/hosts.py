"""The conformance kit's replicas: data planes with real gRPC between them."""

from stagemesh.conformance import Host, open_flow, packet, two_hosts

__all__ = ["Host", "open_flow", "packet", "two_hosts"]
