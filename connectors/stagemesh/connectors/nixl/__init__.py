"""The nixl connector: a consumer READs a producer's arena into its own memory, by RDMA if the hosts have it.

`connector` implements the connector interface and `offer` is the message between its two sides. `remote_arena` reads
one producer's arena: `transfer_plan` turns ranges into transfers, `remote_reads` schedules the transfers of one
producer, `read_thread` runs those of all producers, and `agent` wraps the nixl library.
"""

from stagemesh.connectors.nixl.connector import NixlConnector, NixlReader
from stagemesh.connectors.nixl.environment import describe

__all__ = ["NixlConnector", "NixlReader", "describe"]
