import pytest

from stagemesh.common.plugins.connectors import GRPC, NIXL, SHM

CONNECTORS = (SHM, NIXL, GRPC)
"""The connectors with which every fault is tested."""
EACH_CONNECTOR = pytest.mark.parametrize("connector", CONNECTORS)
