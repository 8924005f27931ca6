"""The nixl connector: a consumer READs a producer's arena into memory of its own, by RDMA where there is any.

`connector` is the seam's two roles, `offer` what travels between them, `plan` how ranges become pieces of a transfer,
`pump` the thread that carries transfers, `agent` the border to the nixl library.
"""

from stagemesh.connectors.nixl.connector import NixlConnector, NixlReader
from stagemesh.connectors.nixl.environment import describe

__all__ = ["NixlConnector", "NixlReader", "describe"]
